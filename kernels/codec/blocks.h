// Block codecs: one group of a cache format, packed and unpacked, byte for byte as packing.py. The
// groups of sixteen are in groups.h.
//
//   Block<FORMAT>::encode(x, codes, scales, factor)    group f32 -> code_bytes + scale_bytes
//   Block<FORMAT>::decode(codes, scales, out, factor)  and back
//
// The same source is compiled by nvcc, NVRTC and a C++17 host compiler. Pointers to bytes may have
// any alignment. `factor` is fp8's: the reciprocal of its scale when encoding, the scale itself
// when decoding; the other formats ignore it. The host needs -ffp-contract=off; device products and
// sums are spelled as intrinsics, which no flag contracts.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MEMKV_HD __host__ __device__ __forceinline__
#else
#define MEMKV_HD inline
#endif

namespace memkv {

// The ids of memkv_pp.cache.host_codec.FORMAT_IDS.
enum Format : int {
  F32 = 0, F16 = 1, BF16 = 2, FP8 = 3, Q8_0 = 4, Q5_1 = 5, Q5_0 = 6, Q4_1 = 7, Q4_0 = 8,
  NVFP4 = 9, TURBO8 = 10, TURBO4 = 11, TURBO3 = 12, TURBO2 = 13
};

constexpr uint32_t F32_NAN = 0x7FC00000u, F32_MAX = 0x7F7FFFFFu;
constexpr uint16_t F16_NAN = 0x7E00u;
constexpr uint16_t BF16_NAN = 0x7FC0u;
constexpr uint8_t E4M3_NAN = 0x7Fu;
constexpr float E4M3_MAX = 448.0f;

// ---- f32 arithmetic, each result rounded once ----

MEMKV_HD float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MEMKV_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

MEMKV_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// ---- bits ----

MEMKV_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

MEMKV_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

MEMKV_HD bool is_nan(float value) { return (bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u; }

MEMKV_HD bool is_finite(float value) { return (bits_of(value) & 0x7F800000u) != 0x7F800000u; }

MEMKV_HD float magnitude(float value) { return float_of(bits_of(value) & 0x7FFFFFFFu); }

MEMKV_HD uint16_t load_u16(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

MEMKV_HD void store_u16(uint8_t* at, uint16_t value) {
  at[0] = (uint8_t)value;
  at[1] = (uint8_t)(value >> 8);
}

MEMKV_HD uint32_t load_u32(const uint8_t* at) {
  return (uint32_t)load_u16(at) | (uint32_t)load_u16(at + 2) << 16;
}

MEMKV_HD void store_u32(uint8_t* at, uint32_t value) {
  store_u16(at, (uint16_t)value);
  store_u16(at + 2, (uint16_t)(value >> 16));
}

// ---- narrow floats: to nearest, ties to even; a NaN becomes the one positive quiet NaN ----

MEMKV_HD uint16_t f16_of(float value) {
  const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFFu;
  const uint32_t sign = bits >> 16 & 0x8000u;
  if (size > 0x7F800000u) return F16_NAN;
  if (size >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);  // 65520 and above
  if (size >= 0x38800000u) {                                   // 2^-14: normal
    const uint32_t rebiased = size - 0x38000000u;
    return (uint16_t)(sign | (rebiased + 0xFFFu + (rebiased >> 13 & 1u)) >> 13);
  }
  const uint32_t exponent = size >> 23;
  if (exponent < 102u) return (uint16_t)sign;  // below 2^-25
  const uint32_t mantissa = (size & 0x7FFFFFu) | 0x800000u, shift = 126u - exponent;
  const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)));
}

MEMKV_HD float f32_of_f16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 31u, mantissa = half & 0x3FFu;
  if (exponent == 0u) {
    return float_of(bits_of(multiply((float)mantissa, float_of(0x33800000u))) | sign);  // * 2^-24
  }
  const uint32_t wide = exponent == 31u ? 255u : exponent + 112u;
  return float_of(sign | wide << 23 | mantissa << 13);
}

