// Sixteen lanes as four vectors of GCC's types: SSE2, NEON, or what the compiler makes of them;
// see simd.h.
#pragma once

namespace memkv {

constexpr const char* PATH = "portable";

typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));
typedef uint8_t u8x4 __attribute__((vector_size(4)));
typedef int8_t i8x4 __attribute__((vector_size(4)));

struct F {
  f32x4 part[4];
};
struct I {
  i32x4 part[4];
};

#define MEMKV_PARTS for (int k = 0; k < 4; ++k)

inline i32x4 whole(int x) { return i32x4{x, x, x, x}; }
inline f32x4 real(float x) { return f32x4{x, x, x, x}; }
inline i32x4 bits(f32x4 x) { return (i32x4)x; }
inline i32x4 shifted_right(i32x4 x, int count) { return (i32x4)((u32x4)x >> (uint32_t)count); }
inline i32x4 chosen(i32x4 mask, i32x4 yes, i32x4 no) { return (mask & yes) | (~mask & no); }
inline i32x4 nan_lanes(f32x4 x) { return x != x; }
inline i32x4 magnitude_bits(f32x4 x) { return bits(x) & 0x7FFFFFFF; }

inline F splat(float x) { return {{real(x), real(x), real(x), real(x)}}; }
inline F splat(f32x4 x, int lane) { return splat(x[lane]); }
inline F plus(F x, F y) {
  MEMKV_PARTS x.part[k] += y.part[k];
  return x;
}
inline F minus(F x, F y) {
  MEMKV_PARTS x.part[k] -= y.part[k];
  return x;
}
inline F times(F x, F y) {
  MEMKV_PARTS x.part[k] *= y.part[k];
  return x;
}

template <class Vector, class Element>
inline Vector vector_at(const Element* at) {
  Vector x;
  memcpy(&x, at, sizeof x);
  return x;
}

inline F load(const float* at) {
  F x;
  MEMKV_PARTS x.part[k] = vector_at<f32x4>(at + 4 * k);
  return x;
}
inline F load(const bf16* at) {
  F x;
  MEMKV_PARTS x.part[k] =
      (f32x4)(__builtin_convertvector(vector_at<u16x4>(at + 4 * k), u32x4) << 16u);
  return x;
}
inline f32x4 widened(i32x4 half) {
  const i32x4 sign = (half & 0x8000) << 16, size = (half & 0x7FFF) << 13;
  // Half precision's exponent, scaled up by 2^112, denormals included.
  const i32x4 value = bits((f32x4)size * real(0x1p112f));
  return (f32x4)(sign | chosen(size >= 0x0F800000, size | 0x7F800000, value));
}
inline F load(const f16* at) {
  F x;
  MEMKV_PARTS x.part[k] = widened(__builtin_convertvector(vector_at<u16x4>(at + 4 * k), i32x4));
  return x;
}

inline void store(float* at, F x) { memcpy(at, &x, sizeof x); }
inline void store_u16(void* at, i32x4 x) {
  const u16x4 narrow = __builtin_convertvector(x, u16x4);
  memcpy(at, &narrow, sizeof narrow);
}
inline void store(bf16* at, F x) {
  MEMKV_PARTS {
    const i32x4 b = bits(x.part[k]);
    const i32x4 top = shifted_right(b + 0x7FFF + (shifted_right(b, 16) & 1), 16);
    store_u16(at + 4 * k, chosen(nan_lanes(x.part[k]), whole(BF16_NAN), top));
  }
}
inline i32x4 halves(f32x4 x) {
  const i32x4 size = magnitude_bits(x), sign = shifted_right(bits(x), 16) & 0x8000;
  const i32x4 rebiased = size - 0x38000000;
  const i32x4 normal = shifted_right(rebiased + 0xFFF + (shifted_right(rebiased, 13) & 1), 13);
  // 2^-24 apart below 2^-14: the sum with a half rounds to a whole number in its low bits.
  const i32x4 small = bits((f32x4)size + real(0.5f)) - 0x3F000000;
  i32x4 half = chosen(size < 0x38800000, small, normal);
  half = sign | chosen(size >= 0x477FF000, whole(0x7C00), half);
  return chosen(nan_lanes(x), whole(F16_NAN), half);
}
inline void store(f16* at, F x) { MEMKV_PARTS store_u16(at + 4 * k, halves(x.part[k])); }

