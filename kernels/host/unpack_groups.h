// Groups of sixteen unpacked: nvfp4 and the turbo formats, as Block<FORMAT>::decode has them.
//
// unpack_sixteens<FORMAT>(codes, scales, next, num_groups, factor, out): the groups' codes are
// contiguous, and so are their scales. No byte outside them is read. `factor` is power(b) of an `e`
// format. `next` is as many bytes of codes that are wanted soon.
#pragma once

#include "../codec/blocks.h"
#include "../codec/groups.h"

#if defined(MEMKV_PORTABLE)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MEMKV_UNPACK_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#define MEMKV_UNPACK_AVX2 1
#endif
#if defined(MEMKV_UNPACK_AVX512) || defined(MEMKV_UNPACK_AVX2)
#include "x86.h"
#endif

namespace memkv {

#if defined(MEMKV_UNPACK_AVX512) || defined(MEMKV_UNPACK_AVX2)

constexpr int SCALES_AT_ONCE = 64;

// level_of every code, repeated to sixteen.
template <int FORMAT>
struct LevelTable {
  alignas(64) float values[16];
  constexpr LevelTable() : values() {
    for (int i = 0; i < 16; ++i) values[i] = level_of<FORMAT>(i & ((1 << Codebook<FORMAT>::bits) - 1));
  }
};

// The codes of elements 0 to 7 and 8 to 15, from bit 0 of each word on; other bits may follow them.
struct CodeWords {
  uint32_t low, high;
};
template <int BITS>
static inline CodeWords code_words(const uint8_t* codes) {
  uint32_t low, high;
  memcpy(&low, codes, 4);
  if (BITS == 2) return {low, low >> 16};
  memcpy(&high, codes + 2 * BITS - 4, 4);
  return {low, BITS == 3 ? high >> 8 : high};
}

// E4M3 fields are those of an f16 whose exponent counts from 15 instead of 7: 2^8 too small. The sum
// sets the exponent of NaN, which is all ones in E4M3, to that of an f16's.
static inline __m128i halves_of_e4m3(__m128i wide) {
  const __m128i nan = _mm_and_si128(_mm_add_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7F)), _mm_set1_epi16(1)),
                                    _mm_set1_epi16(0x80));
  const __m128i fields = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBF80));
  return _mm_or_si128(fields, _mm_slli_epi16(nan, 7));
}
static inline __m256 eight_e4m3(const uint8_t* at) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at));
  return _mm256_mul_ps(_mm256_cvtph_ps(halves_of_e4m3(wide)), _mm256_set1_ps(256.0f));
}

// The scales of `count` groups times `factor`.
template <int FORMAT>
static void widen_scales(const uint8_t* scales, int count, float factor, float* out) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 eight;
    if (FORMAT == TURBO8) {
      const __m128i bits = _mm_loadu_si128((const __m128i*)(scales + 2 * i));
      eight = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    } else {
      eight = eight_e4m3(scales + i);
    }
    _mm256_storeu_ps(out + i, _mm256_mul_ps(eight, _mm256_set1_ps(factor)));
  }
  for (; i < count; ++i) {
    out[i] = multiply(FORMAT == TURBO8 ? f32_of_bf16(load_u16(scales + 2 * i)) : f32_of_e4m3(scales[i]), factor);
  }
}

#endif

#if defined(MEMKV_UNPACK_AVX512)

using SixteenLevels = __m512;

static inline SixteenLevels load_levels(const float* table) { return _mm512_load_ps(table); }

template <int BITS>
static inline void unpack_coded(const uint8_t* codes, SixteenLevels levels, float scale, float* out) {
  const CodeWords words = code_words<BITS>(codes);
  const __m512i shifts = _mm512_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS, 0, BITS,
                                           2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS);
  const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)words.low), 0xFF00, (int)words.high);
  // A look-up takes the lowest four bits: of a shorter code any of its repetitions.
  const __m512 level = _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), levels);
  _mm512_storeu_ps(out, _mm512_mul_ps(level, _mm512_set1_ps(scale)));
}

#elif defined(MEMKV_UNPACK_AVX2)

struct SixteenLevels {
  __m256 low, high;
};

static inline SixteenLevels load_levels(const float* table) {
  return {_mm256_load_ps(table), _mm256_load_ps(table + 8)};
}

template <int BITS>
static inline __m256 level_lanes(uint32_t word, SixteenLevels levels) {
  const __m256i shifts = _mm256_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS);
  const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32((int)word), shifts);
  const __m256 low = _mm256_permutevar8x32_ps(levels.low, code);
  if (BITS < 4) return low;
  const __m256 high = _mm256_permutevar8x32_ps(levels.high, code);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}

template <int BITS>
static inline void unpack_coded(const uint8_t* codes, SixteenLevels levels, float scale, float* out) {
  const CodeWords words = code_words<BITS>(codes);
  const __m256 factor = _mm256_set1_ps(scale);
  _mm256_storeu_ps(out, _mm256_mul_ps(level_lanes<BITS>(words.low, levels), factor));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(level_lanes<BITS>(words.high, levels), factor));
}

#endif

#if defined(MEMKV_UNPACK_AVX512) || defined(MEMKV_UNPACK_AVX2)

template <int FORMAT>
static void unpack_sixteens(const uint8_t* codes, const uint8_t* scales, const uint8_t* next, int64_t num_groups,
                            float factor, float* out) {
  using B = Block<FORMAT>;
  alignas(64) float wide[SCALES_AT_ONCE];
  for (int64_t done = 0; done < num_groups; done += SCALES_AT_ONCE) {
    const int count = (int)(num_groups - done < SCALES_AT_ONCE ? num_groups - done : SCALES_AT_ONCE);
    widen_scales<FORMAT>(scales, count, factor, wide);
    if constexpr (FORMAT == TURBO8) {
      for (int i = 0; i < count; ++i, codes += B::code_bytes, next += B::code_bytes, out += B::group) {
        __builtin_prefetch(next, 0, 2);
        const __m256 scale = _mm256_set1_ps(wide[i]);
        _mm256_storeu_ps(out, _mm256_mul_ps(eight_e4m3(codes), scale));
        _mm256_storeu_ps(out + 8, _mm256_mul_ps(eight_e4m3(codes + 8), scale));
      }
    } else {
      static constexpr LevelTable<FORMAT> table;
      const SixteenLevels levels = load_levels(table.values);
      for (int i = 0; i < count; ++i, codes += B::code_bytes, next += B::code_bytes, out += B::group) {
        __builtin_prefetch(next, 0, 2);
        unpack_coded<Codebook<FORMAT>::bits>(codes, levels, wide[i], out);
      }
    }
    scales += count * B::scale_bytes;
  }
}

#else

template <int FORMAT>
static void unpack_sixteens(const uint8_t* codes, const uint8_t* scales, const uint8_t*, int64_t num_groups,
                            float factor, float* out) {
  using B = Block<FORMAT>;
  for (int64_t i = 0; i < num_groups; ++i) {
    B::decode(codes + i * B::code_bytes, scales + i * B::scale_bytes, out + i * B::group, factor);
  }
}

#endif

}  // namespace memkv
