// Rows of groups of sixteen, packed four groups at a time: nvfp4 and the turbo formats, rotated on
// the way. A group with an infinity or NaN is packed by Block, so that every path has its bytes.
#pragma once

#include "simd_groups.h"

namespace memkv {

constexpr int LARGEST_ROTATED = 512;

// What a rotated format multiplies by before and after the transform: signs, and signs times the
// transform's norm.
struct Rotation {
  const float* before;
  const float* after;
};

template <int SIZE, class T>
void rotate_row(const T* from, const Rotation& rotation, float* out) {
  constexpr int vectors = SIZE / 16;
  F x[vectors];
  for (int i = 0; i < vectors; ++i) {
    const F signs = load(rotation.before + 16 * i);
    x[i] = butterflies<8>(butterflies<4>(butterflies<2>(butterflies<1>(times(load(from + 16 * i), signs)))));
  }
  for (int stride = 1; stride < vectors; stride *= 2) {
    for (int i = 0; i < vectors; ++i) {
      if (i & stride) continue;
      const F low = x[i], high = x[i + stride];
      x[i] = plus(low, high);
      x[i + stride] = minus(low, high);
    }
  }
  for (int i = 0; i < vectors; ++i) store(out + 16 * i, times(x[i], load(rotation.after + 16 * i)));
}

// `size` is 64, 128, 256 or 512.
template <class T>
void rotate_row(const T* from, int64_t size, const Rotation& rotation, float* out) {
  switch (size) {
    case 64: return rotate_row<64>(from, rotation, out);
    case 128: return rotate_row<128>(from, rotation, out);
    case 256: return rotate_row<256>(from, rotation, out);
    default: return rotate_row<512>(from, rotation, out);
  }
}

// ---- packing ----

// Codes are counts of boundaries that a number reaches; four times each, in order.
template <int FORMAT>
struct Boundaries {
  using C = Codebook<FORMAT>;
  static constexpr int count = FORMAT == NVFP4 ? C::half - 1 : 2 * C::half - 1;
  static constexpr bool is_signed = FORMAT != NVFP4;
  float values[count];

  constexpr Boundaries() : values() {
    for (int i = 0; i < C::half - 1; ++i) {
      values[count - 1 - i] = 4.0f * C::boundary(C::half - 2 - i);
      if (is_signed) values[i] = -4.0f * C::boundary(C::half - 2 - i);
    }
  }
};

// The squares of the levels of codes.
template <int FORMAT>
struct Squares {
  float values[16];

  constexpr Squares() : values() {
    for (int code = 0; code < 1 << Codebook<FORMAT>::bits; ++code) {
      values[code] = level_of<FORMAT>(code) * level_of<FORMAT>(code);
    }
  }
};

template <int FORMAT>
struct Tables {
  static constexpr Squares<FORMAT> all_squares{};
  Counter<Boundaries<FORMAT>> boundaries;
  Table squares = table_of(all_squares.values);
};

// COUNT groups, at most four, from `x` to consecutive codes and scales.
template <int COUNT, int FORMAT>
inline void encode_few(const F x[4], const Tables<FORMAT>& tables, uint8_t* codes, uint8_t* scales) {
  using B = Block<FORMAT>;
  using C = Codebook<FORMAT>;
  const f32x4 most = largest(x, x);
  I codes_of[4];
  I scale;
  if constexpr (FORMAT == NVFP4) {
    scale = e4m3_of(beside(most / four(E2M1_MAX)));
    const f32x4 stored = first_four(f32_of_e4m3(scale));
    // Where the scale is stored as 0 every code is 0.
    const i32x4 some = stored > 0.0f;
    const f32x4 quarter = stored * four(0.25f);
    for (int k = 0; k < 4; ++k) {
      const F size = smaller(over(magnitudes(x[k]), splat(quarter, k)), splat(LARGEST_COUNTED));
      const I code = either(counted(size, tables.boundaries), sign_bits(x[k], 3));
      codes_of[k] = kept(code, some[k]);
    }
  } else {
    const i32x4 ordinary = most > LEAST_TURBO;
    const f32x4 widened = four(C::level(C::half - 1)) / most;
    const f32x4 factors = (f32x4)((ordinary & (i32x4)widened) | (~ordinary & (i32x4)four(1.0f))) * four(4.0f);
    F squares[4], levels[4];
    for (int k = 0; k < 4; ++k) {
      codes_of[k] = counted(times(x[k], splat(factors, k)), tables.boundaries);
      levels[k] = looked_up(tables.squares, codes_of[k]);
      squares[k] = times(x[k], x[k]);
    }
    scale = e4m3_of(beside(roots(sums(squares)) / roots(sums(levels))));
  }
  uint8_t bytes[4 * B::code_bytes];
  join_codes<C::bits>(codes_of, bytes);
  memcpy(codes, bytes, COUNT * B::code_bytes);
  const uint32_t scale_bytes = four_bytes(scale);
  memcpy(scales, &scale_bytes, COUNT);
  for (uint32_t odd = ~finite(most) & ((1u << COUNT) - 1u), k = 0; odd; ++k, odd >>= 1) {
    if (!(odd & 1)) continue;
    float group[B::group];
    store(group, x[k]);
    B::encode(group, codes + k * B::code_bytes, scales + k);
  }
}

// turbo8, which has no codebook.
template <>
struct Tables<TURBO8> {};

template <int COUNT>
inline void encode_few(const F x[4], const Tables<TURBO8>&, uint8_t* codes, uint8_t* scales) {
  using B = Block<TURBO8>;
  const f32x4 wanted = largest(x, x) / four(E4M3_MAX);
  const i32x4 enough = wanted > LEAST_TURBO;
  const i32x4 bits = (enough & (i32x4)wanted) | (~enough & (i32x4)four(LEAST_TURBO));
  const i32x4 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & (int)0xFFFF0000;
  for (int k = 0; k < COUNT; ++k) {
    if (finite(wanted) >> k & 1) {
      store_bytes(codes + k * B::code_bytes, e4m3_of(over(x[k], splat((f32x4)rounded, k))));
      store_u16(scales + k * B::scale_bytes, (uint16_t)((uint32_t)rounded[k] >> 16));
    } else {
      float group[B::group];
      store(group, x[k]);
      B::encode(group, codes + k * B::code_bytes, scales + k * B::scale_bytes);
    }
  }
}

template <int FORMAT, class T>
void encode_sixteens(const T* from, int64_t num_groups, float factor, uint8_t* codes, uint8_t* scales) {
  using B = Block<FORMAT>;
  const Tables<FORMAT> tables{};
  for (int64_t at = 0; at < num_groups; at += 4) {
    const int count = (int)(num_groups - at < 4 ? num_groups - at : 4);
    F x[4];
    for (int k = 0; k < 4; ++k) {
      x[k] = times(load(from + 16 * (at + (k < count ? k : count - 1))), splat(factor));
    }
    uint8_t *const code_at = codes + at * B::code_bytes, *const scale_at = scales + at * B::scale_bytes;
    switch (count) {
      case 1: encode_few<1>(x, tables, code_at, scale_at); break;
      case 2: encode_few<2>(x, tables, code_at, scale_at); break;
      case 3: encode_few<3>(x, tables, code_at, scale_at); break;
      default: encode_few<4>(x, tables, code_at, scale_at);
    }
  }
}

// The largest magnitude of a row; NaN where there is one.
template <class T>
float largest_of(const T* row, int64_t size) {
  uint32_t most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = bits_of(scalar(row[i])) & 0x7FFFFFFFu;
    most = bits > most ? bits : most;
  }
  return float_of(most);
}

}  // namespace memkv
