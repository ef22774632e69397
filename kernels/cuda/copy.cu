// Moves whole records, one layer's state, and the window of a convolution. Nothing is computed.
//
// A pair with a negative id is skipped. No unit may be written twice, or both read and written, in
// one launch.
#include "cuda/device.h"

struct alignas(16) Vector {
  uint32_t words[4];
};

// Record from[pair] of `source` to record to[pair] of `target`, both `record_bytes` long and apart,
// a multiple of 16. Block (pair, y): the blocks of a pair share its vectors.
__global__ void copy_records(uint8_t* target, const uint8_t* source, const int64_t* to,
                             const int64_t* from, int64_t record_bytes) {
  const int64_t into = to[blockIdx.x], out_of = from[blockIdx.x];
  if (into < 0 || out_of < 0) return;
  Vector* const written = (Vector*)(target + into * record_bytes);
  const Vector* const read = (const Vector*)(source + out_of * record_bytes);
  const int64_t step = (int64_t)gridDim.y * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < record_bytes / 16; i += step) {
    written[i] = read[i];
  }
}

// `num_elements` f32, `offset` bytes into slot from[pair] of `source`, to the same place of slot
// to[pair] of `target`; slots are `slot_bytes` apart. Blocks as above.
__global__ void copy_state(uint8_t* target, const uint8_t* source, const int64_t* to,
                           const int64_t* from, int64_t slot_bytes, int64_t offset,
                           int64_t num_elements) {
  const int64_t into = to[blockIdx.x], out_of = from[blockIdx.x];
  if (into < 0 || out_of < 0) return;
  uint32_t* const written = (uint32_t*)(target + into * slot_bytes + offset);
  const uint32_t* const read = (const uint32_t*)(source + out_of * slot_bytes + offset);
  const int64_t step = (int64_t)gridDim.y * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < num_elements; i += step) {
    written[i] = read[i];
  }
}
