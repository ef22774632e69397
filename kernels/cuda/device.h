// What the kernels share: element types of rows, where a row of a record lies, shared memory.
//
// The same files are compiled by nvcc, NVRTC and, with MEMKV_EMULATE, by a host C++17 compiler.
#pragma once

#ifdef MEMKV_EMULATE
#include "emulation/emulator.h"
#endif
#include "codec/blocks.h"
#include "codec/groups.h"

// All shared memory is dynamic: its bytes are an argument of the launch.
#ifdef MEMKV_EMULATE
#define MEMKV_SHARED(type, name) type* const name = (type*)emulation::machine.shared()
#else
#define MEMKV_SHARED(type, name)                              \
  extern __shared__ __align__(16) unsigned char memkv_shared[]; \
  type* const name = (type*)memkv_shared
#endif

using namespace memkv;

// a * b + c, rounded once: spelled out so that no compiler decides where products are fused.
__device__ inline float multiply_add(float a, float b, float c) {
#ifdef MEMKV_EMULATE
  return std::fma(a, b, c);
#else
  return __fmaf_rn(a, b, c);
#endif
}

// Spelled out: HUGE_VALF needs a header that NVRTC has not.
MEMKV_HD float minus_infinity() { return float_of(0xFF800000u); }

// The larger one, or a NaN if there is one.
MEMKV_HD float larger(float a, float b) { return a >= b || is_nan(a) ? a : b; }

// One element of a row as torch keeps it; DTYPE is F32, F16 or BF16 of memkv::Format.
template <int DTYPE>
struct Element;

template <>
struct Element<F32> {
  using stored = float;
  static MEMKV_HD float load(float value) { return value; }
  static MEMKV_HD float store(float value) { return value; }
};

template <>
struct Element<F16> {
  using stored = uint16_t;
  static MEMKV_HD float load(uint16_t bits) { return f32_of_f16(bits); }
  static MEMKV_HD uint16_t store(float value) { return f16_of(value); }
};

template <>
struct Element<BF16> {
  using stored = uint16_t;
  static MEMKV_HD float load(uint16_t bits) { return f32_of_bf16(bits); }
  static MEMKV_HD uint16_t store(float value) { return bf16_of(value); }
};

// The widest word that divides NUM_BYTES. Parts of a record start at multiples of 16 and hold whole
// groups, so a group's codes and its scales are aligned to their word.
template <int NUM_BYTES, bool By4 = NUM_BYTES % 4 == 0, bool By2 = NUM_BYTES % 2 == 0>
struct Word {
  using type = uint8_t;
};
template <int NUM_BYTES>
struct Word<NUM_BYTES, false, true> {
  using type = uint16_t;
};
template <int NUM_BYTES>
struct Word<NUM_BYTES, true, true> {
  using type = uint32_t;
};

// Both sides aligned to the word of NUM_BYTES.
template <int NUM_BYTES>
MEMKV_HD void copy_bytes(uint8_t* to, const uint8_t* from) {
  using word = typename Word<NUM_BYTES>::type;
  for (int i = 0; i < NUM_BYTES / (int)sizeof(word); ++i) ((word*)to)[i] = ((const word*)from)[i];
}

// One part (codes or scales) of one side of a layer in all records: records `record_bytes` apart,
// in each [head][row] of `row_bytes`, as memkv_pp.records lays them.
struct Rows {
  int64_t record_bytes;
  int record_rows, row_bytes;

  MEMKV_HD int64_t at(int64_t record, int head, int row) const {
    return record * record_bytes + ((int64_t)head * record_rows + row) * row_bytes;
  }
};

// A format's group with room for at least one byte of scales.
template <int FORMAT>
struct alignas(4) Packed {
  static constexpr int group = Block<FORMAT>::group;
  static constexpr int code_bytes = Block<FORMAT>::code_bytes;
  static constexpr int scale_bytes = Block<FORMAT>::scale_bytes;
  alignas(4) uint8_t codes[code_bytes];
  alignas(4) uint8_t scales[scale_bytes ? scale_bytes : 1];

  // Group `index` of a row whose codes and scales begin at these addresses.
  MEMKV_HD void load(const uint8_t* row_codes, const uint8_t* row_scales, int index) {
    copy_bytes<code_bytes>(codes, row_codes + index * code_bytes);
    if constexpr (scale_bytes > 0) copy_bytes<scale_bytes>(scales, row_scales + index * scale_bytes);
  }
};
