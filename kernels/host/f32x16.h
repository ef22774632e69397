// Sixteen f32 lanes: AVX-512, AVX2 with FMA and F16C, or GCC's portable vectors.
//
// Every path sums in the same order; paths with fused multiply-add differ from the portable one
// in the last bit. A comparison with NaN in `maximum(a, b)` gives b.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MEMKV_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define MEMKV_AVX2 1
#endif
#if defined(MEMKV_AVX512) || defined(MEMKV_AVX2)
#include "x86.h"
#endif

namespace memkv {

constexpr int LANES = 16;

#define MEMKV_INLINE static inline __attribute__((always_inline))

#if defined(MEMKV_AVX512)

// Sums that fit into the registers beside their operands, and rows that share an operand.
constexpr int SUMS_AT_ONCE = 16;
constexpr int ROWS_AT_ONCE = 4;

struct f32x16 {
  __m512 v;
};

MEMKV_INLINE f32x16 load(const float* at) { return {_mm512_loadu_ps(at)}; }
MEMKV_INLINE void store(float* at, f32x16 a) { _mm512_storeu_ps(at, a.v); }
MEMKV_INLINE f32x16 all(float x) { return {_mm512_set1_ps(x)}; }
MEMKV_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
MEMKV_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MEMKV_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MEMKV_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c
MEMKV_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MEMKV_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }

// Lanes of `then` where x < limit, of `otherwise` elsewhere and for NaN.
MEMKV_INLINE f32x16 where_less(f32x16 x, f32x16 limit, f32x16 then, f32x16 otherwise) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), otherwise.v, then.v)};
}

// Lanes [begin, end) of x, `otherwise` elsewhere.
MEMKV_INLINE f32x16 where_lane(int begin, int end, f32x16 x, f32x16 otherwise) {
  const __mmask16 mask = (__mmask16)((0xFFFFu >> (LANES - end)) & (0xFFFFu << begin));
  return {_mm512_mask_blend_ps(mask, otherwise.v, x.v)};
}

// 2^n of whole numbers held as n + 1.5 * 2^23 (the low bits of the float are those of n).
MEMKV_INLINE f32x16 power_of_two(f32x16 shifted) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)))};
}

MEMKV_INLINE float highest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

// Four sums in every 128-bit quarter: of the lanes of a, b, c, d within that quarter.
MEMKV_INLINE f32x16 quarter_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)))};
}

// Quarter sums of keys 0-3, 4-7, 8-11, 12-15, added up: one lane a key.
MEMKV_INLINE f32x16 join_quarters(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88),
                                  _mm512_shuffle_f32x4(a.v, b.v, 0xDD));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x88),
                                  _mm512_shuffle_f32x4(c.v, d.v, 0xDD));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD))};
}

#elif defined(MEMKV_AVX2)

constexpr int SUMS_AT_ONCE = 4;
constexpr int ROWS_AT_ONCE = 1;

struct f32x16 {
  __m256 v[2];
};

#define MEMKV_BOTH(expression_0, expression_1) return {{expression_0, expression_1}}

MEMKV_INLINE f32x16 load(const float* at) { MEMKV_BOTH(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)); }
MEMKV_INLINE void store(float* at, f32x16 a) {
  _mm256_storeu_ps(at, a.v[0]);
  _mm256_storeu_ps(at + 8, a.v[1]);
}
MEMKV_INLINE f32x16 all(float x) { MEMKV_BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
MEMKV_INLINE f32x16 add(f32x16 a, f32x16 b) {
  MEMKV_BOTH(_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1]));
}
MEMKV_INLINE f32x16 sub(f32x16 a, f32x16 b) {
  MEMKV_BOTH(_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1]));
}
MEMKV_INLINE f32x16 mul(f32x16 a, f32x16 b) {
  MEMKV_BOTH(_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1]));
}
MEMKV_INLINE f32x16 div(f32x16 a, f32x16 b) {
  MEMKV_BOTH(_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1]));
}
MEMKV_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  MEMKV_BOTH(_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1]));
}
MEMKV_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
  MEMKV_BOTH(_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1]));
}

