// Rows of a few consecutive tokens of one head, unpacked into a tile of f32 in the first cache.
//
// unpack<FORMAT>(codes, scales, next, num_elements, factor, tile): the rows' codes are contiguous,
// and so are their scales, so the tile is one run of groups whatever the head size. The floats are
// those of Block<FORMAT>::decode. num_elements is a multiple of 16 (of 32 for the ggml formats), at
// most TILE_ELEMENTS. `next` is as many bytes of codes that are wanted soon: they are asked for a
// few at a time, as a burst would wait for the memory's queue.
#pragma once

#include "../codec/blocks.h"
#include "f32x16.h"

namespace memkv {

constexpr int MAX_HEAD = 576;
constexpr int TILE_KEYS = 16;
constexpr int TILE_ELEMENTS = TILE_KEYS * MAX_HEAD;

template <int FORMAT>
static void unpack_groups(const uint8_t* codes, const uint8_t* scales, int num_elements, float factor, float* tile) {
  using B = Block<FORMAT>;
  for (int at = 0; at < num_elements; at += B::group, codes += B::code_bytes, scales += B::scale_bytes) {
    B::decode(codes, scales, tile + at, factor);
  }
}

#if defined(MEMKV_AVX512)

// f16 to f32; 2 * count bytes from `halves` on are read and no more.
static inline void widen_halves(const uint8_t* halves, int count, float* out, const uint8_t* next = nullptr) {
  int at = 0;
  for (; at + LANES <= count; at += LANES) {
    if (next != nullptr) __builtin_prefetch(next + 2 * at, 0, 2);
    const __m256i bits = _mm256_loadu_si256((const __m256i*)(halves + 2 * at));
    _mm512_storeu_ps(out + at, _mm512_cvtph_ps(bits));
  }
  if (at < count) {
    const __mmask16 mask = (__mmask16)((1u << (count - at)) - 1u);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, halves + 2 * at);
    _mm512_mask_storeu_ps(out + at, mask, _mm512_cvtph_ps(bits));
  }
}

static inline __m512i widen_bytes(const uint8_t* at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
}

// A group's elements are looked up in a table of all values it can hold: code times d (exact in
// f32), plus m where there is one (rounded once, as decode does).
template <bool Fifth, bool Minimum>
static void unpack_nibbles(const uint8_t* codes, const uint8_t* scales, const uint8_t* next, int num_elements,
                           float* tile) {
  constexpr int code_bytes = Fifth ? 20 : 16, halves = Minimum ? 2 : 1;
  alignas(64) float wide[TILE_ELEMENTS / 32 * 2];
  const int groups = num_elements / 32;
  widen_halves(scales, groups * halves, wide);
  const float zero_code = Minimum ? 0.0f : Fifth ? 16.0f : 8.0f;
  const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 low_codes = _mm512_sub_ps(count, _mm512_set1_ps(zero_code));
  const __m512 high_codes = _mm512_add_ps(low_codes, _mm512_set1_ps(16.0f));
  const __m512i sixteen = _mm512_set1_epi32(16), fifteen = _mm512_set1_epi32(15);
  for (int i = 0; i < groups; ++i, codes += code_bytes, next += code_bytes, tile += 32) {
    __builtin_prefetch(next, 0, 2);
    const __m512 d = _mm512_set1_ps(wide[i * halves]);
    const __m512 m = _mm512_set1_ps(Minimum ? wide[i * halves + 1] : 0.0f);
    const __m512 table = Minimum ? _mm512_fmadd_ps(low_codes, d, m) : _mm512_mul_ps(low_codes, d);
    const __m512i bytes = widen_bytes(codes), upper = _mm512_srli_epi32(bytes, 4);
    if (Fifth) {
      const __m512 high_table = Minimum ? _mm512_fmadd_ps(high_codes, d, m) : _mm512_mul_ps(high_codes, d);
      uint32_t fifth;
      memcpy(&fifth, codes + 16, 4);
      const __m512i lower = _mm512_and_si512(bytes, fifteen);
      const __m512i first = _mm512_mask_or_epi32(lower, (__mmask16)fifth, lower, sixteen);
      const __m512i second = _mm512_mask_or_epi32(upper, (__mmask16)(fifth >> 16), upper, sixteen);
      _mm512_storeu_ps(tile, _mm512_permutex2var_ps(table, first, high_table));
      _mm512_storeu_ps(tile + 16, _mm512_permutex2var_ps(table, second, high_table));
    } else {
      _mm512_storeu_ps(tile, _mm512_permutexvar_ps(bytes, table));
      _mm512_storeu_ps(tile + 16, _mm512_permutexvar_ps(upper, table));
    }
  }
}

template <int FORMAT>
static void unpack(const uint8_t* codes, const uint8_t* scales, const uint8_t* next, int num_elements, float factor,
                   float* tile) {
  if constexpr (FORMAT == F32) {
    for (int at = 0; at < num_elements; at += LANES) {
      __builtin_prefetch(next + 4 * at, 0, 2);
      _mm512_storeu_ps(tile + at, _mm512_loadu_ps((const float*)codes + at));
    }
  } else if constexpr (FORMAT == F16) {
    widen_halves(codes, num_elements, tile, next);
  } else if constexpr (FORMAT == BF16) {
    for (int at = 0; at < num_elements; at += LANES) {
      __builtin_prefetch(next + 2 * at, 0, 2);
      const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(codes + 2 * at)));
      _mm512_storeu_ps(tile + at, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
    }
  } else if constexpr (FORMAT == FP8) {
    // E4M3 fields are those of an f16 whose exponent counts from 15 instead of 7: 2^8 too small.
    const __m512 bias = _mm512_set1_ps(256.0f), scale = _mm512_set1_ps(factor);
    for (int at = 0; at < num_elements; at += LANES) {
      __builtin_prefetch(next + at, 0, 2);
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(codes + at));
      const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
      const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xBF80));
      const __m512 value = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtph_ps(halves), bias), scale);
      const __m128i size = _mm_and_si128(bytes, _mm_set1_epi8(0x7F));
      const __mmask16 nan = _mm_cmpeq_epi8_mask(size, _mm_set1_epi8(E4M3_NAN));
      _mm512_storeu_ps(tile + at, _mm512_mask_blend_ps(nan, value, _mm512_set1_ps(float_of(F32_NAN))));
    }
  } else if constexpr (FORMAT == Q8_0) {
    alignas(64) float wide[TILE_ELEMENTS / 32];
    widen_halves(scales, num_elements / 32, wide);
    for (int i = 0; i < num_elements / 32; ++i, codes += 32, next += 32, tile += 32) {
      __builtin_prefetch(next, 0, 2);
      const __m512 d = _mm512_set1_ps(wide[i]);
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(codes + 16)));
      _mm512_storeu_ps(tile, _mm512_mul_ps(_mm512_cvtepi32_ps(low), d));
      _mm512_storeu_ps(tile + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(high), d));
    }
  } else {
    constexpr bool fifth = FORMAT == Q5_1 || FORMAT == Q5_0, minimum = FORMAT == Q5_1 || FORMAT == Q4_1;
    unpack_nibbles<fifth, minimum>(codes, scales, next, num_elements, tile);
  }
}

#else

template <int FORMAT>
static void unpack(const uint8_t* codes, const uint8_t* scales, const uint8_t*, int num_elements, float factor,
                   float* tile) {
  // The compiler's vectors: the loops of decode have fixed lengths.
  unpack_groups<FORMAT>(codes, scales, num_elements, factor, tile);
}

#endif

}  // namespace memkv
