// Rows of groups of sixteen into records and out of them, with their exponents.
#pragma once

#include <type_traits>

#include "group_rows.h"
#include "sides.h"
#include "unpack_groups.h"

namespace memkv {

// Unpacks groups of sixteen, by way of the first cache where they are wanted narrower than f32.
template <int FORMAT, class T>
void decode_sixteens(const uint8_t* codes, const uint8_t* scales, int64_t count, T* out, float factor) {
  using B = Block<FORMAT>;
  if constexpr (std::is_same<T, float>::value) {
    unpack_sixteens<FORMAT>(codes, scales, codes, count / B::group, factor, out);
  } else {
    constexpr int most = 32;  // groups at a time
    float wide[most * B::group];
    for (int64_t groups = count / B::group; groups > 0; groups -= most) {
      const int64_t some = groups < most ? groups : most;
      unpack_sixteens<FORMAT>(codes, scales, codes, some, factor, wide);
      for (int64_t i = 0; i < some * B::group; i += B::group) store(out + i, load(wide + i));
      codes += some * B::code_bytes;
      scales += some * B::scale_bytes;
      out += some * B::group;
    }
  }
}

// Writes the exponents of the records whose row 0 is among the rows.
template <class T>
void set_exponents(const MemkvSide& side, const T* src, int64_t num_tokens, int64_t token_stride,
                   int64_t head_stride, const int64_t* records, const int64_t* rows) {
  float row[LARGEST_ROTATED];
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (records[t] < 0 || rows[t] != 0) continue;
    for (int64_t h = 0; h < side.heads; ++h) {
      const T* x = src + t * token_stride + h * head_stride;
      float most;
      if (side.before != nullptr) {
        rotate_row(x, side.head_size, {side.before, side.after}, row);
        most = largest_of(row, side.head_size);
      } else {
        most = largest_of(x, side.head_size);
      }
      side.exponents.base[records[t] * side.exponents.record_stride + h * side.exponents.head_stride] =
          exponent_byte(most);
    }
  }
}

// Groups of sixteen, a row at a time: the exponents of the call's first rows count for its others.
template <int FORMAT, class T>
void append_sixteens(const MemkvSide& side, const T* src, int64_t num_tokens, int64_t token_stride,
                     int64_t head_stride, const int64_t* records, const int64_t* rows) {
  const MemkvPart &codes = side.codes, &scales = side.scales, &exponents = side.exponents;
  const int64_t groups = side.head_size / Block<FORMAT>::group;
  if (exponents.base != nullptr) {
    set_exponents(side, src, num_tokens, token_stride, head_stride, records, rows);
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (records[t] < 0) continue;
    const int64_t ahead = t + 1 < num_tokens && records[t + 1] >= 0 ? t + 1 : t;
    const uint8_t* next_row =
        codes.base + records[ahead] * codes.record_stride + rows[ahead] * codes.row_stride;
    for (int64_t h = 0; h < side.heads; ++h) {
      const T* x = src + t * token_stride + h * head_stride;
      uint8_t* code_at = codes.base + records[t] * codes.record_stride + h * codes.head_stride +
                         rows[t] * codes.row_stride;
      uint8_t* scale_at = scales.base + records[t] * scales.record_stride + h * scales.head_stride +
                          rows[t] * scales.row_stride;
      __builtin_prefetch(next_row + h * codes.head_stride, 1);
      float factor = 1.0f;
      if (exponents.base != nullptr) {
        factor = reciprocal_power(exponents.base[records[t] * exponents.record_stride + h * exponents.head_stride]);
      }
      if constexpr (is_rotated(FORMAT)) {
        alignas(64) float row[LARGEST_ROTATED];
        rotate_row(x, side.head_size, {side.before, side.after}, row);
        encode_sixteens<FORMAT>(row, groups, factor, code_at, scale_at);
      } else {
        encode_sixteens<FORMAT>(x, groups, factor, code_at, scale_at);
      }
    }
  }
}

}  // namespace memkv
