// Sixteen lanes in one AVX-512 register; see simd.h.
#pragma once

#include "x86.h"

namespace memkv {

constexpr const char* PATH = "avx512";

using F = __m512;
using I = __m512i;

inline F splat(float x) { return _mm512_set1_ps(x); }
inline F splat(f32x4 x, int lane) {
  return _mm512_permutexvar_ps(_mm512_set1_epi32(lane), _mm512_castps128_ps512(x));
}
inline F plus(F a, F b) { return _mm512_add_ps(a, b); }
inline F minus(F a, F b) { return _mm512_sub_ps(a, b); }
inline F times(F a, F b) { return _mm512_mul_ps(a, b); }

inline F load(const float* at) { return _mm512_loadu_ps(at); }
inline F load(const bf16* at) {
  const __m256i bits = _mm256_loadu_si256((const __m256i*)at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline F load(const f16* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

inline __mmask16 nan_lanes(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

inline void store(float* at, F x) { _mm512_storeu_ps(at, x); }
inline void store(bf16* at, F x) {
  const I bits = _mm512_castps_si512(x);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const I sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const I top = _mm512_srli_epi32(sum, 16);
  const I out = _mm512_mask_mov_epi32(top, nan_lanes(x), _mm512_set1_epi32(BF16_NAN));
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(out));
}
inline void store(f16* at, F x) {
  const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  const __m256i out = _mm256_mask_mov_epi16(halves, nan_lanes(x), _mm256_set1_epi16(F16_NAN));
  _mm256_storeu_si256((__m256i*)at, out);
}

inline uint64_t halves_of(f32x4 x) {  // not for NaN
  return (uint64_t)_mm_cvtsi128_si64(_mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float of_half(uint16_t bits) { return _cvtsh_ss(bits); }

inline I truncated(F x) { return _mm512_cvttps_epi32(x); }
inline I rounded_away(F x) {
  const F half = _mm512_or_ps(_mm512_and_ps(x, splat(-0.0f)), splat(BELOW_HALF));
  return truncated(plus(x, half));
}
inline F floats(I x) { return _mm512_cvtepi32_ps(x); }
inline I at_most(I x, int highest) { return _mm512_min_epi32(x, _mm512_set1_epi32(highest)); }

inline I load_unsigned(const uint8_t* at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
}
inline I load_signed(const uint8_t* at) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
}

// Bytes of 16 lanes of four vectors, at four places.
inline __m512i bytes_in_order(__m512i x) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, x);
}
inline void store_signed(uint8_t* const at[4], const I a[4], const I b[4]) {
  for (int k = 0; k < 4; k += 2) {
    const I first = _mm512_packs_epi32(a[k], b[k]), second = _mm512_packs_epi32(a[k + 1], b[k + 1]);
    const I bytes = bytes_in_order(_mm512_packs_epi16(first, second));
    _mm256_storeu_si256((__m256i*)at[k], _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i*)at[k + 1], _mm512_extracti64x4_epi64(bytes, 1));
  }
}
inline __m512i bytes_of(const I x[4]) {
  const I first = _mm512_packus_epi32(x[0], x[1]), second = _mm512_packus_epi32(x[2], x[3]);
  return bytes_in_order(_mm512_packus_epi16(first, second));
}
template <bool FIFTH>
inline void store_nibbles(uint8_t* const at[4], const I low[4], const I high[4]) {
  const __m512i l = bytes_of(low), h = bytes_of(high);
  const __m512i low_part = _mm512_and_si512(l, _mm512_set1_epi8(15));
  const __m512i high_part = _mm512_and_si512(_mm512_slli_epi16(h, 4), _mm512_set1_epi8((char)0xF0));
  const __m512i bytes = _mm512_or_si512(low_part, high_part);
  _mm_storeu_si128((__m128i*)at[0], _mm512_castsi512_si128(bytes));
  _mm_storeu_si128((__m128i*)at[1], _mm512_extracti32x4_epi32(bytes, 1));
  _mm_storeu_si128((__m128i*)at[2], _mm512_extracti32x4_epi32(bytes, 2));
  _mm_storeu_si128((__m128i*)at[3], _mm512_extracti32x4_epi32(bytes, 3));
  if (FIFTH) {
    const uint64_t fifth_l = _mm512_test_epi8_mask(l, _mm512_set1_epi8(16));
    const uint64_t fifth_h = _mm512_test_epi8_mask(h, _mm512_set1_epi8(16));
    for (int k = 0; k < 4; ++k) {
      const uint16_t halves[2] = {(uint16_t)(fifth_l >> 16 * k), (uint16_t)(fifth_h >> 16 * k)};
      memcpy(at[k] + 16, halves, 4);
    }
  }
}
inline void store_bytes(uint8_t* at, I x) {
  _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(x));
}
inline void load_nibbles(const uint8_t* at, I& low, I& high) {
  const I bytes = load_unsigned(at);
  low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
  high = _mm512_srli_epi32(bytes, 4);
}
inline I with_fifth_bits(I x, uint32_t bits) {
  return _mm512_mask_or_epi32(x, (__mmask16)bits, x, _mm512_set1_epi32(16));
}

inline I magnitude_bits(F x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}
// The four numbers that op makes of the lanes of m[0], m[1], m[2], m[3].
template <class Op, class Op256, class Op128>
inline __m128 folded(const F m[4], Op op, Op256 op_256, Op128 op_128) {
  const F x = op(_mm512_unpacklo_ps(m[0], m[1]), _mm512_unpackhi_ps(m[0], m[1]));
  const F y = op(_mm512_unpacklo_ps(m[2], m[3]), _mm512_unpackhi_ps(m[2], m[3]));
  const __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
  const F all = op(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
  const __m256 half = op_256(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return op_128(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline f32x4 largest(const F a[4], const F b[4]) {
  F m[4];
  for (int k = 0; k < 4; ++k) {
    m[k] = _mm512_castsi512_ps(_mm512_max_epu32(magnitude_bits(a[k]), magnitude_bits(b[k])));
  }
  // Magnitudes compare as whole numbers, NaN above infinity.
  return folded(
      m,
      [](F x, F y) {
        return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
      },
      [](__m256 x, __m256 y) {
        return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
      },
      [](__m128 x, __m128 y) {
        return _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(x), _mm_castps_si128(y)));
      });
}
inline uint32_t extents(const F a[4], const F b[4], f32x4& low, f32x4& high) {
  F least[4], most[4];
  __mmask16 odd[4];
  for (int k = 0; k < 4; ++k) {
    least[k] = _mm512_min_ps(a[k], b[k]);
    most[k] = _mm512_max_ps(a[k], b[k]);
    odd[k] = _mm512_cmp_ps_mask(a[k], b[k], _CMP_UNORD_Q);
  }
  low = folded(
      least, [](F x, F y) { return _mm512_min_ps(x, y); },
      [](__m256 x, __m256 y) { return _mm256_min_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_min_ps(x, y); });
  high = folded(
      most, [](F x, F y) { return _mm512_max_ps(x, y); },
      [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
  uint32_t nan = 0;
  if (_kortestz_mask16_u8(_kor_mask16(odd[0], odd[1]), _kor_mask16(odd[2], odd[3]))) return nan;
  for (int k = 0; k < 4; ++k) nan |= (uint32_t)(odd[k] != 0) << k;
  return nan;
}
inline uint32_t mask_of(i32x4 lanes) { return (uint32_t)_mm_movemask_ps((__m128)lanes); }

inline I e4m3_of(F x) {
  const I sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24),
                                  _mm512_set1_epi32(0x80));
  const F size = _mm512_min_ps(_mm512_castsi512_ps(magnitude_bits(x)), splat(E4M3_MAX));
  const I rebiased = _mm512_sub_epi32(_mm512_castps_si512(size), _mm512_set1_epi32(120 << 23));
  const I odd = _mm512_and_si512(_mm512_srli_epi32(rebiased, 20), _mm512_set1_epi32(1));
  const I sum = _mm512_add_epi32(_mm512_add_epi32(rebiased, _mm512_set1_epi32(0x7FFFF)), odd);
  const I normal = _mm512_srli_epi32(sum, 20);
  const F shifted = plus(times(size, splat(512.0f)), splat(8388608.0f));
  const I small = _mm512_and_si512(_mm512_castps_si512(shifted), _mm512_set1_epi32(15));
  const __mmask16 is_small = _mm512_cmp_ps_mask(size, splat(0.015625f), _CMP_LT_OQ);
  const I code = _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_small, small), sign);
  return _mm512_mask_mov_epi32(code, nan_lanes(x), _mm512_set1_epi32(E4M3_NAN));
}
inline F f32_of_e4m3(I code) {
  const I size = _mm512_and_si512(code, _mm512_set1_epi32(0x7F));
  const I sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
  const I normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
  const I small = _mm512_castps_si512(times(floats(size), splat(0.001953125f)));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
  const I value = _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_small, small), sign);
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(E4M3_NAN));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(value, is_nan, _mm512_set1_epi32(F32_NAN)));
}

}  // namespace memkv
