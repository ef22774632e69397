"""The rotation of the turbo formats: a Walsh-Hadamard transform between two rows of random signs.

A row x of ``size`` elements (64, 128, 256 or 512, the head size) is stored as::

    y = S2 * H(S1 * x)      and comes back as      x = S1 * H(S2 * y)

H is orthonormal in natural order, so norms and inner products stay: a rotated query meets rotated
keys with the same scores, and the weighted sum of rotated values is rotated back once. Outliers of
a few channels spread over the head, which is what the codebooks of the turbo formats expect.

The signs are ``paged-cache-and-swap.md`` 1.6: with d = the draws of numpy's
``default_rng(42).integers(0, 2) * 2 - 1``, S1 of every size is ``d[:size]`` and S2 is
``d[size : 2 * size]``. (The source's tables were checked for 128; other sizes follow the same
rule by our choice.) The generator is PCG64 (O'Neill's PCG XSL-RR 128/64) seeded through numpy's
SeedSequence; both are documented and part of numpy's compatibility promise, and run here on whole
numbers alone.

Arithmetic is f32: butterflies ``a + b`` and ``a - b`` at strides 1, 2, 4, ..., size / 2 in that
order, then one product with the f32 nearest to ``1 / sqrt(size)``. A kernel that keeps this order
has the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from memkv_pp.errors import FormatError
from memkv_pp.formats import ROTATED_SIZES
from memkv_pp.small_floats import to_f32

SIGN_SEED = 42

_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_U128 = _U64 << 64 | _U64


def rotate(row: Sequence[float], *, inverse: bool = False) -> list[float]:
    """``row`` rotated, or with ``inverse`` rotated back; FormatError for a size without signs.

    >>> [round(x, 4) for x in rotate(rotate([3.0] + [0.0] * 63), inverse=True)[:2]]
    [3.0, 0.0]
    """
    before, after = sign_tables(len(row))
    if inverse:
        before, after = after, before
    values = [to_f32(x) * sign for x, sign in zip(row, before, strict=True)]
    stride = 1
    while stride < len(values):
        for first in range(0, len(values), 2 * stride):
            for i in range(first, first + stride):
                a, b = values[i], values[i + stride]
                values[i], values[i + stride] = to_f32(a + b), to_f32(a - b)
        stride *= 2
    norm = rotation_norm(len(values))
    return [to_f32(x * norm) * sign for x, sign in zip(values, after, strict=True)]


def rotation_norm(size: int) -> float:
    """The f32 factor that makes the transform of ``size`` elements orthonormal."""
    return to_f32(1 / math.sqrt(size))


@cache
def sign_tables(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(S1, S2) of a head of ``size`` elements, each -1 or 1; FormatError for another size."""
    if size not in ROTATED_SIZES:
        raise FormatError(
            f"a head of {size} elements cannot be rotated: it is none of {ROTATED_SIZES}",
            "choose a --kv format that is not rotated, such as q8_0 or nvfp4",
        )
    signs = tuple(2 * bit - 1 for bit in islice(random_bits(SIGN_SEED), 2 * size))
    return signs[:size], signs[size:]


def random_bits(seed: int) -> Iterator[int]:
    """The endless draws of numpy's ``default_rng(seed).integers(0, 2)``, for 0 <= seed < 2^32.

    Drawing below 2 takes the top bit of a 32-bit word (Lemire's product, which never rejects for a
    power of two), and PCG64 hands its 64-bit outputs out as the low word, then the high one.
    """
    words = _seed_words(seed)
    state = words[0] << 64 | words[1]
    increment = (words[2] << 64 | words[3]) << 1 & _U128 | 1
    # Seeding is a step from 0, the state added, and another step.
    state = _step(state + increment, increment)
    while True:
        state = _step(state, increment)
        output = _rotate_right(state >> 64 ^ state & _U64, state >> 122)
        yield output >> 31 & 1
        yield output >> 63


def _step(state: int, increment: int) -> int:
    return (state * 0x2360ED051FC65DA44385DF649FCCF645 + increment) & _U128


def _rotate_right(word: int, places: int) -> int:
    return (word >> places | word << (64 - places)) & _U64


def _seed_words(seed: int) -> list[int]:
    """Four 64-bit words of SeedSequence(seed): a pool of four 32-bit words, mixed all with all."""
    hashes = _hash_constants(0x43B0D7E5, 0x931E8875)
    pool = [_hashed(entropy, *next(hashes)) for entropy in (seed, 0, 0, 0)]
    for source in range(4):
        for target in range(4):
            if source != target:
                mixed = 0xCA01F9DD * pool[target] - 0x4973F715 * _hashed(
                    pool[source], *next(hashes)
                )
                pool[target] = _folded(mixed & _U32)
    hashes = _hash_constants(0x8B51F9DD, 0x58F38DED)
    halves = [_hashed(pool[i % 4], *next(hashes)) for i in range(8)]
    return [halves[i] | halves[i + 1] << 32 for i in range(0, 8, 2)]


def _hash_constants(first: int, factor: int) -> Iterator[tuple[int, int]]:
    """Each constant of a multiplicative chain with the one that follows it."""
    while True:
        following = first * factor & _U32
        yield first, following
        first = following


def _hashed(value: int, mask: int, factor: int) -> int:
    return _folded((value ^ mask) * factor & _U32)


def _folded(value: int) -> int:
    return value ^ value >> 16
