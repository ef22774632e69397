// Rows into records and out of records: vector forms of codec/blocks.h and codec/groups.h, called
// through ctypes.
//
// Groups that are not ordinary (NaN, infinite, a reciprocal that overflows, a zero minimum) are
// packed by Block itself, so that every path has its bytes. An element that already has a plain
// format's own type is copied, NaN and all.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../codec/blocks.h"
#include "group_records.h"
#include "simd.h"

extern "C" {
enum MemkvType : int32_t { MEMKV_F32 = 0, MEMKV_BF16 = 1, MEMKV_F16 = 2 };
enum MemkvResult : int32_t { MEMKV_DONE = 0, MEMKV_UNKNOWN = 1, MEMKV_OUT_OF_RANGE = 2 };
}

namespace memkv {
namespace {

constexpr int LANES = 16;

template <int FORMAT, class T>
constexpr bool is_copy = (FORMAT == F32 && std::is_same<T, float>::value) ||
                         (FORMAT == F16 && std::is_same<T, f16>::value) ||
                         (FORMAT == BF16 && std::is_same<T, bf16>::value);

inline float take_half(const uint8_t* at) {
  uint16_t bits;
  memcpy(&bits, at, 2);
  return of_half(bits);
}

// Where four groups, of any rows and heads, come from and go to.
template <class T>
struct Groups {
  const T* from[4];
  uint8_t* codes[4];
  uint8_t* scales[4];
};

inline void put_halves(uint8_t* const scales[4], int offset, f32x4 x) {
  uint64_t halves = halves_of(x);
  for (int k = 0; k < 4; ++k, halves >>= 16) {
    const uint16_t half = (uint16_t)halves;
    memcpy(scales[k] + offset, &half, 2);
  }
}

// Packs four groups at once, which share their divisions and the steps of their reductions. Groups
// whose codes do not follow from plain arithmetic are packed again by Block.
template <int FORMAT, class T>
void encode_groups(const Groups<T>& groups) {
  using B = Block<FORMAT>;
  F a[4], b[4];
  for (int k = 0; k < 4; ++k) {
    a[k] = load(groups.from[k]);
    b[k] = load(groups.from[k] + LANES);
  }
  uint32_t odd = 0;
  f32x4 d, inverse;
  I low[4], high[4];
  if constexpr (FORMAT == Q8_0) {
    d = largest(a, b) / four(127.0f);
    inverse = four(1.0f) / d;
    for (int k = 0; k < 4; ++k) {
      const F factor = splat(inverse, k);
      low[k] = rounded_away(times(a[k], factor));
      high[k] = rounded_away(times(b[k], factor));
    }
    store_signed(groups.codes, low, high);
  } else {
    f32x4 least, most;
    odd = extents(a, b, least, most);
    float offset = 0.5f;
    if constexpr (B::scale_bytes == 4) {
      d = (most - least) / four((float)B::highest);
      // The sign of a zero minimum depends on the order of the elements.
      odd |= mask_of(least == 0.0f);
      put_halves(groups.scales, 2, least);
    } else {
      // So does the sign of the largest magnitude where both signs have it.
      const i32x4 positive = most > -least;
      odd |= mask_of(most == -least);
      const f32x4 extreme = (f32x4)((positive & (i32x4)most) | (~positive & (i32x4)least));
      d = extreme / four(-(float)B::zero_code);
      offset += (float)B::zero_code;
    }
    inverse = four(1.0f) / d;
    for (int k = 0; k < 4; ++k) {
      const F factor = splat(inverse, k), half = splat(offset);
      F x = a[k], y = b[k];
      if constexpr (B::scale_bytes == 4) {
        const F least_k = splat(least, k);
        x = minus(x, least_k);
        y = minus(y, least_k);
      }
      low[k] = truncated(plus(times(x, factor), half));
      high[k] = truncated(plus(times(y, factor), half));
      if constexpr (B::scale_bytes == 2) {  // with a minimum the largest is never half a code too high
        low[k] = at_most(low[k], B::highest);
        high[k] = at_most(high[k], B::highest);
      }
    }
    store_nibbles<B::code_bytes == 20>(groups.codes, low, high);
  }
  put_halves(groups.scales, 0, d);
  odd |= 15u & ~(finite(d) & finite(inverse));
  for (int k = 0; odd; ++k, odd >>= 1) {
    if (odd & 1) {
      float group[B::group];
      store(group, a[k]);
      store(group + LANES, b[k]);
      B::encode(group, groups.codes[k], groups.scales[k]);
    }
  }
}

// Packs a row of a format whose groups are single elements.
template <int FORMAT, class T>
void encode_elements(const T* x, int64_t count, uint8_t* codes, float factor) {
  using B = Block<FORMAT>;
  if constexpr (is_copy<FORMAT, T>) {
    memcpy(codes, x, (size_t)count * sizeof(T));
  } else {
    int64_t i = 0;
    for (; FORMAT != F32 && i + LANES <= count; i += LANES) {
      const F a = load(x + i);
      uint8_t* at = codes + i * B::code_bytes;
      if constexpr (FORMAT == F16) {
        store((f16*)at, a);
      } else if constexpr (FORMAT == BF16) {
        store((bf16*)at, a);
      } else if constexpr (FORMAT == FP8) {
        store_bytes(at, e4m3_of(times(a, splat(factor))));
      }
    }
    for (; i < count; ++i) {
      const float value = scalar(x[i]);
      B::encode(&value, codes + i * B::code_bytes, nullptr, factor);
    }
  }
}

template <int FORMAT, class T>
void decode(const uint8_t* codes, const uint8_t* scales, int64_t count, T* out, float factor) {
  using B = Block<FORMAT>;
  if constexpr (is_copy<FORMAT, T>) {
    memcpy(out, codes, (size_t)count * sizeof(T));
  } else if constexpr (B::group == 16) {
    decode_sixteens<FORMAT>(codes, scales, count, out, factor);
  } else if constexpr (B::group == 32) {
    for (int64_t i = 0; i < count; i += B::group) {
      const F d = splat(take_half(scales));
      F a, b;
      if constexpr (FORMAT == Q8_0) {
        a = times(floats(load_signed(codes)), d);
        b = times(floats(load_signed(codes + LANES)), d);
      } else {
        I low, high;
        load_nibbles(codes, low, high);
        if constexpr (B::code_bytes == 20) {
          uint32_t fifth;
          memcpy(&fifth, codes + 16, 4);
          low = with_fifth_bits(low, fifth);
          high = with_fifth_bits(high, fifth >> LANES);
        }
        a = floats(low);
        b = floats(high);
        if constexpr (B::scale_bytes == 4) {
          const F m = splat(take_half(scales + 2));
          a = plus(times(a, d), m);
          b = plus(times(b, d), m);
        } else {
          const F zero = splat((float)B::zero_code);
          a = times(minus(a, zero), d);
          b = times(minus(b, zero), d);
        }
      }
      store(out + i, a);
      store(out + i + LANES, b);
      codes += B::code_bytes;
      scales += B::scale_bytes;
    }
  } else {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      const uint8_t* at = codes + i * B::code_bytes;
      if constexpr (FORMAT == F32) {
        store(out + i, load((const float*)at));
      } else if constexpr (FORMAT == F16) {
        store(out + i, load((const f16*)at));
      } else if constexpr (FORMAT == BF16) {
        store(out + i, load((const bf16*)at));
      } else {
        store(out + i, times(f32_of_e4m3(load_unsigned(at)), splat(factor)));
      }
    }
    for (; i < count; ++i) {
      float value;
      B::decode(codes + i * B::code_bytes, scales, &value, factor);
      set(out + i, value);
    }
  }
}

template <int FORMAT, class T>
void append(const MemkvSide& side, const T* src, int64_t num_tokens, int64_t token_stride,
            int64_t head_stride, const int64_t* records, const int64_t* rows, float factor) {
  using B = Block<FORMAT>;
  if constexpr (B::group == 16) {
    append_sixteens<FORMAT>(side, src, num_tokens, token_stride, head_stride, records, rows);
    return;
  }
  const MemkvPart &codes = side.codes, &scales = side.scales;
  Groups<T> groups;
  int held = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (records[t] < 0) continue;
    uint8_t* code_row = codes.base + records[t] * codes.record_stride + rows[t] * codes.row_stride;
    // Rows of one token lie a head apart, which no hardware foresees: ask for the next token's.
    const int64_t ahead = t + 1 < num_tokens && records[t + 1] >= 0 ? t + 1 : t;
    const uint8_t* next_row =
        codes.base + records[ahead] * codes.record_stride + rows[ahead] * codes.row_stride;
    uint8_t* scale_row = scales.base + records[t] * scales.record_stride + rows[t] * scales.row_stride;
    for (int64_t h = 0; h < side.heads; ++h) {
      const T* x = src + t * token_stride + h * head_stride;
      uint8_t *code_at = code_row + h * codes.head_stride, *scale_at = scale_row + h * scales.head_stride;
      __builtin_prefetch(next_row + h * codes.head_stride, 1);
      __builtin_prefetch(next_row + h * codes.head_stride + 64, 1);
      if constexpr (B::group != 32) {
        encode_elements<FORMAT>(x, side.head_size, code_at, factor);
      } else {
        for (int64_t i = 0; i < side.head_size; i += B::group) {
          groups.from[held] = x + i;
          groups.codes[held] = code_at;
          groups.scales[held] = scale_at;
          code_at += B::code_bytes;
          scale_at += B::scale_bytes;
          if (++held == 4) {
            encode_groups<FORMAT>(groups);
            held = 0;
          }
        }
      }
    }
  }
  if (held) {
    for (int k = held; k < 4; ++k) {  // the last ones are packed again, to the same place
      groups.from[k] = groups.from[held - 1];
      groups.codes[k] = groups.codes[held - 1];
      groups.scales[k] = groups.scales[held - 1];
    }
    if constexpr (B::group == 32) encode_groups<FORMAT>(groups);
  }
}

