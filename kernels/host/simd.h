// Sixteen f32 or i32 lanes, written once per machine: AVX-512, AVX2 with F16C, or any other by
// GCC's vector types (SSE2, NEON). Compile flags choose (MEMKV_PORTABLE: the last of them); every
// path gives the same bits.
//
//   F, I                        16 f32, 16 i32
//   load, store                 16 elements of f32, bf16 or f16; stores round as codec/blocks.h
//   f32x4                       one number of each of four groups; a group is a[k] and b[k]
//   largest(a, b)               the largest magnitude of each group; NaN where there is one
//   extents(a, b, low, high)    least and greatest of each group; returns a bit per group with a NaN
//   store_signed, store_nibbles the codes of four groups, at four places
#pragma once

#include <cstdint>
#include <cstring>

#include "../codec/blocks.h"

namespace memkv {

// Elements of tensors: their bits, apart from whole numbers by type.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float scalar(float x) { return x; }
inline float scalar(bf16 x) { return f32_of_bf16(x.bits); }
inline float scalar(f16 x) { return f32_of_f16(x.bits); }
inline void set(float* at, float x) { *at = x; }
inline void set(bf16* at, float x) { at->bits = bf16_of(x); }
inline void set(f16* at, float x) { at->bits = f16_of(x); }

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// The f32 below 0.5: a sum with it, cut off, rounds halves away from zero and nothing else up.
constexpr float BELOW_HALF = 0.49999997f;

}  // namespace memkv

#if defined(MEMKV_PORTABLE)
#include "simd_portable.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace memkv {

inline f32x4 four(float x) { return f32x4{x, x, x, x}; }

// A bit per number that is neither infinite nor NaN.
inline uint32_t finite(f32x4 x) {
  return mask_of(((i32x4)x & 0x7FFFFFFF) < 0x7F800000);
}

}  // namespace memkv
