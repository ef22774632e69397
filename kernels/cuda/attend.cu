// Decode attention over packed records: the rows are unpacked tile by tile, never as a whole.
//
// A block takes one sequence, one KV head, one split of the keys, and up to QUERIES query vectors
// (the query heads of that KV head, for one or a few rows that are causal among themselves):
//
//   split s of a sequence of L keys: [s * split_rows, (s + 1) * split_rows) and [0, L)
//   row t of the R new rows sees keys [0, L - R + t], of which a window keeps the last ones
//
// Splits and tiles begin at fixed keys, and what a row does not see multiplies its sums by 1 and
// adds nothing, so a row's bits depend on its query, its position and its keys alone. Each split
// leaves its normalised sum and its log-sum-exp; `merge` joins them. All sums are f32.
#include "cuda/warp.h"

constexpr int ATTEND_THREADS = 128, ATTEND_WARPS = ATTEND_THREADS / 32;
constexpr int ATTEND_TILE = 32;       // keys of a tile: one for each lane
constexpr int ATTEND_MAX_VALUE = 512;  // largest head size of V

__device__ inline float warp_sum(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
  }
  return value;
}

// One side of the cache of one layer; `exponents` is null for a format without them.
struct Side {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* exponents;
  int64_t record_bytes;
  int record_rows, head_size;
  float factor;
};

// Unpack keys [first, first + count) of one head into tile [ATTEND_TILE][pitch]. Neighbouring
// threads take neighbouring rows, which lie in different banks as `pitch` is odd.
template <int FORMAT>
__device__ void unpack_tile(const Side& side, const int64_t* records, int head, int64_t first,
                            int count, float* tile, int pitch) {
  using packed_group = Packed<FORMAT>;
  const int row_groups = side.head_size / packed_group::group;
  const Rows code_rows{side.record_bytes, side.record_rows, row_groups * packed_group::code_bytes};
  const Rows scale_rows{side.record_bytes, side.record_rows, row_groups * packed_group::scale_bytes};
  for (int i = (int)threadIdx.x; i < ATTEND_TILE * row_groups; i += ATTEND_THREADS) {
    const int key = i % ATTEND_TILE, index = i / ATTEND_TILE;
    if (key >= count) continue;
    const int64_t record = records[(first + key) / side.record_rows];
    const int row = (int)((first + key) % side.record_rows);
    const float factor =
        side.exponents ? power(side.exponents[record * side.record_bytes + head]) : side.factor;
    packed_group packed;
    packed.load(side.codes + code_rows.at(record, head, row),
                side.scales + scale_rows.at(record, head, row), index);
    Block<FORMAT>::decode(packed.codes, packed.scales,
                          tile + key * pitch + index * packed_group::group, factor);
  }
}