MEMKV_INLINE f32x16 where_less(f32x16 x, f32x16 limit, f32x16 then, f32x16 otherwise) {
  f32x16 out;
  for (int i = 0; i < 2; ++i) {
    const __m256 mask = _mm256_cmp_ps(x.v[i], limit.v[i], _CMP_LT_OQ);
    out.v[i] = _mm256_blendv_ps(otherwise.v[i], then.v[i], mask);
  }
  return out;
}

MEMKV_INLINE f32x16 where_lane(int begin, int end, f32x16 x, f32x16 otherwise) {
  f32x16 out;
  for (int i = 0; i < 2; ++i) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * i));
    const __m256i mask = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    out.v[i] = _mm256_blendv_ps(otherwise.v[i], x.v[i], _mm256_castsi256_ps(mask));
  }
  return out;
}

MEMKV_INLINE f32x16 power_of_two(f32x16 shifted) {
  f32x16 out;
  for (int i = 0; i < 2; ++i) {
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted.v[i]), 23);
    out.v[i] = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
  }
  return out;
}

MEMKV_INLINE float highest(f32x16 a) {
  const __m256 eight = _mm256_max_ps(a.v[0], a.v[1]);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

MEMKV_INLINE f32x16 quarter_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  f32x16 out;
  for (int i = 0; i < 2; ++i) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a.v[i], b.v[i]), _mm256_unpackhi_ps(a.v[i], b.v[i]));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c.v[i], d.v[i]), _mm256_unpackhi_ps(c.v[i], d.v[i]));
    const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    out.v[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return out;
}

MEMKV_INLINE __m256 join_two(f32x16 a, f32x16 b) {
  const __m256 low = _mm256_add_ps(_mm256_permute2f128_ps(a.v[0], b.v[0], 0x20),
                                   _mm256_permute2f128_ps(a.v[0], b.v[0], 0x31));
  const __m256 high = _mm256_add_ps(_mm256_permute2f128_ps(a.v[1], b.v[1], 0x20),
                                    _mm256_permute2f128_ps(a.v[1], b.v[1], 0x31));
  return _mm256_add_ps(low, high);
}

MEMKV_INLINE f32x16 join_quarters(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  MEMKV_BOTH(join_two(a, b), join_two(c, d));
}

#undef MEMKV_BOTH

#else

constexpr int SUMS_AT_ONCE = 4;
constexpr int ROWS_AT_ONCE = 1;

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

struct f32x16 {
  f32x4 v[4];
};

#define MEMKV_EACH(expression)                  \
  f32x16 out;                                   \
  for (int i = 0; i < 4; ++i) out.v[i] = (expression); \
  return out

MEMKV_INLINE f32x16 load(const float* at) {
  f32x16 out;
  memcpy(&out, at, sizeof out);
  return out;
}
MEMKV_INLINE void store(float* at, f32x16 a) { memcpy(at, &a, sizeof a); }
MEMKV_INLINE f32x16 all(float x) { MEMKV_EACH((f32x4{x, x, x, x})); }
MEMKV_INLINE f32x16 add(f32x16 a, f32x16 b) { MEMKV_EACH(a.v[i] + b.v[i]); }
MEMKV_INLINE f32x16 sub(f32x16 a, f32x16 b) { MEMKV_EACH(a.v[i] - b.v[i]); }
MEMKV_INLINE f32x16 mul(f32x16 a, f32x16 b) { MEMKV_EACH(a.v[i] * b.v[i]); }
MEMKV_INLINE f32x16 div(f32x16 a, f32x16 b) { MEMKV_EACH(a.v[i] / b.v[i]); }
MEMKV_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { MEMKV_EACH(a.v[i] * b.v[i] + c.v[i]); }
MEMKV_INLINE f32x16 maximum(f32x16 a, f32x16 b) { MEMKV_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }

MEMKV_INLINE f32x16 where_less(f32x16 x, f32x16 limit, f32x16 then, f32x16 otherwise) {
  MEMKV_EACH(x.v[i] < limit.v[i] ? then.v[i] : otherwise.v[i]);
}

