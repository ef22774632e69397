// The arithmetic of attention rows over one block of keys.
//
//   score_rows       queries times some keys
//   softmax_row      a row's scores of a block into weights
//   accumulate_rows  weights times the values of some keys
//   merge_row        sums of disjoint keys into one
//
// A row's operations and their order are the same whatever rows share the call.
#pragma once

#include <limits>

#include "unpack_tile.h"

namespace memkv {
namespace {

constexpr int BLOCK_KEYS = 64;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Keys [begin, end) that a row sees.
struct View {
  int64_t begin, end;
};

// Sums of some rows over some keys: the largest score, the weights' sum, the weighted values.
struct Sums {
  float* top;
  float* total;
  float* out;
};

// Scalars of rows fill whole vectors, so that the values after them are aligned.
int padded(int num_rows) { return (num_rows + LANES - 1) / LANES * LANES; }

size_t sums_floats(int num_rows, int size) { return 2 * padded(num_rows) + (size_t)num_rows * size; }

Sums sums_at(float* memory, int num_rows) {
  return {memory, memory + padded(num_rows), memory + 2 * padded(num_rows)};
}

MEMKV_INLINE float exponential_of(float x) {
  float lanes[LANES];
  store(lanes, exponential(all(x)));
  return lanes[0];
}

// Quarter sums of the products of ROWS queries with KEYS keys of a tile: quarters[row][key / 4].
template <int SIZE, int ROWS, int KEYS>
MEMKV_INLINE void products(const float* query, const float* tile, int head_size, f32x16 (*quarters)[4]) {
  const int size = SIZE ? SIZE : head_size;
  f32x16 sums[ROWS][KEYS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
    for (int key = 0; key < KEYS; ++key) sums[row][key] = all(0.0f);
  }
  // Unrolled, the compiler keeps every query vector for the next keys, in memory.
#pragma GCC unroll 1
  for (int at = 0; at < size; at += LANES) {
    f32x16 q[ROWS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) q[row] = load(query + row * size + at);
#pragma GCC unroll 16
    for (int key = 0; key < KEYS; ++key) {
      const f32x16 k = load(tile + key * size + at);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) sums[row][key] = fma(k, q[row], sums[row][key]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
    for (int key = 0; key < KEYS; key += 4) {
      quarters[row][key / 4] = quarter_sums(sums[row][key], sums[row][key + 1], sums[row][key + 2], sums[row][key + 3]);
    }
  }
}

// Scores of ROWS queries with the 16 keys of a tile, one lane each.
template <int SIZE, int ROWS>
MEMKV_INLINE void score(const float* query, const float* tile, int head_size, float scale, float* scores) {
  const int size = SIZE ? SIZE : head_size;
  constexpr int keys = SUMS_AT_ONCE / ROWS / 4 * 4 > 0 ? SUMS_AT_ONCE / ROWS / 4 * 4 : 4;
  constexpr int step = keys == 12 ? 8 : keys;  // a divisor of TILE_KEYS
  f32x16 quarters[TILE_KEYS / step][ROWS][4];
#pragma GCC unroll 4
  for (int i = 0; i < TILE_KEYS / step; ++i) {
    products<SIZE, ROWS, step>(query, tile + i * step * size, size, quarters[i]);
  }
  const auto quarter = [&](int row, int i) { return quarters[4 * i / step][row][4 * i % step / 4]; };
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
    const f32x16 x = join_quarters(quarter(row, 0), quarter(row, 1), quarter(row, 2), quarter(row, 3));
    store(scores + row * BLOCK_KEYS, mul(x, all(scale)));
  }
}

bool sees(View view, int64_t begin, int keys) { return view.begin < begin + keys && view.end > begin; }

// Scores of rows with keys [begin, begin + num_keys), whole tiles, into scores[row * BLOCK_KEYS].
// Where no row of a few sees a key of a tile there is nothing written; a row that sees none may be
// given anything.
template <int SIZE>
void score_rows(const float* query, const float* keys, int head_size, int num_rows, const View* views, int64_t begin,
                int num_keys, float scale, float* scores) {
  const int size = SIZE ? SIZE : head_size;
  for (int row = 0; row < num_rows;) {
    const int left = num_rows - row, rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
    const float* queries = query + (int64_t)row * size;
    for (int key = 0; key < num_keys; key += TILE_KEYS) {
      bool any = false;
      for (int i = row; i < row + rows; ++i) any |= sees(views[i], begin + key, TILE_KEYS);
      if (!any) continue;
      const float* tile = keys + key * size;
      float* into = scores + row * BLOCK_KEYS + key;
      switch (rows) {
        case 4: score<SIZE, 4>(queries, tile, size, scale, into); break;
        case 3: score<SIZE, 3>(queries, tile, size, scale, into); break;
        case 2: score<SIZE, 2>(queries, tile, size, scale, into); break;
        default: score<SIZE, 1>(queries, tile, size, scale, into);
      }
    }
    row += rows;
  }
}

using ScoreRows = decltype(&score_rows<0>);

ScoreRows score_rows_for(int head_size) {
  switch (head_size) {
    case 64: return score_rows<64>;
    case 80: return score_rows<80>;
    case 96: return score_rows<96>;
    case 128: return score_rows<128>;
    case 256: return score_rows<256>;
    case 512: return score_rows<512>;
    default: return score_rows<0>;
  }
}

int clamp_to(int64_t key, int64_t begin, int width) {
  const int64_t place = key - begin;
  return place < 0 ? 0 : place > width ? width : (int)place;
}

// Turns a row's scores of one block into weights, and scales its sums to the new top.
void softmax_row(float* scores, View view, int64_t block_begin, float cap, int head_size, float* top, float* totals,
                 float* out) {
  const f32x16 never = all(NEVER);
  const int begin = clamp_to(view.begin, block_begin, BLOCK_KEYS);
  const int end = clamp_to(view.end, block_begin, BLOCK_KEYS);
  f32x16 x[BLOCK_KEYS / LANES];
  for (int i = 0; i < BLOCK_KEYS / LANES; ++i) {
    const int low = clamp_to(begin, i * LANES, LANES), high = clamp_to(end, i * LANES, LANES);
    if (low >= high) {
      x[i] = never;
      continue;
    }
    x[i] = load(scores + i * LANES);
    if (cap > 0.0f) x[i] = capped(x[i], cap);
    if (high - low < LANES) x[i] = where_lane(low, high, x[i], never);
  }
  const float block_top = highest(maximum(maximum(x[0], x[1]), maximum(x[2], x[3])));
  const float before = *top, after = before > block_top ? before : block_top;
  f32x16 total = load(totals);
  if (!(after == before)) {
    const f32x16 shrink = all(exponential_of(before - after));
    total = mul(total, shrink);
    for (int at = 0; at < head_size; at += LANES) store(out + at, mul(load(out + at), shrink));
    *top = after;
  }
  // Where every score is minus infinity every weight is 0.
  const f32x16 base = all(after == NEVER ? 0.0f : after);
  for (int i = 0; i < BLOCK_KEYS / LANES; ++i) {
    const f32x16 weight = exponential(sub(x[i], base));
    store(scores + i * LANES, weight);
    total = add(total, weight);
  }
  store(totals, total);
}

// For ROWS rows: out[0, 16 * VECTORS) += the weighted sum of the values of keys [begin, end).
template <int ROWS, int VECTORS>
MEMKV_INLINE void accumulate(const float* weights, const float* tile, int size, int begin, int end, float* out) {
  f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) sums[row][i] = load(out + row * size + i * LANES);
  }
  for (int key = begin; key < end; ++key) {
    f32x16 weight[ROWS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) weight[row] = all(weights[row * BLOCK_KEYS + key]);
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) {
      const f32x16 value = load(tile + key * size + i * LANES);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) sums[row][i] = fma(weight[row], value, sums[row][i]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) store(out + row * size + i * LANES, sums[row][i]);
  }
}

