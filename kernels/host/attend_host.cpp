// Attention over packed rows where they lie: no row is unpacked but into a buffer in the first cache.
//
// Keys of a sequence, by position:
//
//   [ split of 1024 | split | … )     an own online softmax each, merged in order
//     [ block of 64 | block | … )     one softmax update a row
//       [ tile of 16 | tile | … )     unpacked once for all rows of a unit, by block if these are many
//
// A row's sums run over the lanes of a vector, then over tiles, blocks and splits in order, and
// depend on its query, its position and its keys only: not on the rows beside it, the split into
// units, the records' size, or the threads. So decode, verification and prefill give equal bits.
//
// Keys outside a row's view are never read for it: products and weights stop at its bounds.
#include <cmath>
#include <cstdlib>
#include <new>

#include "attend_rows.h"
#include "pool.h"
#include "unpack_groups.h"

namespace memkv {
namespace {

constexpr int64_t SPLIT_KEYS = 1024;
// Rows of a unit: more share what is unpacked, fewer leave more units to the threads.
constexpr int MAX_ROWS = 256, FEW_ROWS = 64;
constexpr int UNITS_PER_THREAD = 4;
// From so many rows on, time goes into sums and not into unpacking.
constexpr int MANY_ROWS = 16;
// Fewer cached elements than this are attended before another thread is awake.
constexpr int64_t ELEMENTS_PER_THREAD = 1 << 18;

enum QueryType : int32_t { QUERY_F32 = 0, QUERY_BF16 = 1, QUERY_F16 = 2 };

// K or V of one layer: parts of record 0, those of the next a stride on; rows as [head][row].
struct SideArguments {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* exponents;  // a byte each record and head, or null: `factor` is all rows'
  int64_t code_record_stride;
  int64_t scale_record_stride;
  int64_t exponent_record_stride;
  int32_t code_row_bytes;
  int32_t scale_row_bytes;
  int32_t format;
  int32_t head_size;
  float factor;
  int32_t padding;
};

// Rows [first, first + num_rows) of the query are the last of `length` rows of a sequence, whose
// records begin at records[at].
struct Segment {
  int64_t first, num_rows, length, at;
};

}  // namespace
}  // namespace memkv

extern "C" {

struct memkv_attend_arguments {
  const void* query;  // [T, heads * group, K head size], strides in elements
  void* out;          // [T, heads * group, V head size], contiguous
  float* log_sum_exp; // [T, heads * group] or null: of the keys' scores, without the sinks
  const float* sinks; // [heads * group] or null: a further score of each query head, without a value
  const memkv::Segment* segments;
  const int64_t* records;  // [num_listed], each below num_records where a row looks at it
  int64_t num_segments, num_rows, num_listed, num_records;  // num_rows: T
  int64_t query_row_stride, query_head_stride;
  int64_t window;     // keys a row sees, itself among them; 0: all
  memkv::SideArguments k, v;
  int32_t query_type, heads, group, record_rows, threads;
  float scale, cap;  // cap 0: none
  int32_t padding;
};

}  // extern "C"

namespace memkv {
namespace {

using Arguments = memkv_attend_arguments;
using Unpack = void (*)(const uint8_t*, const uint8_t*, const uint8_t*, int, float, float*);

// As unpack<FORMAT>, for the formats of groups of sixteen.
template <int FORMAT>
void unpack_coded_rows(const uint8_t* codes, const uint8_t* scales, const uint8_t* next, int num_elements, float factor,
                       float* tile) {
  unpack_sixteens<FORMAT>(codes, scales, next, num_elements / Block<FORMAT>::group, factor, tile);
}

constexpr Unpack UNPACK[] = {
    unpack<F32>,  unpack<F16>,  unpack<BF16>, unpack<FP8>,  unpack<Q8_0>,
    unpack<Q5_1>, unpack<Q5_0>, unpack<Q4_1>, unpack<Q4_0>, unpack_coded_rows<NVFP4>,
    unpack_coded_rows<TURBO8>, unpack_coded_rows<TURBO4>, unpack_coded_rows<TURBO3>, unpack_coded_rows<TURBO2>};
constexpr int NUM_FORMATS = sizeof UNPACK / sizeof UNPACK[0];

// Memory of a thread that grows and stays.
class Scratch {
 public:
  ~Scratch() { free(memory_); }

