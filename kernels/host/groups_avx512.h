// What the codecs of groups of sixteen need besides simd_avx512.h; see simd_groups.h.
#pragma once

namespace memkv {

using Table = __m512;

inline Table table_of(const float* sixteen) { return _mm512_loadu_ps(sixteen); }
inline F looked_up(Table table, I index) { return _mm512_permutexvar_ps(index, table); }

inline F over(F a, F b) { return _mm512_div_ps(a, b); }
inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
inline F magnitudes(F x) { return _mm512_castsi512_ps(magnitude_bits(x)); }
inline I sign_bits(F x, int place) {
  return _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(x), 31), place);
}
inline I either(I a, I b) { return _mm512_or_si512(a, b); }

inline I kept(I codes, int all_or_none) { return _mm512_and_si512(codes, _mm512_set1_epi32(all_or_none)); }

// Every boundary is in a bin of its own, that of the whole number nearest to it: a number reaches
// those of the bins below its own, and its own bin's if it is as large.
template <class Boundaries>
struct Counter {
  struct Bins {
    float boundary[32];
    int32_t below[32];

    constexpr Bins() : boundary(), below() {
      const Boundaries all;
      for (int bin = 0; bin < 32; ++bin) {
        const int number = Boundaries::is_signed && bin >= 16 ? bin - 32 : bin;
        boundary[bin] = 2.0f * LARGEST_COUNTED;
        for (int i = 0; i < Boundaries::count; ++i) {
          const int own = (int)(all.values[i] + (all.values[i] < 0.0f ? -0.5f : 0.5f));
          below[bin] += own < number;
          if (own == number) boundary[bin] = all.values[i];
        }
      }
    }
  };
  static constexpr Bins bins{};

  F boundary[2] = {_mm512_loadu_ps(bins.boundary), _mm512_loadu_ps(bins.boundary + 16)};
  I below[2] = {_mm512_loadu_si512(bins.below), _mm512_loadu_si512(bins.below + 16)};
};
template <class Boundaries>
inline I counted(F x, const Counter<Boundaries>& counter) {
  const I bin = _mm512_cvtps_epi32(x);
  const F boundary = _mm512_permutex2var_ps(counter.boundary[0], bin, counter.boundary[1]);
  const I below = _mm512_permutex2var_epi32(counter.below[0], bin, counter.below[1]);
  const __mmask16 reached = _mm512_cmp_ps_mask(x, boundary, _CMP_GE_OQ);
  return _mm512_mask_add_epi32(below, reached, below, _mm512_set1_epi32(1));
}

inline F beside(f32x4 x) { return _mm512_zextps128_ps512((__m128)x); }
inline f32x4 first_four(F x) { return (f32x4)_mm512_castps512_ps128(x); }
inline uint32_t four_bytes(I x) { return (uint32_t)_mm_cvtsi128_si32(_mm512_cvtepi32_epi8(x)); }
inline f32x4 roots(f32x4 x) { return (f32x4)_mm_sqrt_ps((__m128)x); }

// The sums of m[0] to m[3] by halves.
inline f32x4 sums(const F m[4]) {
  const F x = plus(_mm512_shuffle_f32x4(m[0], m[1], 0x44), _mm512_shuffle_f32x4(m[0], m[1], 0xEE));
  const F y = plus(_mm512_shuffle_f32x4(m[2], m[3], 0x44), _mm512_shuffle_f32x4(m[2], m[3], 0xEE));
  F z = plus(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
  z = plus(z, _mm512_permute_ps(z, 0x4E));
  z = plus(z, _mm512_permute_ps(z, 0xB1));
  const I firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return first_four(_mm512_permutexvar_ps(firsts, z));
}

template <int BITS>
inline void join_codes(const I codes[4], uint8_t* at) {
  const I pairs = _mm512_maddubs_epi16(bytes_of(codes), _mm512_set1_epi16((1 << BITS) << 8 | 1));
  if constexpr (BITS == 4) {
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi16_epi8(pairs));
  } else {
    const I fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32((1 << 2 * BITS) << 16 | 1));
    if constexpr (BITS == 2) {
      _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(fours));
    } else {
      uint8_t eights[64];
      _mm512_storeu_si512(eights, _mm512_or_si512(fours, _mm512_srli_epi64(fours, 32 - 4 * BITS)));
      for (int i = 0; i < 8; ++i) memcpy(at + i * BITS, eights + 8 * i, BITS);
    }
  }
}

// Every lane plus the one STRIDE on; a lane whose number has that bit taken from the one before.
template <int STRIDE>
inline F butterflies(F x) {
  F other;
  if constexpr (STRIDE == 1) {
    other = _mm512_permute_ps(x, 0xB1);
  } else if constexpr (STRIDE == 2) {
    other = _mm512_permute_ps(x, 0x4E);
  } else {
    other = _mm512_shuffle_f32x4(x, x, STRIDE == 4 ? 0xB1 : 0x4E);
  }
  constexpr __mmask16 upper = STRIDE == 1 ? 0xAAAA : STRIDE == 2 ? 0xCCCC : STRIDE == 4 ? 0xF0F0 : 0xFF00;
  return _mm512_mask_sub_ps(plus(x, other), upper, other, x);
}

}  // namespace memkv