// query [rows, heads * group, key_size]; segments [sequences, 4] say first row, number of rows,
// cached rows (the new ones among them), and index of the first of the sequence's entries in
// `records`. Of all rows a launch takes [first_taken, first_taken + num_taken): out [splits,
// num_taken, heads * group, value_size] and lse [splits, num_taken, heads * group], which starts as
// minus infinity: a split without keys leaves both alone. A score is cap * tanh(score / cap) unless
// `cap` is 0; `window` keys are seen at most, the row's own among them, unless it is 0.
// Grid (sequences, heads * chunks of QUERIES query vectors, splits), ATTEND_THREADS threads.
// Shared memory, f32: QUERIES * (key_size + ATTEND_TILE + 2) + ATTEND_TILE * pitch, where pitch is
// the larger head size made odd.
template <int KEY, int VALUE, int DTYPE, int QUERIES>
__global__ void __launch_bounds__(ATTEND_THREADS)
attend(const typename Element<DTYPE>::stored* query, const uint8_t* key_codes,
       const uint8_t* key_scales, const uint8_t* key_exponents, const uint8_t* value_codes,
       const uint8_t* value_scales, const uint8_t* value_exponents, const int64_t* records, const int64_t* segments, float* out, float* lse,
       int64_t record_bytes, int64_t first_taken, int64_t num_taken, int64_t window, int heads,
       int group, int record_rows, int key_size, int value_size, int split_rows, float scale,
       float cap, float key_factor, float value_factor) {
  constexpr int turns = (QUERIES + ATTEND_WARPS - 1) / ATTEND_WARPS;  // query vectors of a warp
  constexpr int columns = ATTEND_MAX_VALUE / ATTEND_THREADS;          // of V, for each thread
  const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t* const segment = segments + 4 * (int64_t)blockIdx.x;
  const int64_t first_row = segment[0], rows = segment[1], length = segment[2];
  const int64_t* const table = records + segment[3];
  const int head = (int)blockIdx.y % heads, chunk = (int)blockIdx.y / heads;

  // Query vector v of the sequence is row v / group, query head v % group of this KV head.
  const int64_t skipped = first_taken > first_row ? first_taken - first_row : 0;
  const int64_t end_taken = first_taken + num_taken - first_row;
  const int64_t first_vector = skipped * group + (int64_t)chunk * QUERIES;
  const int64_t vectors = (end_taken < rows ? end_taken : rows) * group;
  if (first_vector >= vectors) return;
  const int held = (int)(vectors - first_vector < QUERIES ? vectors - first_vector : QUERIES);
  const int64_t begin = (int64_t)blockIdx.z * split_rows;
  // Query vector first_vector + v sees keys [hidden(v), visible(v)) of this split.
  const auto past = [=](int v) {
    return length - rows + (first_vector + v) / group + 1 - begin;
  };
  const auto visible = [=](int v) { return (int)(past(v) < split_rows ? past(v) : split_rows); };
  const auto hidden = [=](int v) {
    const int64_t keys = window > 0 ? past(v) - window : 0;
    return (int)(keys < 0 ? 0 : keys < split_rows ? keys : split_rows);
  };
  const int num_keys = visible(held - 1);
  if (num_keys <= 0 || hidden(0) == split_rows) return;

  const int pitch = (key_size > value_size ? key_size : value_size) | 1;
  MEMKV_SHARED(float, query_VD);                       // [QUERIES][key_size], times scale
  float* const tile = query_VD + QUERIES * key_size;   // [ATTEND_TILE][pitch], K and then V
  float* const weights = tile + ATTEND_TILE * pitch;   // [QUERIES][ATTEND_TILE]
  float* const shrinks = weights + QUERIES * ATTEND_TILE;  // [QUERIES]
  float* const inverses = shrinks + QUERIES;               // [QUERIES]

  const int64_t out_heads = (int64_t)heads * group;
  // The place of query vector first_vector + v among the (row, query head) pairs of the step.
  const auto place = [=](int v) {
    const int64_t vector = first_vector + v;
    return (first_row + vector / group) * out_heads + head * group + vector % group;
  };
  for (int i = thread; i < held * key_size; i += ATTEND_THREADS) {
    const int64_t at = place(i / key_size) * key_size + i % key_size;
    query_VD[i] = Element<DTYPE>::load(query[at]) * scale;
  }
  const Side key_side{key_codes,    key_scales,  key_exponents, record_bytes,
                      record_rows, key_size,    key_factor};
  const Side value_side{value_codes,  value_scales, value_exponents, record_bytes,
                        record_rows, value_size,   value_factor};

  int unseen[QUERIES], seen[QUERIES];
#pragma unroll
  for (int v = 0; v < QUERIES; ++v) {
    unseen[v] = hidden(v);
    seen[v] = v < held ? visible(v) : 0;
  }
  float top[turns], total[turns], sums[columns][QUERIES];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    top[turn] = minus_infinity();
    total[turn] = 0.0f;
  }
