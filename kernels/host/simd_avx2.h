// Sixteen lanes in two AVX2 registers, low lanes first; see simd.h.
#pragma once

#include "x86.h"

namespace memkv {

constexpr const char* PATH = "avx2";

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

inline __m256i whole(int x) { return _mm256_set1_epi32(x); }
inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F splat(f32x4 x, int lane) {
  const __m256 all = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(x), whole(lane));
  return {all, all};
}
inline F plus(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F minus(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F times(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }

inline F load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline __m256 load_8(const bf16* at) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load(const bf16* at) { return {load_8(at), load_8(at + 8)}; }
inline F load(const f16* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 8)))};
}

inline __m256i nan_lanes(__m256 x) {
  return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline __m128i narrowed(__m256i x) {  // eight lanes of at most 65535 to sixteen bits each
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

inline void store(float* at, F x) {
  _mm256_storeu_ps(at, x.a);
  _mm256_storeu_ps(at + 8, x.b);
}
inline void store_8(bf16* at, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), whole(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, whole(0x7FFF)), odd);
  const __m256i top = _mm256_srli_epi32(sum, 16);
  const __m256i out = _mm256_blendv_epi8(top, whole(BF16_NAN), nan_lanes(x));
  _mm_storeu_si128((__m128i*)at, narrowed(out));
}
inline void store(bf16* at, F x) {
  store_8(at, x.a);
  store_8(at + 8, x.b);
}
inline void store_8(f16* at, __m256 x) {
  const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  const __m256i nan = nan_lanes(x);
  const __m128i narrow =
      _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
  _mm_storeu_si128((__m128i*)at, _mm_blendv_epi8(halves, _mm_set1_epi16(F16_NAN), narrow));
}
inline void store(f16* at, F x) {
  store_8(at, x.a);
  store_8(at + 8, x.b);
}