template <int FORMAT, class T>
void gather(const MemkvSide& side, const int64_t* records, int64_t num_records, T* out, float factor) {
  using B = Block<FORMAT>;
  const MemkvPart &codes = side.codes, &scales = side.scales;
  const int64_t groups = side.head_size / B::group;
  // Rows of a head that lie end to end are one long row.
  const bool joined = codes.row_stride == groups * B::code_bytes &&
                      (B::scale_bytes == 0 || scales.row_stride == groups * B::scale_bytes);
  const int64_t runs = joined ? 1 : side.record_rows;
  const int64_t run_elements = side.record_rows / runs * side.head_size;
  for (int64_t h = 0; h < side.heads; ++h) {
    for (int64_t n = 0; n < num_records; ++n) {
      const uint8_t* code_at = codes.base + records[n] * codes.record_stride + h * codes.head_stride;
      const uint8_t* scale_at =
          scales.base + records[n] * scales.record_stride + h * scales.head_stride;
      if (side.exponents.base != nullptr) {
        factor = power(side.exponents.base[records[n] * side.exponents.record_stride + h * side.exponents.head_stride]);
      }
      for (int64_t run = 0; run < runs; ++run) {
        decode<FORMAT>(code_at + run * codes.row_stride, scale_at + run * scales.row_stride,
                       run_elements, out, factor);
        out += run_elements;
      }
    }
  }
}