inline uint64_t halves_of(f32x4 x) {
  uint64_t all;
  store_u16(&all, halves(x));
  return all;
}
inline float of_half(uint16_t half) { return f32_of_f16(half); }

inline I truncated(F x) {
  I out;
  MEMKV_PARTS out.part[k] = __builtin_convertvector(x.part[k], i32x4);
  return out;
}
inline I rounded_away(F x) {
  MEMKV_PARTS x.part[k] +=
      (f32x4)((bits(x.part[k]) & bits(real(-0.0f))) | bits(real(BELOW_HALF)));
  return truncated(x);
}
inline F floats(I x) {
  F out;
  MEMKV_PARTS out.part[k] = __builtin_convertvector(x.part[k], f32x4);
  return out;
}
inline I at_most(I x, int highest) {
  MEMKV_PARTS x.part[k] = chosen(x.part[k] < highest, x.part[k], whole(highest));
  return x;
}

inline void store_bytes(uint8_t* at, I x) {
  MEMKV_PARTS {
    const u8x4 bytes = __builtin_convertvector(x.part[k], u8x4);
    memcpy(at + 4 * k, &bytes, sizeof bytes);
  }
}
inline void store_signed(uint8_t* const at[4], const I a[4], const I b[4]) {
  MEMKV_PARTS {
    store_bytes(at[k], a[k]);
    store_bytes(at[k] + 16, b[k]);
  }
}
inline I load_unsigned(const uint8_t* at) {
  I x;
  MEMKV_PARTS x.part[k] = __builtin_convertvector(vector_at<u8x4>(at + 4 * k), i32x4);
  return x;
}
inline I load_signed(const uint8_t* at) {
  I x;
  MEMKV_PARTS x.part[k] = __builtin_convertvector(vector_at<i8x4>(at + 4 * k), i32x4);
  return x;
}

inline void load_nibbles(const uint8_t* at, I& low, I& high) {
  const I bytes = load_unsigned(at);
  MEMKV_PARTS {
    low.part[k] = bytes.part[k] & 15;
    high.part[k] = bytes.part[k] >> 4;
  }
}
inline uint32_t lane_mask(i32x4 x) {  // bit j of the result is bit 0 of lane j
  return (uint32_t)((x[0] & 1) | (x[1] & 1) << 1 | (x[2] & 1) << 2 | (x[3] & 1) << 3);
}
inline uint32_t fifth_bits(I x) {
  uint32_t all = 0;
  MEMKV_PARTS all |= lane_mask(x.part[k] >> 4) << 4 * k;
  return all;
}
template <bool FIFTH>
inline void store_nibbles(uint8_t* const at[4], const I low[4], const I high[4]) {
  for (int group = 0; group < 4; ++group) {
    I bytes;
    MEMKV_PARTS {
      bytes.part[k] = (low[group].part[k] & 15) | (high[group].part[k] << 4 & 0xF0);
    }
    store_bytes(at[group], bytes);
    if (FIFTH) {
      const uint32_t fifth = fifth_bits(low[group]) | fifth_bits(high[group]) << 16;
      memcpy(at[group] + 16, &fifth, 4);
    }
  }
}
inline I with_fifth_bits(I x, uint32_t fifth) {
  MEMKV_PARTS {
    const i32x4 bit = i32x4{1, 2, 4, 8} & whole((int)(fifth >> 4 * k));
    x.part[k] |= (bit != 0) & 16;
  }
  return x;
}