#pragma unroll
  for (int column = 0; column < columns; ++column) {
#pragma unroll
    for (int v = 0; v < QUERIES; ++v) sums[column][v] = 0.0f;
  }

  for (int first = hidden(0) / ATTEND_TILE * ATTEND_TILE; first < num_keys; first += ATTEND_TILE) {
    const int count = num_keys - first < ATTEND_TILE ? num_keys - first : ATTEND_TILE;
    unpack_tile<KEY>(key_side, table, head, begin + first, count, tile, pitch);
    __syncthreads();
    // A lane scores one key; the warp keeps the running maximum and sum of its query vectors.
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int v = turn * ATTEND_WARPS + warp;
      if (v >= held) continue;
      float score = minus_infinity();
      if (first + lane < visible(v) && first + lane >= hidden(v)) {
        score = 0.0f;
        for (int d = 0; d < key_size; ++d) {
          score = multiply_add(query_VD[v * key_size + d], tile[lane * pitch + d], score);
        }
        if (cap > 0.0f) score = multiply(cap, tanhf(divide(score, cap)));
      }
      const float new_top = larger(top[turn], warp_largest(score));
      const bool none = new_top == minus_infinity();
      const float weight = none ? 0.0f : expf(score - new_top);
      const float shrink = none ? 1.0f : expf(top[turn] - new_top);
      total[turn] = multiply_add(total[turn], shrink, warp_sum(weight));
      top[turn] = new_top;
      weights[v * ATTEND_TILE + lane] = weight;
      if (lane == 0) shrinks[v] = shrink;
    }
    __syncthreads();
    unpack_tile<VALUE>(value_side, table, head, begin + first, count, tile, pitch);
    __syncthreads();
#pragma unroll
    for (int column = 0; column < columns; ++column) {
      const int d = column * ATTEND_THREADS + thread;
      if (d >= value_size) break;
#pragma unroll
      for (int v = 0; v < QUERIES; ++v) {
        if (v < held) sums[column][v] *= shrinks[v];
      }
      for (int key = 0; key < count; ++key) {
        const float value = tile[key * pitch + d];
#pragma unroll
        for (int v = 0; v < QUERIES; ++v) {
          // A hidden row may hold anything: not even a weight of zero may touch it.
          if (first + key < seen[v] && first + key >= unseen[v]) {
            sums[column][v] = multiply_add(weights[v * ATTEND_TILE + key], value, sums[column][v]);
          }
        }
      }
    }
    __syncthreads();
  }

  const int64_t split = ((int64_t)blockIdx.z * num_taken - first_taken) * out_heads;
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int v = turn * ATTEND_WARPS + warp;
    if (v >= held || lane != 0) continue;
    const bool none = top[turn] == minus_infinity();
    inverses[v] = none ? 0.0f : divide(1.0f, total[turn]);
    lse[split + place(v)] = none ? top[turn] : top[turn] + logf(total[turn]);
  }
  __syncthreads();
#pragma unroll
  for (int column = 0; column < columns; ++column) {
    const int d = column * ATTEND_THREADS + thread;
    if (d >= value_size) break;
#pragma unroll
    for (int v = 0; v < QUERIES; ++v) {
      if (v >= held) continue;
      out[(split + place(v)) * value_size + d] = sums[column][v] * inverses[v];
    }
  }
}

// Join the splits of each query vector: partial [splits, vectors, value_size], lse [splits,
// vectors], in ascending order. `sinks`, null or [query_heads], are further scores without a value:
// they share the denominator and are no part of the log-sum-exp. A vector that saw no key becomes 0
// with a log-sum-exp of minus infinity. A block takes one vector.
template <int DTYPE>
__global__ void merge(const float* partial, const float* lse, const float* sinks,
                      typename Element<DTYPE>::stored* out, float* out_lse, int64_t num_vectors,
                      int query_heads, int value_size, int num_splits) {
  const int64_t vector = blockIdx.x;
  float top = minus_infinity();
  for (int64_t split = 0; split < num_splits; ++split) {
    top = larger(top, lse[split * num_vectors + vector]);
  }
  const bool none = top == minus_infinity();
  float total = 0.0f;
  for (int64_t split = 0; split < num_splits && !none; ++split) {
    total += expf(lse[split * num_vectors + vector] - top);
  }
  const float joined = none ? top : top + logf(total);
  if (sinks && !none) total *= 1.0f + expf(sinks[vector % query_heads] - joined);
  for (int d = (int)threadIdx.x; d < value_size; d += (int)blockDim.x) {
    float sum = 0.0f;
    for (int64_t split = 0; split < num_splits && !none; ++split) {
      const int64_t at = split * num_vectors + vector;
      // A split that saw no key has left its part of `partial` unwritten.
      if (lse[at] != minus_infinity()) {
        sum = multiply_add(expf(lse[at] - top), partial[at * value_size + d], sum);
      }
    }
    out[vector * value_size + d] = Element<DTYPE>::store(none ? 0.0f : divide(sum, total));
  }
  if (threadIdx.x == 0) out_lse[vector] = joined;
}