MEMKV_INLINE f32x16 where_lane(int begin, int end, f32x16 x, f32x16 otherwise) {
  f32x16 out;
  for (int i = 0; i < 4; ++i) {
    const i32x4 lane = i32x4{0, 1, 2, 3} + 4 * i;
    const i32x4 inside = (lane >= begin) & (lane < end);
    out.v[i] = inside ? x.v[i] : otherwise.v[i];
  }
  return out;
}

MEMKV_INLINE f32x16 power_of_two(f32x16 shifted) {
  MEMKV_EACH((f32x4)((i32x4)((__attribute__((vector_size(16))) uint32_t)shifted.v[i] << 23) + (127 << 23)));
}

MEMKV_INLINE float highest(f32x16 a) {
  float lanes[LANES], found;
  store(lanes, a);
  found = lanes[0];
  for (int i = 1; i < LANES; ++i) found = found > lanes[i] ? found : lanes[i];
  return found;
}

MEMKV_INLINE f32x16 quarter_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  f32x16 out;
  for (int i = 0; i < 4; ++i) {
    const f32x4 ab = __builtin_shuffle(a.v[i], b.v[i], i32x4{0, 4, 1, 5}) +
                     __builtin_shuffle(a.v[i], b.v[i], i32x4{2, 6, 3, 7});
    const f32x4 cd = __builtin_shuffle(c.v[i], d.v[i], i32x4{0, 4, 1, 5}) +
                     __builtin_shuffle(c.v[i], d.v[i], i32x4{2, 6, 3, 7});
    out.v[i] = __builtin_shuffle(ab, cd, i32x4{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, i32x4{2, 3, 6, 7});
  }
  return out;
}

MEMKV_INLINE f32x16 join_quarters(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const f32x16 keys[4] = {a, b, c, d};
  MEMKV_EACH((keys[i].v[0] + keys[i].v[1]) + (keys[i].v[2] + keys[i].v[3]));
}

#undef MEMKV_EACH

#endif

// The sum of the lanes, in the order of quarter_sums and join_quarters.
MEMKV_INLINE float sum(f32x16 a) {
  float lanes[LANES], quarter[4];
  store(lanes, a);
  for (int i = 0; i < 4; ++i) {
    quarter[i] = (lanes[4 * i] + lanes[4 * i + 2]) + (lanes[4 * i + 1] + lanes[4 * i + 3]);
  }
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// e^x for x <= 0 within 2 units in the last place; 0 below -87; NaN stays NaN.
MEMKV_INLINE f32x16 exponential(f32x16 x) {
  const f32x16 lowest = all(-87.0f), shift = all(12582912.0f);  // 1.5 * 2^23
  const f32x16 held = maximum(lowest, x);
  const f32x16 shifted = fma(held, all(1.44269504f), shift);
  const f32x16 whole = sub(shifted, shift);
  // ln 2 in two parts, the first short enough that its product with `whole` is exact.
  f32x16 rest = fma(whole, all(-0.693359375f), held);
  rest = fma(whole, all(2.12194440e-4f), rest);
  f32x16 p = all(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, rest, all(c));
  return where_less(x, lowest, all(0.0f), mul(p, power_of_two(shifted)));
}

// limit * tanh(x / limit)
MEMKV_INLINE f32x16 capped(f32x16 x, float limit) {
  const f32x16 t = div(x, all(limit)), zero = all(0.0f);
  const f32x16 size = where_less(t, zero, sub(zero, t), t);
  const f32x16 e = exponential(mul(size, all(-2.0f)));
  f32x16 large = div(sub(all(1.0f), e), add(all(1.0f), e));
  large = where_less(t, zero, sub(zero, large), large);
  // The quotient cancels near 0, where the odd series does not.
  const f32x16 square = mul(t, t);
  f32x16 p = all(62.0f / 2835);
  for (const float c : {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) p = fma(p, square, all(c));
  return mul(all(limit), where_less(size, all(0.25f), mul(p, t), large));
}

}  // namespace memkv