inline uint64_t halves_of(f32x4 x) {  // not for NaN
  return (uint64_t)_mm_cvtsi128_si64(_mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float of_half(uint16_t bits) { return _cvtsh_ss(bits); }

inline I truncated(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
inline __m256 half_like(__m256 x) {
  return _mm256_or_ps(_mm256_and_ps(x, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(BELOW_HALF));
}
inline I rounded_away(F x) { return truncated(plus(x, {half_like(x.a), half_like(x.b)})); }
inline F floats(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I at_most(I x, int highest) {
  return {_mm256_min_epi32(x.a, whole(highest)), _mm256_min_epi32(x.b, whole(highest))};
}

// Eight lanes of each of four vectors as bytes; each 128-bit half has four of every vector.
inline __m256i bytes_in_order(__m256i x) {
  return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store_signed(uint8_t* const at[4], const I a[4], const I b[4]) {
  for (int k = 0; k < 4; ++k) {
    const __m256i first = _mm256_packs_epi32(a[k].a, a[k].b);
    const __m256i second = _mm256_packs_epi32(b[k].a, b[k].b);
    _mm256_storeu_si256((__m256i*)at[k], bytes_in_order(_mm256_packs_epi16(first, second)));
  }
}
inline __m256i bytes_of(I x, I y) {
  const __m256i first = _mm256_packus_epi32(x.a, x.b), second = _mm256_packus_epi32(y.a, y.b);
  return bytes_in_order(_mm256_packus_epi16(first, second));
}
inline uint32_t fifth_bits(__m256i bytes) {
  return (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 3));
}
template <bool FIFTH>
inline void store_nibbles(uint8_t* const at[4], const I low[4], const I high[4]) {
  for (int k = 0; k < 4; k += 2) {
    const __m256i l = bytes_of(low[k], low[k + 1]), h = bytes_of(high[k], high[k + 1]);
    const __m256i low_part = _mm256_and_si256(l, _mm256_set1_epi8(15));
    const __m256i high_part =
        _mm256_and_si256(_mm256_slli_epi16(h, 4), _mm256_set1_epi8((char)0xF0));
    const __m256i bytes = _mm256_or_si256(low_part, high_part);
    _mm_storeu_si128((__m128i*)at[k], _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i*)at[k + 1], _mm256_extracti128_si256(bytes, 1));
    if (FIFTH) {
      const uint32_t fifth_l = fifth_bits(l), fifth_h = fifth_bits(h);
      const uint16_t first[2] = {(uint16_t)fifth_l, (uint16_t)fifth_h};
      const uint16_t second[2] = {(uint16_t)(fifth_l >> 16), (uint16_t)(fifth_h >> 16)};
      memcpy(at[k] + 16, first, 4);
      memcpy(at[k + 1] + 16, second, 4);
    }
  }
}
inline void store_bytes(uint8_t* at, I x) {
  _mm_storeu_si128((__m128i*)at, _mm_packus_epi16(narrowed(x.a), narrowed(x.b)));
}
inline I unsigned_lanes(__m128i x) {
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline I load_unsigned(const uint8_t* at) {
  return unsigned_lanes(_mm_loadu_si128((const __m128i*)at));
}
inline I load_signed(const uint8_t* at) {
  const __m128i x = _mm_loadu_si128((const __m128i*)at);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}

inline void load_nibbles(const uint8_t* at, I& low, I& high) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)at), fours = _mm_set1_epi8(15);
  low = unsigned_lanes(_mm_and_si128(bytes, fours));
  high = unsigned_lanes(_mm_and_si128(_mm_srli_epi16(bytes, 4), fours));
}
inline __m256i spread(uint32_t bits) {  // bit j of eight to bit 4 of lane j
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i bit = _mm256_and_si256(_mm256_srlv_epi32(whole((int)bits), places), whole(1));
  return _mm256_slli_epi32(bit, 4);
}
inline I with_fifth_bits(I x, uint32_t bits) {
  return {_mm256_or_si256(x.a, spread(bits)), _mm256_or_si256(x.b, spread(bits >> 8))};
}

inline __m256i magnitude_bits(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), whole(0x7FFFFFFF));
}
// The four numbers that op makes of the lanes of m[0], m[1], m[2], m[3].
template <class Op, class Op128>
inline __m128 folded(const __m256 m[4], Op op, Op128 op_128) {
  const __m256 x = op(_mm256_unpacklo_ps(m[0], m[1]), _mm256_unpackhi_ps(m[0], m[1]));
  const __m256 y = op(_mm256_unpacklo_ps(m[2], m[3]), _mm256_unpackhi_ps(m[2], m[3]));
  const __m256d xd = _mm256_castps_pd(x), yd = _mm256_castps_pd(y);
  const __m256 all = op(_mm256_castpd_ps(_mm256_unpacklo_pd(xd, yd)),
                        _mm256_castpd_ps(_mm256_unpackhi_pd(xd, yd)));
  return op_128(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
// Magnitudes compare as whole numbers, NaN above infinity.
inline __m256 larger(__m256 x, __m256 y) {
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
inline f32x4 largest(const F a[4], const F b[4]) {
  __m256 m[4];
  for (int k = 0; k < 4; ++k) {
    const __m256i x = _mm256_max_epu32(magnitude_bits(a[k].a), magnitude_bits(a[k].b));
    const __m256i y = _mm256_max_epu32(magnitude_bits(b[k].a), magnitude_bits(b[k].b));
    m[k] = _mm256_castsi256_ps(_mm256_max_epu32(x, y));
  }
  return folded(m, larger, [](__m128 x, __m128 y) {
    return _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(x), _mm_castps_si128(y)));
  });
}
inline uint32_t extents(const F a[4], const F b[4], f32x4& low, f32x4& high) {
  __m256 least[4], most[4];
  uint32_t nan = 0;
  for (int k = 0; k < 4; ++k) {
    least[k] = _mm256_min_ps(_mm256_min_ps(a[k].a, a[k].b), _mm256_min_ps(b[k].a, b[k].b));
    most[k] = _mm256_max_ps(_mm256_max_ps(a[k].a, a[k].b), _mm256_max_ps(b[k].a, b[k].b));
    const __m256 odd = _mm256_or_ps(_mm256_cmp_ps(a[k].a, a[k].b, _CMP_UNORD_Q),
                                    _mm256_cmp_ps(b[k].a, b[k].b, _CMP_UNORD_Q));
    nan |= (uint32_t)(_mm256_movemask_ps(odd) != 0) << k;
  }
  low = folded(
      least, [](__m256 x, __m256 y) { return _mm256_min_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_min_ps(x, y); });
  high = folded(
      most, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); },
      [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
  return nan;
}
inline uint32_t mask_of(i32x4 lanes) { return (uint32_t)_mm_movemask_ps((__m128)lanes); }

inline __m256i e4m3_of(__m256 x) {
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), whole(0x80));
  const __m256 size = _mm256_min_ps(_mm256_castsi256_ps(magnitude_bits(x)), _mm256_set1_ps(E4M3_MAX));
  const __m256i rebiased = _mm256_sub_epi32(_mm256_castps_si256(size), whole(120 << 23));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(rebiased, 20), whole(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(rebiased, whole(0x7FFFF)), odd);
  const __m256 shifted =
      _mm256_add_ps(_mm256_mul_ps(size, _mm256_set1_ps(512.0f)), _mm256_set1_ps(8388608.0f));
  const __m256i small = _mm256_and_si256(_mm256_castps_si256(shifted), whole(15));
  const __m256 is_small = _mm256_cmp_ps(size, _mm256_set1_ps(0.015625f), _CMP_LT_OQ);
  const __m256i code =
      _mm256_blendv_epi8(_mm256_srli_epi32(sum, 20), small, _mm256_castps_si256(is_small));
  return _mm256_blendv_epi8(_mm256_or_si256(code, sign), whole(E4M3_NAN), nan_lanes(x));
}
inline I e4m3_of(F x) { return {e4m3_of(x.a), e4m3_of(x.b)}; }
inline __m256 f32_of_e4m3(__m256i code) {
  const __m256i size = _mm256_and_si256(code, whole(0x7F));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, whole(0x80)), 24);
  const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), whole(120 << 23));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(0.001953125f));
  const __m256i is_small = _mm256_cmpgt_epi32(whole(8), size);
  const __m256i value = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
  const __m256i is_nan = _mm256_cmpeq_epi32(size, whole(E4M3_NAN));
  return _mm256_castsi256_ps(
      _mm256_blendv_epi8(_mm256_or_si256(value, sign), whole((int)F32_NAN), is_nan));
}
inline F f32_of_e4m3(I code) { return {f32_of_e4m3(code.a), f32_of_e4m3(code.b)}; }

}  // namespace memkv