MEMKV_HD uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan(value)) return BF16_NAN;
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

MEMKV_HD float f32_of_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

// Saturates at 448; E4M3 has no infinity.
MEMKV_HD uint8_t e4m3_of(float value) {
  if (is_nan(value)) return E4M3_NAN;
  const uint32_t sign = bits_of(value) >> 24 & 0x80u;
  float size = magnitude(value);
  if (size > E4M3_MAX) size = E4M3_MAX;
  if (size < 0.015625f) {
    // 2^-9 apart below 2^-6: the sum with 2^23 rounds to a whole number in its low bits.
    return (uint8_t)(sign | (bits_of(add(multiply(size, 512.0f), 8388608.0f)) & 15u));
  }
  const uint32_t rebiased = bits_of(size) - (120u << 23);
  return (uint8_t)(sign | (rebiased + 0x7FFFFu + (rebiased >> 20 & 1u)) >> 20);
}

MEMKV_HD float f32_of_e4m3(uint8_t code) {
  const uint32_t sign = (uint32_t)(code & 0x80u) << 24, size = code & 0x7Fu;
  if (size == E4M3_NAN) return float_of(F32_NAN);
  if (size < 8u) return float_of(bits_of(multiply((float)size, 0.001953125f)) | sign);
  return float_of(sign | ((size << 20) + (120u << 23)));
}

// ---- parts of the ggml formats ----

MEMKV_HD float inverse_of(float d) { return d == 0.0f ? 0.0f : divide(1.0f, d); }

// The nearest whole number, halves away from zero; 0 from 2^31 on and for NaN.
MEMKV_HD int round_away(float value) {
  const float size = magnitude(value);
  if (!(size < 2147483648.0f)) return 0;
  const int whole = (int)size;
  const int rounded = whole + (add(size, -(float)whole) >= 0.5f ? 1 : 0);
  return value < 0.0f ? -rounded : rounded;
}

// Cut off towards zero and held within [0, highest]; 0 for what is not finite.
MEMKV_HD int truncate(float value, int highest) {
  if (!(is_finite(value) && value > 0.0f)) return 0;
  return value >= (float)highest ? highest : (int)value;
}

// q4_0 q4_1 q5_0 q5_1: 16 nibble bytes, then 4 bytes of fifth bits where Fifth; Minimum adds m.
template <bool Fifth, bool Minimum>
struct Nibbles {
  static constexpr int group = 32;
  static constexpr int code_bytes = Fifth ? 20 : 16;
  static constexpr int scale_bytes = Minimum ? 4 : 2;
  static constexpr int highest = Fifth ? 31 : 15;
  static constexpr int zero_code = (highest + 1) / 2;

  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t* scales, float = 1.0f) {
    // Every comparison with a NaN is false, which leaves it out.
    float d, origin = 0.0f, offset = 0.5f;
    if (Minimum) {
      // The first of equals is kept: it decides the sign of a zero minimum.
      float low = float_of(F32_MAX), high = -low;
      for (int j = 0; j < group; ++j) {
        if (x[j] < low) low = x[j];
        if (x[j] > high) high = x[j];
      }
      d = divide(add(high, -low), (float)highest);
      store_u16(scales, f16_of(d));
      store_u16(scales + scale_bytes - 2, f16_of(low));
      origin = low;
    } else {
      float largest = 0.0f;
      for (int j = 0; j < group; ++j) {
        if (magnitude(x[j]) > magnitude(largest)) largest = x[j];
      }
      d = divide(largest, -(float)zero_code);
      store_u16(scales, f16_of(d));
      offset = (float)zero_code + 0.5f;
    }
    const float inverse = inverse_of(d);
    uint32_t fifth = 0;
    for (int j = 0; j < group / 2; ++j) {
      const int low = code(x[j], origin, inverse, offset);
      const int high = code(x[group / 2 + j], origin, inverse, offset);
      codes[j] = (uint8_t)((low & 15) | (high & 15) << 4);
      fifth |= (uint32_t)(low >> 4) << j | (uint32_t)(high >> 4) << (group / 2 + j);
    }
    if (Fifth) store_u32(codes + code_bytes - 4, fifth);
  }

  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t* scales, float* out, float = 1.0f) {
    const float d = f32_of_f16(load_u16(scales));
    const float m = Minimum ? f32_of_f16(load_u16(scales + scale_bytes - 2)) : 0.0f;
    const uint32_t fifth = Fifth ? load_u32(codes + code_bytes - 4) : 0u;
    for (int j = 0; j < group; ++j) {
      const int nibble = j < group / 2 ? codes[j] & 15 : codes[j - group / 2] >> 4;
      const int q = nibble | (int)(fifth >> j & 1u) << 4;
      out[j] = Minimum ? add(multiply((float)q, d), m) : multiply((float)(q - zero_code), d);
    }
  }

 private:
  static MEMKV_HD int code(float x, float origin, float inverse, float offset) {
    return truncate(add(multiply(add(x, -origin), inverse), offset), highest);
  }
};

