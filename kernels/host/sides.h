// Where rows lie. A side (K or V of one layer) is an array of records; a row of one head of one
// token is `head_size` elements, its codes and its scales lie apart:
//
//   codes of (record n, head h, row b):  codes + n * record + h * head + b * row     (bytes)
//   scales: the same with their own strides
#pragma once

#include <cstdint>

extern "C" {

struct MemkvPart {
  uint8_t* base;
  int64_t record_stride, head_stride, row_stride;
};

struct MemkvSide {
  int32_t format;  // memkv::Format
  int32_t heads;
  int64_t head_size;
  int64_t num_records, record_rows;
  MemkvPart codes, scales;
  MemkvPart exponents;          // a byte each record and head; no base: none
  const float *before, *after;  // of memkv::Rotation, head_size each; null: not rotated
};
}
