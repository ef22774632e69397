// What the recurrent kernels share: spans of rows, elements of any type as f32, and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "../codec/blocks.h"
#if defined(__F16C__)
#include "x86.h"
#endif

namespace memkv {

enum ScanType { SCAN_F32, SCAN_BF16, SCAN_F16 };

// Rows [first, first + count), whose state comes from slot `read` (zeros if negative) and goes to
// slot `written` (nowhere if negative).
struct Span {
  int64_t first, count, read, written;
};

// Elements of `type`, rows and heads (or none) so many elements apart.
struct Rows {
  const void* at;
  int64_t row_stride, head_stride;
  int32_t type, padding;
};

inline float f32_of_half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return f32_of_f16(bits);
#endif
}

// `count` elements from the `offset`-th on.
inline void to_floats(const void* from, int type, int64_t offset, int count, float* to) {
  if (type == SCAN_F32) {
    memcpy(to, (const float*)from + offset, sizeof(float) * (size_t)count);
    return;
  }
  const uint16_t* const bits = (const uint16_t*)from + offset;
  if (type == SCAN_BF16) {
    for (int i = 0; i < count; ++i) to[i] = f32_of_bf16(bits[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = f32_of_half(bits[i]);
  }
}

inline void from_floats(const float* from, int count, void* to, int type, int64_t offset) {
  if (type == SCAN_F32) {
    memcpy((float*)to + offset, from, sizeof(float) * (size_t)count);
    return;
  }
  uint16_t* const bits = (uint16_t*)to + offset;
  for (int i = 0; i < count; ++i) bits[i] = type == SCAN_BF16 ? bf16_of(from[i]) : f16_of(from[i]);
}

// A row's elements as f32: where they lie if they are f32, else in `room`.
inline const float* floats_of(const Rows& rows, int64_t row, int head, int count, float* room) {
  const int64_t offset = row * rows.row_stride + head * rows.head_stride;
  if (rows.type == SCAN_F32) return (const float*)rows.at + offset;
  to_floats(rows.at, rows.type, offset, count, room);
  return room;
}

// Asks for a row's elements before they are needed.
inline void fetch(const Rows& rows, int64_t row, int head, int first, int count) {
  const int size = rows.type == SCAN_F32 ? 4 : 2;
  const int64_t offset = row * rows.row_stride + head * rows.head_stride + first;
  const char* const at = (const char*)rows.at + offset * size;
  for (int i = 0; i < count * size; i += 64) __builtin_prefetch(at + i);
}

// Whether the rows and slots of all spans are there.
template <class Arguments>
bool spans_fit(const Arguments& a) {
  for (int64_t i = 0; i < a.num_spans; ++i) {
    const Span& span = a.spans[i];
    if (span.count < 0 || span.first < 0 || span.first > a.num_rows - span.count) return false;
    if (span.read >= a.num_slots || span.written >= a.num_slots) return false;
  }
  return true;
}

}  // namespace memkv