// Calls visit.run<FORMAT>() for the format of that id; false if there is none.
template <class Visit>
bool with_format(int32_t format, Visit visit) {
  switch (format) {
    case F32: visit.template run<F32>(); return true;
    case F16: visit.template run<F16>(); return true;
    case BF16: visit.template run<BF16>(); return true;
    case FP8: visit.template run<FP8>(); return true;
    case Q8_0: visit.template run<Q8_0>(); return true;
    case Q5_1: visit.template run<Q5_1>(); return true;
    case Q5_0: visit.template run<Q5_0>(); return true;
    case Q4_1: visit.template run<Q4_1>(); return true;
    case Q4_0: visit.template run<Q4_0>(); return true;
    case NVFP4: visit.template run<NVFP4>(); return true;
    case TURBO8: visit.template run<TURBO8>(); return true;
    case TURBO4: visit.template run<TURBO4>(); return true;
    case TURBO3: visit.template run<TURBO3>(); return true;
    case TURBO2: visit.template run<TURBO2>(); return true;
    default: return false;
  }
}

template <class T>
struct Append {
  const MemkvSide& side;
  const void* src;
  int64_t num_tokens, token_stride, head_stride;
  const int64_t *records, *rows;
  float factor;
  template <int FORMAT>
  void run() const {
    append<FORMAT>(side, (const T*)src, num_tokens, token_stride, head_stride, records, rows, factor);
  }
};

