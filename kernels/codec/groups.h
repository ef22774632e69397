// Groups of sixteen, nvfp4 and the turbo formats: Block as in blocks.h, which is included before
// this; the bytes are those of packing_groups.py. And heads rotated, as in rotation.py.
//
// `factor` carries the exponent byte b of an `e` format and is 1 elsewhere: reciprocal_power(b) when
// encoding, power(b) when decoding.
#pragma once

namespace memkv {

MEMKV_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// ---- the exponent byte of a record, layer, side and head: b stands for 2^(b - 127) ----

constexpr uint8_t NO_EXPONENT = 127;
constexpr int FIRST_ROW_EXPONENT = 2;

MEMKV_HD float power(uint8_t exponent) { return float_of((uint32_t)exponent << 23); }

MEMKV_HD float reciprocal_power(uint8_t exponent) {
  return float_of((2u * NO_EXPONENT - exponent) << 23);
}

// The byte of a record from the largest magnitude of its first row as it is packed, any NaN if there
// is one: 1 to 252, NO_EXPONENT for zeros and what is not finite.
MEMKV_HD uint8_t exponent_byte(float largest) {
  if (largest == 0.0f || !is_finite(largest)) return NO_EXPONENT;
  const int field = (int)(bits_of(largest) >> 23) - FIRST_ROW_EXPONENT;
  return (uint8_t)(field < 1 ? 1 : field);
}

// ---- codebooks: magnitudes in order, and the least value of each of them but the first ----

template <int FORMAT>
struct Codebook;

template <>
struct Codebook<NVFP4> {
  static constexpr int bits = 4, half = 8;
  static MEMKV_HD constexpr float level(int i) {
    constexpr float levels[half] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return levels[i];
  }
  // Ties go to the even code: where that is the lower one, the next float is the boundary.
  static MEMKV_HD constexpr float boundary(int i) {
    constexpr float boundaries[half - 1] = {
        0.25f + 1.0f / (1 << 25), 0.75f, 1.25f + 1.0f / (1 << 23), 1.75f,
        2.5f + 1.0f / (1 << 22),  3.5f,  5.0f + 1.0f / (1 << 21)};
    return boundaries[i];
  }
};

template <>
struct Codebook<TURBO4> {
  static constexpr int bits = 4, half = 8;
  static MEMKV_HD constexpr float level(int i) {
    constexpr float levels[half] = {0.1284f, 0.3880f, 0.6568f, 0.9423f, 1.2562f, 1.6180f, 2.0690f, 2.7326f};
    return levels[i];
  }
  static MEMKV_HD constexpr float boundary(int i) {
    constexpr float boundaries[half - 1] = {0.2582f, 0.5224f, 0.7996f, 1.0993f, 1.4371f, 1.8435f, 2.4008f};
    return boundaries[i];
  }
};

template <>
struct Codebook<TURBO3> {
  static constexpr int bits = 3, half = 4;
  static MEMKV_HD constexpr float level(int i) {
    constexpr float levels[half] = {0.2451f, 0.7560f, 1.3440f, 2.1520f};
    return levels[i];
  }
  static MEMKV_HD constexpr float boundary(int i) {
    constexpr float boundaries[half - 1] = {0.501f, 1.050f, 1.748f};
    return boundaries[i];
  }
};

template <>
struct Codebook<TURBO2> {
  static constexpr int bits = 2, half = 2;
  static MEMKV_HD constexpr float level(int i) {
    constexpr float levels[half] = {0.4528f, 1.5104f};
    return levels[i];
  }
  static MEMKV_HD constexpr float boundary(int) { return 0.9816f; }
};

// What a code stands for, before its scale: nvfp4 has a sign bit, turbo ascending codes.
template <int FORMAT>
MEMKV_HD constexpr float level_of(int code) {
  using C = Codebook<FORMAT>;
  if (FORMAT == NVFP4) return code < C::half ? C::level(code) : -C::level(code - C::half);
  return code < C::half ? -C::level(C::half - 1 - code) : C::level(code - C::half);
}

constexpr float E2M1_MAX = 6.0f;
constexpr float LEAST_TURBO = 1e-12f;

// ---- parts of the formats ----

// The sum of sixteen by halves: [i] and [i + 8], then + 4, + 2, + 1. Overwrites them.
MEMKV_HD float sum_by_halves(float* x) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = add(x[i], x[i + half]);
  }
  return x[0];
}

// x = from * factor; returns the largest magnitude, infinity where an element is not finite.
MEMKV_HD float scaled_down(const float* from, float factor, float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    x[i] = multiply(from[i], factor);
    const uint32_t size = bits_of(x[i]) & 0x7FFFFFFFu;
    if (size > largest) largest = size;
  }
  return float_of(largest < 0x7F800000u ? largest : 0x7F800000u);
}

// nvfp4 and the turbo formats with a codebook: an E4M3 scale, codes packed from the lowest bit on.
template <int FORMAT>
struct Coded {
  using C = Codebook<FORMAT>;
  static constexpr int group = 16;
  static constexpr int code_bytes = 2 * C::bits;
  static constexpr int scale_bytes = 1;

