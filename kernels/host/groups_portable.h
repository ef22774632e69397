// What the codecs of groups of sixteen need besides simd_portable.h; see simd_groups.h.
#pragma once

namespace memkv {

#define MEMKV_PARTS for (int k = 0; k < 4; ++k)

using Table = const float*;

inline Table table_of(const float* sixteen) { return sixteen; }
inline F looked_up(Table table, I index) {
  F x;
  MEMKV_PARTS {
    const i32x4 at = index.part[k] & 15;
    x.part[k] = f32x4{table[at[0]], table[at[1]], table[at[2]], table[at[3]]};
  }
  return x;
}

inline F over(F x, F y) {
  MEMKV_PARTS x.part[k] /= y.part[k];
  return x;
}
inline F smaller(F x, F y) {
  MEMKV_PARTS x.part[k] = less(x.part[k], y.part[k]);
  return x;
}
inline F magnitudes(F x) {
  MEMKV_PARTS x.part[k] = sized(x.part[k]);
  return x;
}
inline I sign_bits(F x, int place) {
  I out;
  MEMKV_PARTS out.part[k] = shifted_right(bits(x.part[k]), 31) << place;
  return out;
}
inline I either(I x, I y) {
  MEMKV_PARTS x.part[k] |= y.part[k];
  return x;
}

inline I kept(I codes, int all_or_none) {
  MEMKV_PARTS codes.part[k] &= all_or_none;
  return codes;
}

template <class Boundaries>
struct Counter {
  static constexpr Boundaries all{};
};
template <class Boundaries>
inline I counted(F x, const Counter<Boundaries>& counter) {
  I count = {{whole(0), whole(0), whole(0), whole(0)}};
  for (const float boundary : counter.all.values) {
    MEMKV_PARTS count.part[k] -= x.part[k] >= boundary;
  }
  return count;
}

inline F beside(f32x4 x) { return {{x, real(0.0f), real(0.0f), real(0.0f)}}; }
inline f32x4 first_four(F x) { return x.part[0]; }
inline uint32_t four_bytes(I x) {
  const u8x4 bytes = __builtin_convertvector(x.part[0], u8x4);
  uint32_t all;
  memcpy(&all, &bytes, 4);
  return all;
}
inline f32x4 roots(f32x4 x) {
  MEMKV_PARTS x[k] = square_root(x[k]);
  return x;
}

// The sums of m[0] to m[3] by halves.
inline f32x4 sums(const F m[4]) {
  f32x4 s[4];
  MEMKV_PARTS s[k] = (m[k].part[0] + m[k].part[2]) + (m[k].part[1] + m[k].part[3]);
  const f32x4 even = f32x4{s[0][0], s[1][0], s[2][0], s[3][0]} + f32x4{s[0][2], s[1][2], s[2][2], s[3][2]};
  const f32x4 odd = f32x4{s[0][1], s[1][1], s[2][1], s[3][1]} + f32x4{s[0][3], s[1][3], s[2][3], s[3][3]};
  return even + odd;
}

template <int BITS>
inline void join_codes(const I codes[4], uint8_t* at) {
  MEMKV_PARTS {
    uint8_t bytes[16];
    store_bytes(bytes, codes[k]);
    uint64_t halves[2];
    memcpy(halves, bytes, 16);
    const uint64_t all = joined<BITS>(halves[0]) | joined<BITS>(halves[1]) << 8 * BITS;
    memcpy(at + k * 2 * BITS, &all, 2 * BITS);
  }
}

// Every lane plus the one STRIDE on; a lane whose number has that bit taken from the one before.
template <int STRIDE>
inline F butterflies(F x) {
  F out;
  if constexpr (STRIDE >= 4) {
    constexpr int apart = STRIDE / 4;
    MEMKV_PARTS {
      const f32x4 other = x.part[k ^ apart];
      out.part[k] = k & apart ? other - x.part[k] : x.part[k] + other;
    }
  } else {
    const i32x4 swap = STRIDE == 1 ? i32x4{1, 0, 3, 2} : i32x4{2, 3, 0, 1};
    const f32x4 flips = STRIDE == 1 ? f32x4{0.0f, -0.0f, 0.0f, -0.0f} : f32x4{0.0f, 0.0f, -0.0f, -0.0f};
    MEMKV_PARTS {
      out.part[k] = __builtin_shuffle(x.part[k], swap) + (f32x4)(bits(x.part[k]) ^ bits(flips));
    }
  }
  return out;
}

#undef MEMKV_PARTS

}  // namespace memkv