template <int ROWS>
void accumulate_few(const float* weights, const float* tile, int size, int begin, int end, float* out) {
  constexpr int vectors = SUMS_AT_ONCE / ROWS >= 8 ? 8 : SUMS_AT_ONCE / ROWS >= 4 ? 4 : 2;
  int at = 0;
  for (; at + vectors * LANES <= size; at += vectors * LANES) {
    accumulate<ROWS, vectors>(weights, tile + at, size, begin, end, out + at);
  }
  for (; at < size; at += LANES) accumulate<ROWS, 1>(weights, tile + at, size, begin, end, out + at);
}

// Adds the weighted values of keys [first, first + num_keys) to the rows that see them.
void accumulate_rows(const float* weights, const float* values, int size, int num_rows, const View* views,
                     int64_t first, int num_keys, float* out) {
  const auto begin_of = [&](int row) { return clamp_to(views[row].begin, first, num_keys); };
  const auto end_of = [&](int row) { return clamp_to(views[row].end, first, num_keys); };
  for (int row = 0; row < num_rows;) {
    const int begin = begin_of(row), end = end_of(row);
    int rows = 1;
    while (rows < ROWS_AT_ONCE && row + rows < num_rows && begin_of(row + rows) == begin && end_of(row + rows) == end) {
      ++rows;
    }
    if (begin < end) {
      const float* from = weights + row * BLOCK_KEYS;
      float* into = out + (int64_t)row * size;
      switch (rows) {
        case 4: accumulate_few<4>(from, values, size, begin, end, into); break;
        case 3: accumulate_few<3>(from, values, size, begin, end, into); break;
        case 2: accumulate_few<2>(from, values, size, begin, end, into); break;
        default: accumulate_few<1>(from, values, size, begin, end, into);
      }
    }
    row += rows;
  }
}

// target = target and added, over disjoint keys.
void merge_row(const Sums& target, int row, float top, float total, const float* out, int size) {
  const float before = target.top[row], after = before > top ? before : top;
  if (after == NEVER) return;
  const float keep = exponential_of(before - after), take = exponential_of(top - after);
  target.top[row] = after;
  target.total[row] = target.total[row] * keep + total * take;
  float* sums = target.out + (int64_t)row * size;
  for (int at = 0; at < size; at += LANES) {
    store(sums + at, add(mul(load(sums + at), all(keep)), mul(load(out + at), all(take))));
  }
}

void clear(const Sums& sums, int num_rows, int size) {
  for (int row = 0; row < num_rows; ++row) sums.top[row] = NEVER;
  memset(sums.total, 0, sizeof(float) * num_rows);
  memset(sums.out, 0, sizeof(float) * (size_t)num_rows * size);
}

}  // namespace
}  // namespace memkv
