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

// Shift sequence s's convolution state by its new rows. State: f32 [channels][taps], `offset` bytes
// into slot slots[s]; spans [sequences, 2] say its first row in values [rows, channels] and their
// number. Afterwards the state is the last `taps` of the old state followed by the new rows. Block
// (s, y), a thread for each channel.
template <int DTYPE>
__global__ void roll_conv(uint8_t* states, const int64_t* slots, const int64_t* spans,
                          const typename Element<DTYPE>::stored* values, int64_t slot_bytes,
                          int64_t offset, int channels, int taps) {
  const int64_t slot = slots[blockIdx.x];
  const int channel = (int)(blockIdx.y * blockDim.x + threadIdx.x);
  if (slot < 0 || channel >= channels) return;
  float* const state = (float*)(states + slot * slot_bytes + offset) + (int64_t)channel * taps;
  const int64_t first = spans[2 * (int64_t)blockIdx.x], num = spans[2 * (int64_t)blockIdx.x + 1];
  if (num == 0) return;
  // In ascending order a tap is read before it is overwritten.
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t at = tap + num;
    if (at < taps) {
      state[tap] = state[at];
    } else {
      state[tap] = Element<DTYPE>::load(values[(first + at - taps) * channels + channel]);
    }
  }
}
