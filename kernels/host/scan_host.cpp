// Recurrent layers on the CPU: the gated delta rule and the short convolution, from slot to slot.
//
// A piece of work is a span's strip of a state: so many columns of a head, or so many channels.
// Strips share nothing, so threads change no bit; and a row is one walk over its strip, whatever
// comes before or after it, so neither does the company of rows in a call.
#include <cmath>

#include "pool.h"
#include "recurrent.h"
#include "short_conv.h"

extern "C" {

// The field order of _Scan in memkv_pp/cache/host_recurrent.py. States are [slot][head][key][value].
struct memkv_scan_arguments {
  float* states;
  const memkv::Span* spans;
  const float *gate, *beta;  // [row][head]
  void* out;                 // [row][head][value] of the values' type
  int64_t num_spans, num_rows, num_slots, slot_stride;
  memkv::Rows query, key, value;  // no queries: nothing is written to `out`
  int32_t heads, key_heads, key_size, value_size, threads, padding;
};

}  // extern "C"

namespace memkv {

constexpr int MAX_KEY_SIZE = 512;
constexpr int VECTORS = 4, STRIP = VECTORS * LANES;  // columns of a state
// Rows whose elements are asked for ahead: those of a head lie pages apart.
constexpr int AHEAD = 2;
// Sums that hide each other's latency, as far as registers go.
#if defined(MEMKV_AVX512)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif

struct Sums {
  f32x16 part[PARTS][VECTORS];

  Sums() {
    for (auto& vectors : part) {
      for (f32x16& vector : vectors) vector = all(0.0f);
    }
  }
  f32x16 total(int vector) const {
    f32x16 sum = part[0][vector];
    for (int p = 1; p < PARTS; ++p) sum = add(sum, part[p][vector]);
    return sum;
  }
};

// Step(i, part) for each i in [0, count), part being i modulo PARTS.
template <class Step>
MEMKV_INLINE void in_parts(int count, const Step& step) {
  int i = 0;
  for (; i + PARTS <= count; i += PARTS) {
    for (int p = 0; p < PARTS; ++p) step(i + p, p);
  }
  for (int p = 0; i < count; ++i, ++p) step(i, p);
}

// One row over STRIP columns. `from` and `to` may be the same rows of a state.
template <bool QUERIES>
void scan_row(const float* from, int64_t from_stride, float* to, int64_t to_stride, int key_size,
              const float* key, const float* query, const float* value, float decay, float beta,
              float* out) {
  Sums held;
  in_parts(key_size, [&](int i, int p) {
    for (int v = 0; v < VECTORS; ++v) {
      const f32x16 state = load(from + i * from_stride + v * LANES);
      held.part[p][v] = fma(all(key[i]), state, held.part[p][v]);
    }
  });
  f32x16 delta[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    const f32x16 read = mul(all(decay), held.total(v));
    delta[v] = mul(all(beta), sub(load(value + v * LANES), read));
  }
  Sums seen;
  in_parts(key_size, [&](int i, int p) {
    for (int v = 0; v < VECTORS; ++v) {
      const f32x16 kept = mul(all(decay), load(from + i * from_stride + v * LANES));
      const f32x16 state = fma(all(key[i]), delta[v], kept);
      store(to + i * to_stride + v * LANES, state);
      if (QUERIES) seen.part[p][v] = fma(all(query[i]), state, seen.part[p][v]);
    }
  });
  if (QUERIES) {
    for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, seen.total(v));
  }
}

