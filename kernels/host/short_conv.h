// The causal short convolution of rows of channels, behind the rows that its state keeps.
#pragma once

#include "f32x16.h"
#include "recurrent.h"

extern "C" {

// The field order of _Conv. States are [slot][channel][tap].
struct memkv_conv_arguments {
  float* states;
  const memkv::Span* spans;
  const float *weight, *bias;  // [channel][tap], [channel] or null
  void* out;                   // [row][channel] of the values' type; null: states are rolled only
  int64_t num_spans, num_rows, num_slots, slot_stride;
  memkv::Rows value;
  int32_t channels, taps, silu, threads;
};

}  // extern "C"

namespace memkv {

constexpr int MAX_TAPS = 8, CHANNELS = 256, CONV_ROWS = 8;

MEMKV_INLINE f32x16 silu(f32x16 x) {
  const f32x16 zero = all(0.0f);
  const f32x16 e = exponential(where_less(x, zero, x, sub(zero, x)));
  // x / (1 + e^-x), of which only the exponential of a negative number is taken.
  return div(where_less(x, zero, mul(x, e), x), add(all(1.0f), e));
}

// Channels [channel, channel + CHANNELS), or as many as there are.
void conv_strip(const memkv_conv_arguments& a, const Span& span, int channel) {
  const int width = a.channels - channel < CHANNELS ? a.channels - channel : CHANNELS;
  const int taps = a.taps;
  // The state's rows, then the new ones: [row][channel].
  alignas(64) float seen[MAX_TAPS + CONV_ROWS][CHANNELS];
  alignas(64) float weight[MAX_TAPS + 1][CHANNELS], bias[CHANNELS] = {}, out[CHANNELS];
  if (width < CHANNELS || span.read < 0) memset(seen, 0, sizeof seen);
  if (width < CHANNELS) memset(weight, 0, sizeof weight);
  if (span.read >= 0) {
    const float* const state = a.states + span.read * a.slot_stride + (int64_t)channel * taps;
    for (int c = 0; c < width; ++c) {
      for (int tap = 0; tap < taps; ++tap) seen[tap][c] = state[c * taps + tap];
    }
  }
  if (a.out) {
    for (int c = 0; c < width; ++c) {
      for (int tap = 0; tap <= taps; ++tap) {
        weight[tap][c] = a.weight[(int64_t)(channel + c) * (taps + 1) + tap];
      }
      if (a.bias) bias[c] = a.bias[channel + c];
    }
  }
  // Of a longer span that is only rolled, the last rows are the state.
  int64_t t = !a.out && span.count > taps ? span.count - taps : 0;
  while (t < span.count) {
    const int count = span.count - t < CONV_ROWS ? (int)(span.count - t) : CONV_ROWS;
    for (int r = 0; r < count; ++r) {
      const int64_t row = span.first + t + r;
      to_floats(a.value.at, a.value.type, row * a.value.row_stride + channel, width, seen[taps + r]);
      if (!a.out) continue;
      for (int v = 0; v < CHANNELS; v += LANES) {
        f32x16 sum = load(bias + v);
        for (int tap = 0; tap <= taps; ++tap) {
          sum = add(sum, mul(load(weight[tap] + v), load(seen[r + tap] + v)));
        }
        store(out + v, a.silu ? silu(sum) : sum);
      }
      from_floats(out, width, a.out, a.value.type, row * a.channels + channel);
    }
    memmove(seen[0], seen[count], sizeof(seen[0]) * (size_t)taps);
    t += count;
  }
  if (span.written < 0) return;
  float* const state = a.states + span.written * a.slot_stride + (int64_t)channel * taps;
  for (int c = 0; c < width; ++c) {
    for (int tap = 0; tap < taps; ++tap) state[c * taps + tap] = seen[tap][c];
  }
}

}  // namespace memkv