// ---- the formats ----

template <int FORMAT>
struct Block;

template <>
struct Block<F32> {
  static constexpr int group = 1, code_bytes = 4, scale_bytes = 0;
  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t*, float = 1.0f) {
    store_u32(codes, is_nan(x[0]) ? F32_NAN : bits_of(x[0]));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t*, float* out, float = 1.0f) {
    out[0] = float_of(load_u32(codes));
  }
};

template <>
struct Block<F16> {
  static constexpr int group = 1, code_bytes = 2, scale_bytes = 0;
  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t*, float = 1.0f) {
    store_u16(codes, f16_of(x[0]));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t*, float* out, float = 1.0f) {
    out[0] = f32_of_f16(load_u16(codes));
  }
};

template <>
struct Block<BF16> {
  static constexpr int group = 1, code_bytes = 2, scale_bytes = 0;
  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t*, float = 1.0f) {
    store_u16(codes, bf16_of(x[0]));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t*, float* out, float = 1.0f) {
    out[0] = f32_of_bf16(load_u16(codes));
  }
};

template <>
struct Block<FP8> {
  static constexpr int group = 1, code_bytes = 1, scale_bytes = 0;
  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t*, float factor = 1.0f) {
    codes[0] = e4m3_of(multiply(x[0], factor));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t*, float* out, float factor = 1.0f) {
    out[0] = multiply(f32_of_e4m3(codes[0]), factor);
  }
};

template <>
struct Block<Q8_0> {
  static constexpr int group = 32, code_bytes = 32, scale_bytes = 2;
  static MEMKV_HD void encode(const float* x, uint8_t* codes, uint8_t* scales, float = 1.0f) {
    float largest = 0.0f;
    for (int j = 0; j < group; ++j) {
      // False where `largest` is a NaN, so that the search begins again behind it.
      if (!(largest > magnitude(x[j]))) largest = magnitude(x[j]);
    }
    const float d = divide(largest, 127.0f), inverse = inverse_of(d);
    store_u16(scales, f16_of(d));
    for (int j = 0; j < group; ++j) codes[j] = (uint8_t)(int8_t)round_away(multiply(x[j], inverse));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t* scales, float* out, float = 1.0f) {
    const float d = f32_of_f16(load_u16(scales));
    for (int j = 0; j < group; ++j) out[j] = multiply((float)(int8_t)codes[j], d);
  }
};

template <> struct Block<Q5_1> : Nibbles<true, true> {};
template <> struct Block<Q5_0> : Nibbles<true, false> {};
template <> struct Block<Q4_1> : Nibbles<false, true> {};
template <> struct Block<Q4_0> : Nibbles<false, false> {};

}  // namespace memkv
