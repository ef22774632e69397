// What the codecs of groups of sixteen need besides simd_avx2.h; see simd_groups.h.
#pragma once

namespace memkv {

struct Table {
  __m256 low, high;
};

inline Table table_of(const float* sixteen) {
  return {_mm256_loadu_ps(sixteen), _mm256_loadu_ps(sixteen + 8)};
}
inline __m256 looked_up(Table table, __m256i index) {
  const __m256 low = _mm256_permutevar8x32_ps(table.low, index);
  const __m256 high = _mm256_permutevar8x32_ps(table.high, index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
inline F looked_up(Table table, I index) {
  return {looked_up(table, index.a), looked_up(table, index.b)};
}

inline F over(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F magnitudes(F x) {
  return {_mm256_castsi256_ps(magnitude_bits(x.a)), _mm256_castsi256_ps(magnitude_bits(x.b))};
}
inline I sign_bits(F x, int place) {
  return {_mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(x.a), 31), place),
          _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(x.b), 31), place)};
}
inline I either(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }

inline I kept(I codes, int all_or_none) {
  return {_mm256_and_si256(codes.a, whole(all_or_none)), _mm256_and_si256(codes.b, whole(all_or_none))};
}

template <class Boundaries>
struct Counter {
  static constexpr Boundaries all{};
};
template <class Boundaries>
inline I counted(F x, const Counter<Boundaries>& counter) {
  I count = {whole(0), whole(0)};
  for (const float boundary : counter.all.values) {
    const __m256 limit = _mm256_set1_ps(boundary);
    count.a = _mm256_sub_epi32(count.a, _mm256_castps_si256(_mm256_cmp_ps(x.a, limit, _CMP_GE_OQ)));
    count.b = _mm256_sub_epi32(count.b, _mm256_castps_si256(_mm256_cmp_ps(x.b, limit, _CMP_GE_OQ)));
  }
  return count;
}

inline F beside(f32x4 x) { return {_mm256_zextps128_ps256((__m128)x), _mm256_setzero_ps()}; }
inline f32x4 first_four(F x) { return (f32x4)_mm256_castps256_ps128(x.a); }
inline uint32_t four_bytes(I x) {
  const __m128i four = _mm256_castsi256_si128(x.a);
  const __m128i narrow = _mm_packus_epi32(four, four);
  return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(narrow, narrow));
}
inline f32x4 roots(f32x4 x) { return (f32x4)_mm_sqrt_ps((__m128)x); }

// The sums of m[0] to m[3] by halves.
inline __m256 sums_of_two(F x, F y) {  // four lanes of each
  const __m256 p = _mm256_add_ps(x.a, x.b), q = _mm256_add_ps(y.a, y.b);
  return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
}
inline f32x4 sums(const F m[4]) {
  const __m256 x = sums_of_two(m[0], m[1]), y = sums_of_two(m[2], m[3]);
  __m256 z = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xEE));
  z = _mm256_add_ps(z, _mm256_permute_ps(z, 0xB1));
  const __m256i firsts = _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0);
  return (f32x4)_mm256_castps256_ps128(_mm256_permutevar8x32_ps(z, firsts));
}

template <int BITS>
inline void join_codes(const I codes[4], uint8_t* at) {
  for (int k = 0; k < 4; ++k) {
    const __m128i bytes = _mm_packus_epi16(narrowed(codes[k].a), narrowed(codes[k].b));
    const uint64_t low = joined<BITS>((uint64_t)_mm_cvtsi128_si64(bytes));
    const uint64_t all = low | joined<BITS>((uint64_t)_mm_extract_epi64(bytes, 1)) << 8 * BITS;
    memcpy(at + k * 2 * BITS, &all, 2 * BITS);
  }
}

// Every lane plus the one STRIDE on; a lane whose number has that bit taken from the one before.
template <int STRIDE>
inline __m256 butterflies_8(__m256 x) {
  __m256 other;
  if constexpr (STRIDE == 1) {
    other = _mm256_permute_ps(x, 0xB1);
  } else if constexpr (STRIDE == 2) {
    other = _mm256_permute_ps(x, 0x4E);
  } else {
    other = _mm256_permute2f128_ps(x, x, 1);
  }
  const float minus = -0.0f;
  const __m256 flips = STRIDE == 1   ? _mm256_setr_ps(0, minus, 0, minus, 0, minus, 0, minus)
                       : STRIDE == 2 ? _mm256_setr_ps(0, 0, minus, minus, 0, 0, minus, minus)
                                     : _mm256_setr_ps(0, 0, 0, 0, minus, minus, minus, minus);
  return _mm256_add_ps(other, _mm256_xor_ps(x, flips));
}
template <int STRIDE>
inline F butterflies(F x) {
  if constexpr (STRIDE == 8) {
    return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  } else {
    return {butterflies_8<STRIDE>(x.a), butterflies_8<STRIDE>(x.b)};
  }
}

}  // namespace memkv