inline uint32_t mask_of(i32x4 lanes) { return lane_mask(lanes); }
inline f32x4 less(f32x4 x, f32x4 y) { return (f32x4)chosen(x < y, bits(x), bits(y)); }
inline f32x4 more(f32x4 x, f32x4 y) { return (f32x4)chosen(x > y, bits(x), bits(y)); }
// Magnitudes compare as whole numbers, NaN above infinity.
inline f32x4 larger(f32x4 x, f32x4 y) { return (f32x4)chosen(bits(x) > bits(y), bits(x), bits(y)); }
inline f32x4 sized(f32x4 x) { return (f32x4)magnitude_bits(x); }

// The four numbers that op makes of the lanes of m[0], m[1], m[2], m[3].
template <class Op>
inline f32x4 folded(const f32x4 m[4], Op op) {
  const f32x4 x = op(f32x4{m[0][0], m[1][0], m[2][0], m[3][0]}, f32x4{m[0][1], m[1][1], m[2][1], m[3][1]});
  const f32x4 y = op(f32x4{m[0][2], m[1][2], m[2][2], m[3][2]}, f32x4{m[0][3], m[1][3], m[2][3], m[3][3]});
  return op(x, y);
}
inline f32x4 largest(const F a[4], const F b[4]) {
  f32x4 m[4];
  for (int group = 0; group < 4; ++group) {
    m[group] = real(0.0f);
    MEMKV_PARTS {
      const f32x4 part = larger(sized(a[group].part[k]), sized(b[group].part[k]));
      m[group] = larger(m[group], part);
    }
  }
  return folded(m, larger);
}
inline uint32_t extents(const F a[4], const F b[4], f32x4& low, f32x4& high) {
  f32x4 least[4], most[4];
  uint32_t nan = 0;
  for (int group = 0; group < 4; ++group) {
    least[group] = most[group] = a[group].part[0];
    i32x4 odd = whole(0);
    MEMKV_PARTS {
      const f32x4 x = a[group].part[k], y = b[group].part[k];
      least[group] = less(least[group], less(x, y));
      most[group] = more(most[group], more(x, y));
      odd |= nan_lanes(x) | nan_lanes(y);
    }
    nan |= (uint32_t)(lane_mask(odd) != 0) << group;
  }
  low = folded(least, less);
  high = folded(most, more);
  return nan;
}

inline I e4m3_of(F x) {
  I out;
  MEMKV_PARTS {
    const i32x4 sign = shifted_right(bits(x.part[k]), 24) & 0x80;
    i32x4 size = magnitude_bits(x.part[k]);
    size = chosen(size > bits(real(E4M3_MAX)), bits(real(E4M3_MAX)), size);
    const i32x4 rebiased = size - (120 << 23);
    const i32x4 normal = shifted_right(rebiased + 0x7FFFF + (shifted_right(rebiased, 20) & 1), 20);
    const i32x4 small = bits((f32x4)size * real(512.0f) + real(8388608.0f)) & 15;
    const i32x4 code = sign | chosen(size < bits(real(0.015625f)), small, normal);
    out.part[k] = chosen(nan_lanes(x.part[k]), whole(E4M3_NAN), code);
  }
  return out;
}
inline F f32_of_e4m3(I codes) {
  F out;
  MEMKV_PARTS {
    const i32x4 size = codes.part[k] & 0x7F, sign = (codes.part[k] & 0x80) << 24;
    const i32x4 normal = (size << 20) + (120 << 23);
    const f32x4 small = __builtin_convertvector(size, f32x4) * real(0.001953125f);
    const i32x4 value = sign | chosen(size < 8, bits(small), normal);
    out.part[k] = (f32x4)chosen(size == E4M3_NAN, whole((int)F32_NAN), value);
  }
  return out;
}

#undef MEMKV_PARTS

}  // namespace memkv
