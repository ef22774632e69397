// The Walsh-Hadamard rotation of rows, and its inverse: second * H(first * x) / sqrt(SIZE).
//
// H is in natural (Hadamard) order, `first` and `second` are vectors of signs; with the two swapped
// the same kernel is the inverse. A warp takes a row: element 32 i + lane lies in register i of
// `lane`, so strides below 32 cross lanes and the others cross registers.
#include "cuda/device.h"

// values and out [num_rows, SIZE] may be the same memory. SIZE is 64, 128, 256 or 512.
template <int DTYPE, int SIZE>
__global__ void rotate(const typename Element<DTYPE>::stored* values, const float* first,
                       const float* second, typename Element<DTYPE>::stored* out, int64_t num_rows,
                       float factor) {
  constexpr int held = SIZE / 32;
  const int lane = (int)(threadIdx.x % 32);
  const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= num_rows) return;
  float x[held];
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int at = 32 * i + lane;
    x[i] = multiply(Element<DTYPE>::load(values[row * SIZE + at]), first[at]);
  }
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
  for (int i = 0; i < held; ++i) {
    const int at = 32 * i + lane;
    out[row * SIZE + at] = Element<DTYPE>::store(multiply(multiply(x[i], factor), second[at]));
  }
}
