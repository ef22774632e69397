// What the lanes of a warp find together.
#pragma once

#include "cuda/device.h"

// The largest value, or a NaN if there is one, in every lane.
__device__ inline float warp_largest(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, lanes));
  }
  return value;
}
