// Rows into records and out of them, packed on the way.
//
// A block takes CODEC_ELEMENTS elements in the order of the unpacked rows, so that consecutive
// threads touch consecutive words of them. In shared memory groups lie an odd number of floats
// apart: threads that each walk through a group of their own meet no bank conflict. Rows of rotated
// formats, which such a block holds whole, are rotated there on the way in, and come out rotated.
#include "cuda/rotation.h"
#include "cuda/warp.h"

constexpr int CODEC_ELEMENTS = 4096;

// Where the groups of a block lie: group `local` of the block is group `index` of `inner`, which is
// number `place` of `middle`, in `outer`. One division of 64 bits for a block, of 32 for a group.
struct Walk {
  int64_t outer;
  int place, index, middle, inner;

  MEMKV_HD Walk(int64_t first, int middle_, int inner_) : middle(middle_), inner(inner_) {
    const int64_t unit = first / inner;
    index = (int)(first % inner);
    outer = unit / middle;
    place = (int)(unit % middle);
  }

  // The walk's state `local` groups further.
  MEMKV_HD Walk at(int local) const {
    Walk moved = *this;
    const int group = index + local, unit = place + group / inner;
    moved.index = group % inner;
    moved.outer = outer + unit / middle;
    moved.place = unit % middle;
    return moved;
  }
};

// Write NUM_BYTES of each of `held` groups, one behind the other in shared memory, word by word to
// their rows: tokens are `outer` of the walk, heads its `place`.
template <int NUM_BYTES>
__device__ void write_part(const uint8_t* groups, int held, const Walk& start,
                           const int64_t* records, const int64_t* rows, const Rows& layout,
                           uint8_t* part) {
  using word = typename Word<NUM_BYTES>::type;
  constexpr int words = NUM_BYTES / (int)sizeof(word);
  for (int i = (int)threadIdx.x; i < held * words; i += (int)blockDim.x) {
    const Walk walk = start.at(i / words);
    const int64_t record = records[walk.outer];
    if (record < 0) continue;
    uint8_t* const row = part + layout.at(record, walk.place, (int)rows[walk.outer]);
    ((word*)row)[walk.index * words + i % words] = ((const word*)groups)[i];
  }
}

// Signs f32 [head_size] and the norm of a rotation; formats that are not rotated use none of it.
struct Rotation {
  const float* first;
  const float* second;
  float norm;
};

// Rotate `held` rows of SIZE elements, groups of 16 that lie 17 floats apart.
template <int SIZE>
__device__ void rotate_tile(float* tile, int held, const Rotation& by) {
  const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
  for (int row = (int)threadIdx.x / 32; row < held; row += warps) {
    float x[SIZE / 32];
    float* const places = tile + (row * (SIZE / 16) + lane / 16) * 17 + lane % 16;
#pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) x[i] = places[i * 2 * 17];
    rotate_row<SIZE>(x, by.first, by.second, by.norm);
#pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) places[i * 2 * 17] = x[i];
  }
}

// The largest magnitude of a row after its rotation, or a NaN if there is one; a warp takes a row.
template <int DTYPE, int SIZE>
__device__ float rotated_largest(const typename Element<DTYPE>::stored* row, const Rotation& by) {
  const int lane = (int)threadIdx.x % 32;
  float x[SIZE / 32], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < SIZE / 32; ++i) x[i] = Element<DTYPE>::load(row[32 * i + lane]);
  rotate_row<SIZE>(x, by.first, by.second, by.norm);
#pragma unroll
  for (int i = 0; i < SIZE / 32; ++i) largest = larger(largest, magnitude(x[i]));
  return largest;
}

// Set the exponents of the records whose row 0 is among values [num_rows, heads, head_size], as
// `append` takes them, which is launched after this. A warp takes a head of a row.
template <int FORMAT, int DTYPE>
__global__ void set_exponents(const typename Element<DTYPE>::stored* values, const int64_t* records,
                              const int64_t* rows, const float* first, const float* second,
                              uint8_t* exponents, int64_t record_bytes, int64_t num_rows, int heads,
                              int head_size, float norm) {
  const int64_t unit = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, at = unit / heads;
  if (at >= num_rows || records[at] < 0 || rows[at] != 0) return;
  const int lane = (int)threadIdx.x % 32;
  const auto* const row = values + unit * head_size;
  float largest = 0.0f;
  if constexpr (is_rotated(FORMAT)) {
    const Rotation by{first, second, norm};
    if (head_size == 64) largest = rotated_largest<DTYPE, 64>(row, by);
    if (head_size == 128) largest = rotated_largest<DTYPE, 128>(row, by);
    if (head_size == 256) largest = rotated_largest<DTYPE, 256>(row, by);
    if (head_size == 512) largest = rotated_largest<DTYPE, 512>(row, by);
  } else {
    for (int d = lane; d < head_size; d += 32) {
      largest = larger(largest, magnitude(Element<DTYPE>::load(row[d])));
    }
  }
  largest = warp_largest(largest);
  if (lane == 0) exponents[records[at] * record_bytes + unit % heads] = exponent_byte(largest);
}

