// The Walsh-Hadamard rotation of a row by a warp: second * H(first * x) * norm.
//
// H is in natural (Hadamard) order, `first` and `second` are vectors of signs; with the two swapped
// the same function is the inverse. The bits are those of rotation.py: strides 1, 2, 4, ... of
// sums and differences.
#pragma once

#include "cuda/device.h"

// Element 32 i + lane of the row lies in x[i] of `lane`, so strides below 32 cross lanes and the
// others cross registers. SIZE is 64, 128, 256 or 512. Every lane of the warp comes here.
template <int SIZE>
__device__ inline void rotate_row(float (&x)[SIZE / 32], const float* first, const float* second,
                                  float norm) {
  constexpr int held = SIZE / 32;
  const int lane = (int)(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < held; ++i) x[i] = multiply(x[i], first[32 * i + lane]);
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], stride);
      x[i] = lane & stride ? add(other, -x[i]) : add(x[i], other);
    }
  }
#pragma unroll
  for (int stride = 1; stride < held; stride *= 2) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (i & stride) continue;
      const float low = x[i], high = x[i + stride];
      x[i] = add(low, high);
      x[i + stride] = add(low, -high);
    }
  }
#pragma unroll
  for (int i = 0; i < held; ++i) x[i] = multiply(multiply(x[i], norm), second[32 * i + lane]);
}
