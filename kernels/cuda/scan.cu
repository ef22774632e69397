// Recurrent layers: the gated delta rule and the short convolution, from state slot to state slot.
//
// spans [number, 4] say a span's first row, its number of rows, the slot whose state it reads (zeros
// if negative) and the slot it writes (none if negative). A span may write the slot that it reads.
// Spans meet in no row and in no slot that one of them writes. Slots are `slot_stride` f32 apart.
#include "cuda/device.h"

struct Span {
  int64_t first, count, read, written;

  MEMKV_HD Span(const int64_t* spans, int64_t index)
      : first(spans[4 * index]), count(spans[4 * index + 1]), read(spans[4 * index + 2]),
        written(spans[4 * index + 3]) {}
};

// The sum over the four lanes of a column, in every one of them.
__device__ inline float sum_of_parts(float value) {
  value = add(value, __shfl_xor_sync(0xFFFFFFFFu, value, 8));
  value = add(value, __shfl_xor_sync(0xFFFFFFFFu, value, 16));
  return value;
}

// states [slot][head][key][value], gate and beta [row][head], out [row][head][value]; rows and heads
// of the others lie so many elements apart, and `key_heads` serve `heads` in order, as many each.
//
// Block (span, head, 32 columns) of 128 threads: a warp takes 8 columns, and each of them four lanes
// that hold every fourth row of the state in registers. HELD of them are at least key_size / 4.
// Shared: the key and the query of this row, and of the next, 4 * HELD floats each.
template <int DTYPE, int HELD>
__global__ void scan_delta(float* states, const int64_t* spans,
                           const typename Element<DTYPE>::stored* query,
                           const typename Element<DTYPE>::stored* key,
                           const typename Element<DTYPE>::stored* value, const float* gate,
                           const float* beta, typename Element<DTYPE>::stored* out,
                           int64_t slot_stride, int64_t query_row, int64_t query_head,
                           int64_t key_row, int64_t key_head, int64_t value_row,
                           int64_t value_head, int heads, int key_heads, int key_size,
                           int value_size, int has_query) {
  constexpr int size = 4 * HELD;
  MEMKV_SHARED(float, shared);
  const Span span(spans, blockIdx.x);
  const int head = (int)blockIdx.y, group = head / (heads / key_heads);
  const int lane = (int)(threadIdx.x % 32), part = lane / 8;
  const int column = (int)(blockIdx.z * 32 + threadIdx.x / 32 * 8) + lane % 8;
  const bool has_column = column < value_size;
  const int64_t at = (int64_t)head * key_size * value_size + column;
  float state[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int row = 4 * i + part;
    state[i] = 0.0f;
    if (span.read < 0 || !has_column || row >= key_size) continue;
    state[i] = states[span.read * slot_stride + at + (int64_t)row * value_size];
  }
  for (int64_t t = 0; t < span.count; ++t) {
    const int64_t row = span.first + t;
    // The other buffer may still be read; this one was left behind before the last barrier.
    float* const keys = shared + t % 2 * 2 * size;
    float* const queries = keys + size;
    for (int i = (int)threadIdx.x; i < size; i += (int)blockDim.x) {
      keys[i] = queries[i] = 0.0f;
      if (i >= key_size) continue;
      keys[i] = Element<DTYPE>::load(key[row * key_row + group * key_head + i]);
      if (has_query) queries[i] = Element<DTYPE>::load(query[row * query_row + group * query_head + i]);
    }
    __syncthreads();
    const float decay = expf(gate[row * heads + head]);
    float held = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) held = fmaf(keys[4 * i + part], state[i], held);
    held = multiply(decay, sum_of_parts(held));
    float given = 0.0f;
    if (has_column) given = Element<DTYPE>::load(value[row * value_row + head * value_head + column]);
    const float delta = multiply(beta[row * heads + head], add(given, -held));
    float seen = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      state[i] = fmaf(keys[4 * i + part], delta, multiply(decay, state[i]));
      seen = fmaf(queries[4 * i + part], state[i], seen);
    }
    seen = sum_of_parts(seen);
    if (has_query && has_column && part == 0) {
      out[(row * heads + head) * value_size + column] = Element<DTYPE>::store(seen);
    }
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int row = 4 * i + part;
    if (span.written < 0 || !has_column || row >= key_size) continue;
    states[span.written * slot_stride + at + (int64_t)row * value_size] = state[i];
  }
}

// states [slot][channel][tap], weight [channel][taps + 1], bias [channel], out [row][channel].
//
// Block (span, channels, rows), a thread for each channel and `tile_rows`, at least `taps`, of its
// rows. Only the first rows look into the state, and their block rolls it when it is done with them.
template <int DTYPE>
__global__ void short_conv(float* states, const int64_t* spans,
                           const typename Element<DTYPE>::stored* value, const float* weight,
                           const float* bias, typename Element<DTYPE>::stored* out,
                           int64_t slot_stride, int64_t value_row, int channels, int taps,
                           int tile_rows, int has_weight, int has_bias, int silu) {
  const Span span(spans, blockIdx.x);
  const int channel = (int)(blockIdx.y * blockDim.x + threadIdx.x);
  if (channel >= channels) return;
  const float* const state = states + span.read * slot_stride + (int64_t)channel * taps;
  const auto* const rows = value + span.first * value_row + channel;
  // Of the state's rows and the new ones, in this order.
  const auto seen = [&](int64_t place) {
    if (place >= taps) return Element<DTYPE>::load(rows[(place - taps) * value_row]);
    return span.read < 0 ? 0.0f : state[place];
  };
  const int64_t begin = (int64_t)blockIdx.z * tile_rows;
  const int64_t end = begin + tile_rows < span.count ? begin + tile_rows : span.count;
  for (int64_t t = begin; has_weight && t < end; ++t) {
    float sum = has_bias ? bias[channel] : 0.0f;
    for (int tap = 0; tap <= taps; ++tap) {
      sum = add(sum, multiply(weight[(int64_t)channel * (taps + 1) + tap], seen(t + tap)));
    }
    if (silu) sum = sum / (1.0f + expf(-sum));
    out[(span.first + t) * channels + channel] = Element<DTYPE>::store(sum);
  }
  if (begin > 0 || span.written < 0) return;
  float* const target = states + span.written * slot_stride + (int64_t)channel * taps;
  // In ascending order a tap is read before it is overwritten.
  for (int tap = 0; tap < taps; ++tap) target[tap] = seen(span.count + tap);
}
