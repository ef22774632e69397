// Groups of sixteen, one a vector, on the lanes of simd.h. Every path gives the same bits.
//
//   looked_up(table, index)  table[index & 15]
//   counted(x, counter)      how many of the counter's boundaries are at most x: -15 to 15, or 0 to
//                            LARGEST_COUNTED where all boundaries are above zero
//   kept(codes, mask)        all of them or zeros
//   beside, first_four       four numbers as the first lanes of a vector, and back
//   sums(m)                  of each of four vectors, by halves: lanes i and i + 8, then + 4, + 2, + 1
//   join_codes<BITS>         the codes of four vectors, one after another from bit 0 on
//   butterflies<STRIDE>(x)   one step of a Walsh-Hadamard transform within a vector
#pragma once

#include "../codec/groups.h"
#include "simd.h"

namespace memkv {

constexpr float LARGEST_COUNTED = 31.0f;

// Eight codes, each in a byte of its own, one after another from bit 0 on.
template <int BITS>
inline uint64_t joined(uint64_t bytes) {
#if defined(__BMI2__) && !defined(MEMKV_PORTABLE)
  return _pext_u64(bytes, 0x0101010101010101u * ((1 << BITS) - 1));
#else
  const uint64_t pairs = (bytes | bytes >> (8 - BITS)) & 0x0001000100010001u * ((1 << 2 * BITS) - 1);
  const uint64_t fours = (pairs | pairs >> (16 - 2 * BITS)) & 0x0000000100000001u * ((1 << 4 * BITS) - 1);
  return (fours | fours >> (32 - 4 * BITS)) & ((1ull << 8 * BITS) - 1);
#endif
}

}  // namespace memkv

#if defined(MEMKV_PORTABLE)
#include "groups_portable.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "groups_avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "groups_avx2.h"
#else
#include "groups_portable.h"
#endif