template <class T>
struct Gather {
  const MemkvSide& side;
  const int64_t* records;
  int64_t num_records;
  void* out;
  float factor;
  template <int FORMAT>
  void run() const {
    gather<FORMAT>(side, records, num_records, (T*)out, factor);
  }
};

}  // namespace
}  // namespace memkv

extern "C" {

// "avx512", "avx2" or "portable".
const char* memkv_path() { return memkv::PATH; }

// Packs src [num_tokens][heads][head_size], strides in elements, into (records[t], rows[t]); a
// negative record writes nothing. `factor`: the reciprocal of fp8's scale. Nothing is written when
// a record or a row is out of range.
int32_t memkv_append(const MemkvSide* side, const void* src, int32_t type, int64_t num_tokens,
                     int64_t token_stride, int64_t head_stride, const int64_t* records,
                     const int64_t* rows, float factor) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (records[t] < 0) continue;
    if (records[t] >= side->num_records || rows[t] < 0 || rows[t] >= side->record_rows) {
      return MEMKV_OUT_OF_RANGE;
    }
  }
  const auto in = [&](auto element) {
    using T = decltype(element);
    return memkv::with_format(side->format, memkv::Append<T>{*side, src, num_tokens, token_stride,
                                                             head_stride, records, rows, factor});
  };
  const bool known = type == MEMKV_F32    ? in(float{})
                     : type == MEMKV_BF16 ? in(memkv::bf16{})
                     : type == MEMKV_F16  ? in(memkv::f16{})
                                          : false;
  return known ? MEMKV_DONE : MEMKV_UNKNOWN;
}

// Unpacks all rows of `records` in order into out [heads][num_records * record_rows][head_size].
// `factor`: fp8's scale. Nothing is written when a record is out of range.
int32_t memkv_gather(const MemkvSide* side, const int64_t* records, int64_t num_records, void* out,
                     int32_t type, float factor) {
  for (int64_t n = 0; n < num_records; ++n) {
    if (records[n] < 0 || records[n] >= side->num_records) return MEMKV_OUT_OF_RANGE;
  }
  const auto as = [&](auto element) {
    using T = decltype(element);
    return memkv::with_format(side->format,
                              memkv::Gather<T>{*side, records, num_records, out, factor});
  };
  const bool known = type == MEMKV_F32    ? as(float{})
                     : type == MEMKV_BF16 ? as(memkv::bf16{})
                     : type == MEMKV_F16  ? as(memkv::f16{})
                                          : false;
  return known ? MEMKV_DONE : MEMKV_UNKNOWN;
}
}