// Columns [column, column + STRIP) of a head's state, or as many as there are.
template <bool QUERIES>
void scan_strip(const memkv_scan_arguments& a, const Span& span, int head, int column) {
  const int64_t stride = a.value_size;
  const int width = a.value_size - column < STRIP ? a.value_size - column : STRIP;
  const int64_t inside = (int64_t)head * a.key_size * a.value_size + column;
  const float* const source = span.read < 0 ? nullptr : a.states + span.read * a.slot_stride + inside;
  float* const target = span.written < 0 ? nullptr : a.states + span.written * a.slot_stride + inside;
  // A strip rests here between rows. The first row reads the slot and the last one writes it, where
  // that takes whole vectors.
  alignas(64) float rest[MAX_KEY_SIZE * STRIP];
  const bool from_slot = source && width == STRIP && span.count > 0;
  const bool to_slot = target && width == STRIP && span.count > 0;
  if (!from_slot) {
    memset(rest, 0, sizeof(float) * (size_t)a.key_size * STRIP);
    for (int i = 0; source && i < a.key_size; ++i) {
      memcpy(rest + i * STRIP, source + i * stride, sizeof(float) * (size_t)width);
    }
  }
  alignas(64) float key_room[MAX_KEY_SIZE], query_room[MAX_KEY_SIZE];
  alignas(64) float value[STRIP] = {}, out[STRIP];
  const int key_head = head / (a.heads / a.key_heads);
  for (int64_t t = 0; t < span.count; ++t) {
    const int64_t row = span.first + t, at = row * a.heads + head;
    const bool slot_first = from_slot && t == 0, slot_last = to_slot && t == span.count - 1;
    if (t + AHEAD < span.count) {
      fetch(a.key, row + AHEAD, key_head, 0, a.key_size);
      if (QUERIES) fetch(a.query, row + AHEAD, key_head, 0, a.key_size);
      fetch(a.value, row + AHEAD, head, column, width);
    }
    const float* const key = floats_of(a.key, row, key_head, a.key_size, key_room);
    const float* query = nullptr;
    if (QUERIES) query = floats_of(a.query, row, key_head, a.key_size, query_room);
    to_floats(a.value.at, a.value.type,
              row * a.value.row_stride + head * a.value.head_stride + column, width, value);
    scan_row<QUERIES>(slot_first ? source : rest, slot_first ? stride : STRIP,
                      slot_last ? target : rest, slot_last ? stride : STRIP, a.key_size, key, query,
                      value, expf(a.gate[at]), a.beta[at], out);
    if (QUERIES) from_floats(out, width, a.out, a.value.type, at * a.value_size + column);
  }
  if (!target || to_slot) return;
  for (int i = 0; i < a.key_size; ++i) {
    memcpy(target + i * stride, rest + i * STRIP, sizeof(float) * (size_t)width);
  }
}

}  // namespace memkv

// Both return 0, or 1 for spans of rows or slots that are not there, with nothing written. Spans
// meet in no row and in no slot that one of them writes.
extern "C" int memkv_scan_delta(const memkv_scan_arguments* arguments) {
  using namespace memkv;
  const memkv_scan_arguments& a = *arguments;
  if (!spans_fit(a) || a.key_size > MAX_KEY_SIZE) return 1;
  const int64_t strips = (a.value_size + STRIP - 1) / STRIP, per_span = strips * a.heads;
  Pool::instance().run(a.threads, a.num_spans * per_span, [&](int64_t piece) {
    const Span& span = a.spans[piece / per_span];
    const int head = (int)(piece % per_span / strips), column = (int)(piece % strips) * STRIP;
    if (a.query.at) {
      scan_strip<true>(a, span, head, column);
    } else {
      scan_strip<false>(a, span, head, column);
    }
  });
  return 0;
}

extern "C" int memkv_short_conv(const memkv_conv_arguments* arguments) {
  using namespace memkv;
  const memkv_conv_arguments& a = *arguments;
  if (!spans_fit(a) || a.taps > MAX_TAPS) return 1;
  const int64_t strips = (a.channels + CHANNELS - 1) / CHANNELS;
  Pool::instance().run(a.threads, a.num_spans * strips, [&](int64_t piece) {
    conv_strip(a, a.spans[piece / strips], (int)(piece % strips) * CHANNELS);
  });
  return 0;
}