  float* floats(size_t count) {
    if (count > capacity_) {
      free(memory_);
      capacity_ = 0;
      const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      memory_ = static_cast<float*>(aligned_alloc(64, bytes));
      if (memory_ == nullptr) throw std::bad_alloc();
      // Lanes of keys that were never unpacked are computed with before they are masked.
      memset(memory_, 0, bytes);
      capacity_ = count;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};

// Rows [row, row + num_rows) of one segment and KV head over splits [split, split_end); row
// t * group + g is query head g of row t.
struct Unit {
  const Segment* segment;
  int head;
  int64_t row;
  int num_rows;
  int64_t split, split_end;
  float* partial;  // where the sums of a single split go, or null: write the output
};

View view_of(const Arguments& a, const Segment& s, int64_t t) {
  const int64_t end = s.length - s.num_rows + t + 1;
  return {a.window > 0 && end > a.window ? end - a.window : 0, end};
}

// Rows of a unit at most: what the second cache holds, but FEW_ROWS where `threads` would idle.
int rows_of_unit(const Arguments& a, int threads) {
  const int size = a.k.head_size > a.v.head_size ? a.k.head_size : a.v.head_size;
  const int most = size <= 128 ? MAX_ROWS : size <= 256 ? MAX_ROWS / 2 : MAX_ROWS / 4;
  int64_t units = 0;
  for (int64_t i = 0; i < a.num_segments; ++i) units += (a.segments[i].num_rows * a.group + most - 1) / most;
  return units * a.heads >= UNITS_PER_THREAD * threads ? most : FEW_ROWS < most ? FEW_ROWS : most;
}

// Where a key's row lies, how many rows follow it in its record, itself among them, and the factor
// of that record.
struct Place {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows;
  float factor;
};

Place place_of(const SideArguments& side, const int64_t* records, int record_rows, int head, int64_t key) {
  const int64_t index = key / record_rows, row = key - index * record_rows;
  const int64_t record = records[index], at = (int64_t)head * record_rows + row;
  return {side.codes + record * side.code_record_stride + at * side.code_row_bytes,
          side.scales + record * side.scale_record_stride + at * side.scale_row_bytes, record_rows - row,
          side.exponents == nullptr ? side.factor : power(side.exponents[record * side.exponent_record_stride + head])};
}

// Unpacks keys [begin, end), and asks for those `ahead` keys on while it does.
void unpack_keys(const SideArguments& side, const int64_t* records, int record_rows, int head, int64_t begin,
                 int64_t end, int64_t ahead, float* tile) {
  const Unpack unpack_run = UNPACK[side.format];
  for (int64_t key = begin; key < end;) {
    const Place here = place_of(side, records, record_rows, head, key);
    const Place next = place_of(side, records, record_rows, head, key + ahead);
    int64_t rows = here.rows < end - key ? here.rows : end - key;
    if (rows > TILE_KEYS) rows = TILE_KEYS;
    for (int at = 0; at < rows * side.scale_row_bytes; at += 64) __builtin_prefetch(next.scales + at, 0, 2);
    unpack_run(here.codes, here.scales, next.codes, (int)rows * side.head_size, here.factor,
               tile + (key - begin) * side.head_size);
    key += rows;
  }
}

void load_query(const Arguments& a, const Unit& unit, float* query) {
  const int size = a.k.head_size;
  for (int i = 0; i < unit.num_rows; ++i, query += size) {
    const int64_t row = unit.row + i, t = unit.segment->first + row / a.group;
    const int64_t head = (int64_t)unit.head * a.group + row % a.group;
    const int64_t from = t * a.query_row_stride + head * a.query_head_stride;
    if (a.query_type == QUERY_F32) {
      memcpy(query, static_cast<const float*>(a.query) + from, sizeof(float) * size);
      continue;
    }
    const uint8_t* halves = static_cast<const uint8_t*>(a.query) + 2 * from;
    (a.query_type == QUERY_BF16 ? unpack<BF16> : unpack<F16>)(halves, nullptr, halves, size, 1.0f, query);
  }
}

// What a row's weighted values are divided by; a sink's weight is in it, and scales them down by
// `keep` where it is the largest.
float divisor_of(const Arguments& a, int64_t head, float top, float total, float* keep) {
  *keep = 1.0f;
  if (a.sinks != nullptr && a.sinks[head] != NEVER) {
    const float sink = a.sinks[head], largest = top > sink ? top : sink;
    *keep = exponential_of(top - largest);
    return total * *keep + exponential_of(sink - largest);
  }
  return top == NEVER ? 1.0f : total;
}

// Writes the rows of a unit; rows without a key are zeros.
void store_out(const Arguments& a, const Unit& unit, const Sums& sums) {
  const int size = a.v.head_size;
  for (int i = 0; i < unit.num_rows; ++i) {
    const int64_t row = unit.row + i, t = unit.segment->first + row / a.group;
    const int64_t place = t * a.heads * a.group + (int64_t)unit.head * a.group + row % a.group;
    float* values = sums.out + (int64_t)i * size;
    float keep;
    const f32x16 total = all(divisor_of(a, place % (a.heads * a.group), sums.top[i], sums.total[i], &keep));
    const f32x16 kept = all(keep);
    for (int at = 0; at < size; at += LANES) store(values + at, div(mul(load(values + at), kept), total));
    if (a.query_type == QUERY_F32) {
      memcpy(static_cast<float*>(a.out) + place * size, values, sizeof(float) * size);
    } else {
      uint16_t* halves = static_cast<uint16_t*>(a.out) + place * size;
      for (int at = 0; at < size; ++at) {
        halves[at] = a.query_type == QUERY_BF16 ? bf16_of(values[at]) : f16_of(values[at]);
      }
    }
    if (a.log_sum_exp != nullptr) {
      a.log_sum_exp[place] = sums.top[i] == NEVER ? NEVER : sums.top[i] + std::log(sums.total[i]);
    }
  }
}

// Where a thread works on a unit of some rows.
struct Workspace {
  float* query;   // [rows][K head size]
  float* scores;  // [rows][BLOCK_KEYS], then weights
  float* totals;  // [rows][LANES]: partial sums of the weights
  float* rows;    // [BLOCK_KEYS][head size]: keys or values, unpacked
  Sums split, all;
};

Workspace workspace_of(const Arguments& a, int num_rows, Scratch& scratch) {
  const size_t rows = num_rows, sums = sums_floats(num_rows, a.v.head_size);
  const size_t unpacked = (size_t)BLOCK_KEYS * (a.k.head_size > a.v.head_size ? a.k.head_size : a.v.head_size);
  float* at = scratch.floats(rows * (a.k.head_size + BLOCK_KEYS + LANES) + unpacked + 2 * sums);
  const auto take = [&](size_t count) {
    float* const taken = at;
    at += count;
    return taken;
  };
  Workspace w;
  w.query = take(rows * a.k.head_size);
  w.scores = take(rows * BLOCK_KEYS);
  w.totals = take(rows * LANES);
  w.rows = take(unpacked);
  w.split = sums_at(take(sums), num_rows);
  w.all = sums_at(take(sums), num_rows);
  return w;
}

// Unpacks keys [at, next) as far as they lie in [first, stop); false where none does.
bool unpack_seen(const Arguments& a, const Unit& unit, const SideArguments& side, int64_t at, int64_t next,
                 int64_t first, int64_t stop, int64_t last, float* rows) {
  const int64_t begin = at > first ? at : first, end = next < stop ? next : stop;
  if (begin >= end) return false;
  const int64_t ahead = end + BLOCK_KEYS <= last ? BLOCK_KEYS : 0;
  unpack_keys(side, a.records + unit.segment->at, a.record_rows, unit.head, begin, end, ahead,
              rows + (begin - at) * side.head_size);
  return true;
}

// One split's sums of a unit's rows.
void attend_split(const Arguments& a, const Unit& unit, ScoreRows score_all, int64_t split, const View* views,
                  const Workspace& w, const Sums& sums) {
  const int rows = unit.num_rows;
  const int64_t first = views[0].begin, last = views[rows - 1].end;  // of all rows: both only grow
  const int64_t split_end = (split + 1) * SPLIT_KEYS, stop = last < split_end ? last : split_end;
  // Few rows wait for memory, which wants its requests spread; many find the keys in the first
  // cache again, and their own sums less often in the second.
  const int step = rows >= MANY_ROWS ? BLOCK_KEYS : TILE_KEYS;
  const auto unpacked = [&](const SideArguments& side, int64_t at) {
    return unpack_seen(a, unit, side, at, at + step, first, stop, last, w.rows);
  };
  clear(sums, rows, a.v.head_size);
  memset(w.totals, 0, sizeof(float) * (size_t)rows * LANES);
  for (int64_t block = split * SPLIT_KEYS; block < stop; block += BLOCK_KEYS) {
    if (block + BLOCK_KEYS <= first) continue;
    for (int64_t at = block; at < block + BLOCK_KEYS; at += step) {
      if (!unpacked(a.k, at)) continue;
      score_all(w.query, w.rows, a.k.head_size, rows, views, at, step, a.scale, w.scores + (at - block));
    }
    for (int row = 0; row < rows; ++row) {
      if (!sees(views[row], block, BLOCK_KEYS)) continue;
      softmax_row(w.scores + row * BLOCK_KEYS, views[row], block, a.cap, a.v.head_size, sums.top + row,
                  w.totals + row * LANES, sums.out + (int64_t)row * a.v.head_size);
    }
    for (int64_t at = block; at < block + BLOCK_KEYS; at += step) {
      if (!unpacked(a.v, at)) continue;
      accumulate_rows(w.scores + (at - block), w.rows, a.v.head_size, rows, views, at, step, sums.out);
    }
  }
  for (int row = 0; row < rows; ++row) sums.total[row] = sum(load(w.totals + row * LANES));
}

void run_unit(const Arguments& a, const Unit& unit) {
  thread_local Scratch scratch;
  const int rows = unit.num_rows, k_size = a.k.head_size, v_size = a.v.head_size;
  const Workspace w = workspace_of(a, rows, scratch);
  View views[MAX_ROWS];
  for (int i = 0; i < rows; ++i) views[i] = view_of(a, *unit.segment, (unit.row + i) / a.group);
  load_query(a, unit, w.query);
  const ScoreRows score_all = score_rows_for(k_size);
  if (unit.partial != nullptr) {
    attend_split(a, unit, score_all, unit.split, views, w, sums_at(unit.partial, rows));
    return;
  }
  clear(w.all, rows, v_size);
  for (int64_t split = unit.split; split < unit.split_end; ++split) {
    attend_split(a, unit, score_all, split, views, w, w.split);
    for (int row = 0; row < rows; ++row) {
      merge_row(w.all, row, w.split.top[row], w.split.total[row], w.split.out + (int64_t)row * v_size, v_size);
    }
  }
  store_out(a, unit, w.all);
}

// Merges the partial sums of all splits of a unit in order, and writes the output.
void join_unit(const Arguments& a, const Unit& unit) {
  thread_local Scratch scratch;
  const int rows = unit.num_rows, size = a.v.head_size;
  const size_t stride = sums_floats(rows, size);
  const Sums all_sums = sums_at(scratch.floats(stride), rows);
  clear(all_sums, rows, size);
  for (int64_t split = unit.split; split < unit.split_end; ++split) {
    const Sums part = sums_at(unit.partial + (split - unit.split) * stride, rows);
    for (int row = 0; row < rows; ++row) {
      merge_row(all_sums, row, part.top[row], part.total[row], part.out + (int64_t)row * size, size);
    }
  }
  store_out(a, unit, all_sums);
}

// Splits of one segment that its rows [row, row_end) look at: [first, last).
void splits_of(const Arguments& a, const Segment& s, int64_t row, int64_t row_end, int64_t* first, int64_t* last) {
  *first = view_of(a, s, row / a.group).begin / SPLIT_KEYS;
  *last = (view_of(a, s, (row_end - 1) / a.group).end + SPLIT_KEYS - 1) / SPLIT_KEYS;
}

// Calls plan(segment, row, rows, first split, last split, apart) for every block of rows. Few rows
// over many keys have their splits run apart: all heads of a split, which lie in the same pages,
// are near in time, and threads share a single sequence. Many rows keep the threads busy anyway.
template <class Plan>
void for_row_blocks(const Arguments& a, int64_t most, const Plan& plan) {
  for (int64_t i = 0; i < a.num_segments; ++i) {
    const Segment& s = a.segments[i];
    const int64_t rows = s.num_rows * a.group;
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t end = row + most < rows ? row + most : rows;
      int64_t first, last;
      splits_of(a, s, row, end, &first, &last);
      plan(s, row, (int)(end - row), first, last, rows <= most && rows <= FEW_ROWS && last - first > 1);
    }
  }
}

void attend(const Arguments& a) {
  int64_t elements = 0;
  for (int64_t i = 0; i < a.num_segments; ++i) elements += a.segments[i].num_rows > 0 ? a.segments[i].length : 0;
  elements *= (int64_t)a.heads * (a.k.head_size + a.v.head_size);
  const int64_t useful = elements / ELEMENTS_PER_THREAD + 1;
  const int threads = a.threads < useful ? a.threads : (int)useful;

  int64_t num_units = 0, num_joins = 0;
  size_t floats = 0;
  const int most = rows_of_unit(a, threads);
  for_row_blocks(a, most, [&](const Segment&, int64_t, int rows, int64_t first, int64_t last, bool apart) {
    num_units += a.heads * (apart ? last - first : 1);
    if (!apart) return;
    num_joins += a.heads;
    floats += a.heads * (last - first) * sums_floats(rows, a.v.head_size);
  });
  thread_local Scratch scratch;
  const size_t unit_floats = (num_units + num_joins) * sizeof(Unit) / sizeof(float) / LANES * LANES + LANES;
  float* memory = scratch.floats(unit_floats + floats);
  Unit* units = reinterpret_cast<Unit*>(memory);
  Unit* joins = units + num_units;
  Unit *unit = units, *join = joins;
  float* partial = memory + unit_floats;
  for_row_blocks(a, most, [&](const Segment& s, int64_t row, int rows, int64_t first, int64_t last, bool apart) {
    const size_t stride = sums_floats(rows, a.v.head_size);
    if (!apart) {
      for (int head = 0; head < a.heads; ++head) *unit++ = {&s, head, row, rows, first, last, nullptr};
      return;
    }
    for (int head = 0; head < a.heads; ++head) {
      *join++ = {&s, head, row, rows, first, last, partial + head * (last - first) * stride};
    }
    // All heads of a split follow one another: they lie in the same records.
    for (int64_t split = first; split < last; ++split) {
      for (int head = 0; head < a.heads; ++head) {
        float* at = partial + (head * (last - first) + split - first) * stride;
        *unit++ = {&s, head, row, rows, split, split + 1, at};
      }
    }
    partial += a.heads * (last - first) * stride;
  });
  std::atomic<bool> failed{false};
  const auto guarded = [&](const Unit& one, void (*run)(const Arguments&, const Unit&)) {
    try {
      run(a, one);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  Pool& pool = Pool::instance();
  pool.run(threads, num_units, [&](int64_t i) { guarded(units[i], run_unit); });
  pool.run(threads, num_joins, [&](int64_t i) { guarded(joins[i], join_unit); });
  if (failed) throw std::bad_alloc();
}

bool side_is_good(const SideArguments& side) {
  return side.format >= 0 && side.format < NUM_FORMATS && side.head_size > 0 && side.head_size <= MAX_HEAD &&
         side.head_size % (side.format >= Q8_0 && side.format <= Q4_0 ? 32 : LANES) == 0;
}

// Whether every byte that the arguments lead to lies inside what they describe.
bool segments_are_good(const Arguments& a) {
  for (int64_t i = 0; i < a.num_segments; ++i) {
    const Segment& s = a.segments[i];
    if (s.first < 0 || s.num_rows < 0 || s.first + s.num_rows > a.num_rows || s.num_rows > s.length) return false;
    if (s.num_rows == 0) continue;
    const int64_t records = (s.length + a.record_rows - 1) / a.record_rows;
    if (s.at < 0 || s.at + records > a.num_listed) return false;
    for (int64_t index = view_of(a, s, 0).begin / a.record_rows; index < records; ++index) {
      const int64_t record = a.records[s.at + index];
      if (record < 0 || record >= a.num_records) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace memkv

// 0: done; 1: arguments it cannot serve; 2: no memory. Nothing is written unless 0.
extern "C" int memkv_attend(const memkv_attend_arguments* arguments) {
  const memkv_attend_arguments& a = *arguments;
  if (!memkv::side_is_good(a.k) || !memkv::side_is_good(a.v) || a.group < 1 || a.heads < 1 ||
      a.record_rows < 1 || a.query_type < memkv::QUERY_F32 || a.query_type > memkv::QUERY_F16 || !memkv::segments_are_good(a)) {
    return 1;
  }
  try {
    memkv::attend(a);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}
