// The rotation of rows, and its inverse, where nothing else is done to them.
#include "cuda/rotation.h"

// values and out [num_rows, SIZE] may be the same memory. SIZE is 64, 128, 256 or 512. A warp takes
// a row.
template <int DTYPE, int SIZE>
__global__ void rotate(const typename Element<DTYPE>::stored* values, const float* first,
                       const float* second, typename Element<DTYPE>::stored* out, int64_t num_rows,
                       float norm) {
  constexpr int held = SIZE / 32;
  const int lane = (int)(threadIdx.x % 32);
  const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= num_rows) return;
  float x[held];
#pragma unroll
  for (int i = 0; i < held; ++i) x[i] = Element<DTYPE>::load(values[row * SIZE + 32 * i + lane]);
  rotate_row<SIZE>(x, first, second, norm);
#pragma unroll
  for (int i = 0; i < held; ++i) out[row * SIZE + 32 * i + lane] = Element<DTYPE>::store(x[i]);
}