  static MEMKV_HD void encode(const float* from, uint8_t* codes, uint8_t* scales, float factor = 1.0f) {
    float x[group];
    const float largest = scaled_down(from, factor, x);
    uint64_t packed = 0;
    if (!is_finite(largest)) {
      scales[0] = E4M3_NAN;
    } else if (FORMAT == NVFP4) {
      scales[0] = e4m3_of(divide(largest, E2M1_MAX));
      const float scale = f32_of_e4m3(scales[0]);
      for (int i = 0; i < group && scale != 0.0f; ++i) {
        packed |= (uint64_t)e2m1_code(divide(x[i], scale)) << C::bits * i;
      }
    } else {
      const float widen = largest > LEAST_TURBO ? divide(C::level(C::half - 1), largest) : 1.0f;
      float levels[group];
      for (int i = 0; i < group; ++i) {
        const int code = turbo_code(multiply(x[i], widen));
        packed |= (uint64_t)code << C::bits * i;
        levels[i] = multiply(level_of<FORMAT>(code), level_of<FORMAT>(code));
        x[i] = multiply(x[i], x[i]);
      }
      scales[0] = e4m3_of(divide(square_root(sum_by_halves(x)), square_root(sum_by_halves(levels))));
    }
    for (int i = 0; i < code_bytes; ++i) codes[i] = (uint8_t)(packed >> 8 * i);
  }

  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t* scales, float* out, float factor = 1.0f) {
    const float scale = multiply(f32_of_e4m3(scales[0]), factor);
    uint64_t packed = 0;
    for (int i = 0; i < code_bytes; ++i) packed |= (uint64_t)codes[i] << 8 * i;
    for (int i = 0; i < group; ++i) {
      out[i] = multiply(level_of<FORMAT>((int)(packed >> C::bits * i) & ((1 << C::bits) - 1)), scale);
    }
  }

 private:
  static MEMKV_HD int e2m1_code(float x) {
    int code = 0;
    for (int i = 0; i < C::half - 1; ++i) code += magnitude(x) >= C::boundary(i);
    return code | (int)(bits_of(x) >> 31) << 3;
  }

  // On a boundary the upper code, which of two negative ones is the nearer to zero.
  static MEMKV_HD int turbo_code(float x) {
    const float size = magnitude(x);
    int code = 0;
    for (int i = 0; i < C::half - 1; ++i) {
      code += x < 0.0f ? size > C::boundary(i) : size >= C::boundary(i);
    }
    return x < 0.0f ? C::half - 1 - code : C::half + code;
  }
};

// ---- the formats ----

template <> struct Block<NVFP4> : Coded<NVFP4> {};
template <> struct Block<TURBO4> : Coded<TURBO4> {};
template <> struct Block<TURBO3> : Coded<TURBO3> {};
template <> struct Block<TURBO2> : Coded<TURBO2> {};

template <>
struct Block<TURBO8> {
  static constexpr int group = 16, code_bytes = 16, scale_bytes = 2;
  static MEMKV_HD void encode(const float* from, uint8_t* codes, uint8_t* scales, float factor = 1.0f) {
    float x[group];
    const float largest = scaled_down(from, factor, x);
    if (!is_finite(largest)) {
      for (int i = 0; i < group; ++i) codes[i] = 0;
      store_u16(scales, BF16_NAN);
      return;
    }
    const float wanted = divide(largest, E4M3_MAX);
    const uint16_t stored = bf16_of(wanted > LEAST_TURBO ? wanted : LEAST_TURBO);
    store_u16(scales, stored);
    for (int i = 0; i < group; ++i) codes[i] = e4m3_of(divide(x[i], f32_of_bf16(stored)));
  }
  static MEMKV_HD void decode(const uint8_t* codes, const uint8_t* scales, float* out, float factor = 1.0f) {
    const float scale = multiply(f32_of_bf16(load_u16(scales)), factor);
    for (int i = 0; i < group; ++i) out[i] = multiply(f32_of_e4m3(codes[i]), scale);
  }
};

MEMKV_HD constexpr bool is_rotated(int format) { return format >= TURBO8 && format <= TURBO2; }

// ---- rotation: second * H(first * x) * norm, in place; the inverse has the signs swapped ----

// `first` and `second` are 1 or -1 for each of `size` elements, 64 to 512, a power of two.
MEMKV_HD void rotate_head(float* x, int size, const float* first, const float* second, float norm) {
  for (int i = 0; i < size; ++i) x[i] = multiply(x[i], first[i]);
  for (int stride = 1; stride < size; stride *= 2) {
    for (int i = 0; i < size; ++i) {
      if (i & stride) continue;
      const float low = x[i], high = x[i + stride];
      x[i] = add(low, high);
      x[i + stride] = add(low, -high);
    }
  }
  for (int i = 0; i < size; ++i) x[i] = multiply(multiply(x[i], norm), second[i]);
}

}  // namespace memkv