// Pack values [num_rows, heads, head_size] to (records[i], rows[i]); a negative record writes
// nothing. Pairs are distinct. `factor` is fp8's reciprocal of the scale. Shared memory, with n =
// CODEC_ELEMENTS / group: n * (4 * (group | 1) + code_bytes + scale_bytes).
template <int FORMAT, int DTYPE>
__global__ void append(const typename Element<DTYPE>::stored* values, const int64_t* records,
                       const int64_t* rows, const float* first_signs, const float* second_signs,
                       uint8_t* codes, uint8_t* scales, uint8_t* exponents, int64_t record_bytes,
                       int64_t num_rows, int heads, int record_rows, int head_size, float norm,
                       float factor) {
  using packed_group = Packed<FORMAT>;
  constexpr int group = packed_group::group, pitch = group | 1;
  constexpr int block_groups = CODEC_ELEMENTS / group;
  constexpr int code_bytes = packed_group::code_bytes, scale_bytes = packed_group::scale_bytes;
  MEMKV_SHARED(float, tile);  // [block_groups][pitch], and then the packed groups
  uint8_t* const packed_codes = (uint8_t*)(tile + block_groups * pitch);
  uint8_t* const packed_scales = packed_codes + block_groups * code_bytes;

  const int row_groups = head_size / group, threads = (int)blockDim.x;
  const int64_t first = (int64_t)blockIdx.x * block_groups, all = num_rows * heads * row_groups;
  const int held = (int)(all - first < block_groups ? all - first : block_groups);
  for (int i = (int)threadIdx.x; i < held * group; i += threads) {
    tile[i / group * pitch + i % group] = Element<DTYPE>::load(values[first * group + i]);
  }
  __syncthreads();
  if constexpr (is_rotated(FORMAT)) {
    const Rotation by{first_signs, second_signs, norm};
    const int held_rows = held / row_groups;
    if (head_size == 64) rotate_tile<64>(tile, held_rows, by);
    if (head_size == 128) rotate_tile<128>(tile, held_rows, by);
    if (head_size == 256) rotate_tile<256>(tile, held_rows, by);
    if (head_size == 512) rotate_tile<512>(tile, held_rows, by);
    __syncthreads();
  }
  const Walk walk(first, heads, row_groups);
  for (int i = (int)threadIdx.x; i < held; i += threads) {
    if (exponents) {
      const Walk at = walk.at(i);
      if (records[at.outer] < 0) continue;
      factor = reciprocal_power(exponents[records[at.outer] * record_bytes + at.place]);
    }
    packed_group packed;
    Block<FORMAT>::encode(tile + i * pitch, packed.codes, packed.scales, factor);
    copy_bytes<code_bytes>(packed_codes + i * code_bytes, packed.codes);
    if constexpr (scale_bytes > 0) {
      copy_bytes<scale_bytes>(packed_scales + i * scale_bytes, packed.scales);
    }
  }
  __syncthreads();

  const Rows code_rows{record_bytes, record_rows, row_groups * code_bytes};
  write_part<code_bytes>(packed_codes, held, walk, records, rows, code_rows, codes);
  if constexpr (scale_bytes > 0) {
    const Rows scale_rows{record_bytes, record_rows, row_groups * scale_bytes};
    write_part<scale_bytes>(packed_scales, held, walk, records, rows, scale_rows, scales);
  }
}

// Unpack every row of records [num_records], in order, to out [heads, num_records * record_rows,
// head_size]; rows of a negative record come out as anything. `exponents` is null for a format without
// them, `factor` fp8's scale. Shared memory: CODEC_ELEMENTS / group * 4 * (group | 1).
template <int FORMAT, int DTYPE>
__global__ void gather(const uint8_t* codes, const uint8_t* scales, const uint8_t* exponents,
                       int64_t record_bytes, const int64_t* records, int64_t num_records,
                       typename Element<DTYPE>::stored* out, int heads, int record_rows,
                       int head_size, float factor) {
  using packed_group = Packed<FORMAT>;
  constexpr int group = packed_group::group, pitch = group | 1;
  constexpr int block_groups = CODEC_ELEMENTS / group;
  MEMKV_SHARED(float, tile);  // [block_groups][pitch]

  const int row_groups = head_size / group, threads = (int)blockDim.x;
  const int64_t all = heads * num_records * record_rows * row_groups;
  const int64_t first = (int64_t)blockIdx.x * block_groups;
  const int held = (int)(all - first < block_groups ? all - first : block_groups);
  const Rows code_rows{record_bytes, record_rows, row_groups * packed_group::code_bytes};
  const Rows scale_rows{record_bytes, record_rows, row_groups * packed_group::scale_bytes};
  // `outer` counts the records of one head after another.
  const Walk start(first, record_rows, row_groups);
  const int64_t first_head = start.outer / num_records, first_record = start.outer % num_records;
  for (int i = (int)threadIdx.x; i < held; i += threads) {
    const Walk walk = start.at(i);
    int64_t head = first_head, at = first_record + (walk.outer - start.outer);
    if (at >= num_records) {
      head += at / num_records;
      at %= num_records;
    }
    const int64_t record = records[at];
    if (record >= 0) {
      if (exponents) factor = power(exponents[record * record_bytes + head]);
      packed_group packed;
      packed.load(codes + code_rows.at(record, (int)head, walk.place),
                  scales + scale_rows.at(record, (int)head, walk.place), walk.index);
      Block<FORMAT>::decode(packed.codes, packed.scales, tile + i * pitch, factor);
    }
  }
  __syncthreads();
  for (int i = (int)threadIdx.x; i < held * group; i += threads) {
    out[first * group + i] = Element<DTYPE>::store(tile[i / group * pitch + i % group]);
  }
}
