"""Packs and unpacks groups of sixteen: nvfp4 and the turbo formats, with and without ``e``.

Layouts, codebooks and scale rules are ``paged-cache-and-swap.md`` 1.3 to 1.5::

    format  codes of elements x[0..15]                            scale
    nvfp4   E2M1 nibbles, even element in the low one             E4M3
    turbo8  sixteen E4M3 bytes                                    BF16, little-endian
    turbo4  nibbles, even element in the low one                  E4M3
    turbo3  two 24-bit little-endian words of eight codes,        E4M3
            code i of a word in its bits 3i to 3i + 2
    turbo2  code i of four in bits 2i and 2i + 1 of its byte      E4M3

Every intermediate is rounded to f32. A sum of sixteen is taken by halves, ``a[i] + a[i + 8]``,
then + 4, + 2, + 1, as vector lanes and warp shuffles do. ``amax`` is the largest magnitude, and a
code is the number of boundaries that are at most the value.

* nvfp4: ``s = E4M3(amax / 6)``; a code is the sign and the E2M1 code nearest to ``|x| / s`` with
  the stored ``s``. Where ``s`` is stored as 0 every code is 0.
* turbo8: ``s = BF16(max(amax / 448, 1e-12))``; a code is ``E4M3(x / s)`` with the stored ``s``.
* turbo4, turbo3, turbo2: the code of ``x * (C / amax)``, where ``C`` is the outermost level; for an
  ``amax`` of at most 1e-12, of ``x``. The scale has the norm of the group match that of its levels:
  ``s = E4M3(min(sqrt(sum(x * x)) / sqrt(sum(level * level)), 448))``.

**Clip search** stores other bytes in the same layout. It tries the rules above, then every clip
factor ``f`` of ``CLIP_FACTORS``, and keeps the first whose ``sum((x - decoded)^2)`` is least. With
a factor nvfp4 has ``s = E4M3(amax * f / 6)``; the turbo formats take codes at ``C / (amax * f)``
and the least-squares scale ``sum(x * level) / sum(level * level)`` in place of the matched norm.
turbo8 has nothing to clip.

**The suffix e**: a byte ``b`` per record, layer, side and KV head stands for the power of two
``2^(b - 127)``, so ``b << 23`` are its bits as f32. Elements are divided by it before they are
packed and stored scales multiplied by it before they are used. ``exponent_byte`` chooses it so
that the first row of the record reaches 4 to 8, where scales lie amid E4M3's normal numbers and
later rows may be a hundred times larger or smaller.

Rows that are not ordinary: a zero group has scale 0 (turbo8: 1e-12) and comes back as zeros; a
scale below 2^-10 is stored as 0; larger groups than a scale of 448 can hold are cut off there
(turbo8 has no such limit); one infinity or NaN, also one that the exponent makes, turns the whole
group into NaN: the scale is NaN and every code byte 0.
"""

import math
from collections.abc import Sequence

from memkv_pp.errors import FormatError
from memkv_pp.formats import Family, Format
from memkv_pp.small_floats import (
    BF16_NAN,
    E4M3_MAX,
    E4M3_NAN,
    bf16_bits,
    bf16_value,
    e4m3_code,
    e4m3_value,
    to_f32,
)

GROUP = 16
E2M1_MAX = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Round to nearest even: a tie goes to the even code, so 0.25, 1.25, 2.5 and 5 go down and their
# boundary is the next f32.
E2M1_BOUNDARIES = (0.25 + 2**-25, 0.75, 1.25 + 2**-23, 1.75, 2.5 + 2**-22, 3.5, 5.0 + 2**-21)

# Lloyd-Max quantisers of the normal distribution, positive half.
_POSITIVE_LEVELS = {
    "turbo4": (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
    "turbo3": (0.2451, 0.7560, 1.3440, 2.1520),
    "turbo2": (0.4528, 1.5104),
}
_POSITIVE_BOUNDARIES = {
    "turbo4": (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
    "turbo3": (0.501, 1.050, 1.748),
    "turbo2": (0.9816,),
}
TURBO_LEVELS = {
    name: tuple(to_f32(x) for x in (*(-x for x in reversed(half)), *half))
    for name, half in _POSITIVE_LEVELS.items()
}
TURBO_BOUNDARIES = {
    name: tuple(to_f32(x) for x in (*(-x for x in reversed(half)), 0.0, *half))
    for name, half in _POSITIVE_BOUNDARIES.items()
}
LEAST_TURBO = to_f32(1e-12)
CLIP_FACTORS = tuple(sixteenths / 16 for sixteenths in range(8, 25))

EXPONENT_BIAS = 127
FIRST_ROW_EXPONENT = 2
_LARGEST_EXPONENT_BYTE = EXPONENT_BIAS + 127 - FIRST_ROW_EXPONENT


def exponent_byte(row: Sequence[float]) -> int:
    """The exponent byte of a record whose first row, of one KV head, is ``row`` as it is packed.

    127, which changes nothing, for a row of zeros or one with an infinity or NaN; else 1 to 252.

    >>> exponent_byte([0.0, -4.0]), exponent_byte([0.002]), exponent_byte([0.0])
    (127, 116, 127)
    """
    sizes = [abs(to_f32(x)) for x in row]
    largest = max(sizes)
    if largest == 0 or not all(map(math.isfinite, sizes)):
        return EXPONENT_BIAS
    exponent = math.frexp(largest)[1] - 1
    return max(exponent + EXPONENT_BIAS - FIRST_ROW_EXPONENT, 1)


def check_exponent(exponent: int) -> None:
    """Raise FormatError for a byte that ``exponent_byte`` never returns."""
    if not 1 <= exponent <= _LARGEST_EXPONENT_BYTE:
        raise FormatError(
            f"an exponent byte is 1 to {_LARGEST_EXPONENT_BYTE}, got {exponent}",
            "take it from exponent_byte: it is set with the first row of a record",
        )


def pack_sixteen(
    fmt: Format, group: Sequence[float], exponent: int, *, clip_search: bool
) -> tuple[bytes, bytes]:
    """(codes, scales) of sixteen f32 numbers; ``exponent`` is a byte that scales them down."""
    group = [to_f32(math.ldexp(x, EXPONENT_BIAS - exponent)) for x in group]
    if not all(map(math.isfinite, group)):
        scale = _u16(BF16_NAN) if fmt.scale_bytes == 2 else bytes([E4M3_NAN])
        return bytes(fmt.code_bytes), scale
    amax = max(map(abs, group))
    if fmt.scale_bytes == 2:
        bits = bf16_bits(max(to_f32(amax / E4M3_MAX), LEAST_TURBO))
        scale = bf16_value(bits)
        return bytes(e4m3_code(to_f32(x / scale)) for x in group), _u16(bits)
    pick = _pick_e2m1 if fmt.family is Family.NVFP4 else _pick_levels
    if not clip_search:
        scale, codes, _ = pick(fmt, group, amax, None)
        return _pack_codes(fmt, codes), bytes([scale])
    tried = [pick(fmt, group, amax, factor) for factor in (None, *CLIP_FACTORS)]
    scale, codes, _ = min(tried, key=lambda choice: _squared_error(group, choice))
    return _pack_codes(fmt, codes), bytes([scale])


def unpack_sixteen(fmt: Format, codes: bytes, scales: bytes, exponent: int) -> list[float]:
    """The sixteen elements: ``level * (s * 2^k)``, each product rounded to f32."""
    if fmt.scale_bytes == 2:
        scale = bf16_value(int.from_bytes(scales, "little"))
        levels = [e4m3_value(code) for code in codes]
    else:
        scale = e4m3_value(scales[0])
        table = levels_of(fmt)
        levels = [table[code] for code in _unpack_codes(fmt, codes)]
    scale = to_f32(math.ldexp(scale, exponent - EXPONENT_BIAS))
    return [to_f32(level * scale) for level in levels]


def levels_of(fmt: Format) -> tuple[float, ...]:
    """What each code of a format with a codebook stands for, before its scale.

    ``KeyError`` for turbo8, whose codes are E4M3 numbers.
    """
    if fmt.family is Family.NVFP4:
        return (*E2M1_LEVELS, *(-x for x in E2M1_LEVELS))
    return TURBO_LEVELS[fmt.name.removesuffix("e")]


def code_bits(fmt: Format) -> int:
    """Bits of one code."""
    return 8 * fmt.code_bytes // fmt.group


_Choice = tuple[int, list[int], list[float]]
"""The byte of the scale, the codes, and the elements they stand for."""


def _pick_e2m1(fmt: Format, group: list[float], amax: float, clip: float | None) -> _Choice:
    scale_code = e4m3_code(to_f32(to_f32(amax * (clip or 1.0)) / E2M1_MAX))
    scale = e4m3_value(scale_code)
    if scale == 0:
        return scale_code, [0] * GROUP, [0.0] * GROUP
    codes = [
        _count(E2M1_BOUNDARIES, abs(to_f32(x / scale))) | (8 if math.copysign(1, x) < 0 else 0)
        for x in group
    ]
    levels = levels_of(fmt)
    return scale_code, codes, [to_f32(levels[code] * scale) for code in codes]


def _pick_levels(fmt: Format, group: list[float], amax: float, clip: float | None) -> _Choice:
    levels, boundaries = levels_of(fmt), TURBO_BOUNDARIES[fmt.name.removesuffix("e")]
    factor = 1.0
    if amax > LEAST_TURBO:
        factor = to_f32(levels[-1] / to_f32(amax * (clip or 1.0)))
    codes = [_count(boundaries, to_f32(x * factor)) for x in group]
    chosen = [levels[code] for code in codes]
    level_squares = _sum_by_halves([to_f32(x * x) for x in chosen])
    if clip is None:
        norm = to_f32(math.sqrt(_sum_by_halves([to_f32(x * x) for x in group])))
        scale = to_f32(norm / to_f32(math.sqrt(level_squares)))
    else:
        products = [to_f32(x * level) for x, level in zip(group, chosen, strict=True)]
        scale = to_f32(_sum_by_halves(products) / level_squares)
    scale_code = e4m3_code(scale)
    scale = e4m3_value(scale_code)
    return scale_code, codes, [to_f32(level * scale) for level in chosen]


def _squared_error(group: list[float], choice: _Choice) -> float:
    misses = [to_f32(x - found) for x, found in zip(group, choice[2], strict=True)]
    return _sum_by_halves([to_f32(miss * miss) for miss in misses])


def _sum_by_halves(values: list[float]) -> float:
    while len(values) > 1:
        half = len(values) // 2
        values = [to_f32(values[i] + values[i + half]) for i in range(half)]
    return values[0]


def _count(boundaries: Sequence[float], value: float) -> int:
    return sum(boundary <= value for boundary in boundaries)


def _u16(bits: int) -> bytes:
    return bits.to_bytes(2, "little")


def _pack_codes(fmt: Format, codes: Sequence[int]) -> bytes:
    bits = code_bits(fmt)
    return sum(code << bits * i for i, code in enumerate(codes)).to_bytes(fmt.code_bytes, "little")


def _unpack_codes(fmt: Format, codes: bytes) -> list[int]:
    bits = code_bits(fmt)
    word = int.from_bytes(codes, "little")
    return [word >> bits * i & (1 << bits) - 1 for i in range(GROUP)]
