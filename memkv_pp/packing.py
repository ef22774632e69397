"""Packs and unpacks one group of a format, in plain Python: the truth of every kernel.

A ggml block is a header (``d``, and ``m`` where there is one, as f16) followed by the codes. The
cache keeps the header as the group's *scales* and the rest as its *codes*; bits are little-endian::

    format  ggml block            scales   codes
    q8_0    d | q[32]             d        32 signed bytes, element j in byte j
    q4_0    d | qs[16]            d        16 bytes, element j in the low, 16 + j in the high
    q4_1    d m | qs[16]          d m      nibble of byte j
    q5_0    d | qh[4] | qs[16]    d        qs as q4_0, then qh: the fifth bit of element j is
    q5_1    d m | qh[4] | qs[16]  d m      bit j of the 32-bit word

An element is worth ``q * d`` (q8_0), ``(q - 8) * d`` and ``(q - 16) * d`` (q4_0, q5_0) or
``q * d + m`` (q4_1, q5_1). Every intermediate is rounded to f32, and codes are taken with the f32
``d`` before it is rounded to f16; that order is what makes the bytes ggml's.

Rows that are not ordinary:

* zeros: every element comes back 0. ``d`` of q4_0 and q5_0 is -0; a zero ``m`` has the sign of the
  group's first zero.
* a constant: exact to f16 in q4_1 and q5_1 (``d`` is 0, ``m`` the constant).
* denormal: a ``d`` of at most 2^-25 is stored as 0, so every element is 0 or ``m``; codes still
  follow the f32 ``d``. Where ``1 / d`` overflows f32, a product that is not finite has code 0.
* huge: a ``d`` or ``m`` above 65504 is stored as infinite, and elements come back infinite or NaN.
* infinite: ``d`` is infinite and ``1 / d`` is 0; the group comes back infinite or NaN.
* NaN: its own code is 0, and ``d`` is that of the other elements, so it comes back as 0, as ``-8 d``
  or ``-16 d``, or as ``m``. q8_0 forgets the elements up to the last NaN as well: ``d`` is that of
  the elements behind it, codes before it keep the low byte of what does not fit (none of 2^31 or
  more), and a NaN in the last place makes ``d`` 0x7E00 and the group NaN. Nothing but NaN: ``d`` is
  -0 in q4_0 and q5_0; it is 0xFC00 and ``m`` 0x7C00 in q4_1 and q5_1.

All of it is what the loops of ``ggml_quantize_chunk`` do. ``gguf.quants`` differs where numpy does:
in the signs of zeros, of which no element depends; in q4_1 and q5_1 of nothing but one infinity,
whose elements are NaN either way; and in NaN, of which it makes the whole group.

f16 rounds to nearest even and overflows to infinity. bf16 rounds to nearest even; fp8 is E4M3
(no infinity), rounds to nearest even and saturates at 448. Every NaN becomes the one positive
quiet NaN: 0x7FC00000, 0x7E00, 0x7FC0, 0x7F. nvfp4 and the turbo formats: ``packing_groups.py``.
"""

import math
import struct
from collections.abc import Sequence

from memkv_pp.errors import ConfigError, FormatError
from memkv_pp.formats import Family, Format
from memkv_pp.packing_groups import (
    EXPONENT_BIAS,
    check_exponent,
    pack_sixteen,
    unpack_sixteen,
)
from memkv_pp.small_floats import bf16_bits, e4m3_code, e4m3_value, to_f32

_F16_NAN = 0x7E00
_F32_MAX = 2.0**128 - 2.0**104
_HALF = 16


def pack_group(
    fmt: Format,
    values: Sequence[float],
    *,
    scale: float = 1.0,
    exponent: int = EXPONENT_BIAS,
    clip_search: bool = False,
) -> tuple[bytes, bytes]:
    """(codes, scales) of one group: ``fmt.code_bytes`` and ``fmt.scale_bytes`` bytes.

    ``values`` are rounded to f32 first, there must be ``fmt.group`` of them; those of a rotated
    format are taken as they are (``rotation.py`` rotates whole heads). ``scale`` is fp8's scale of
    the layer and side, ``exponent`` the byte that an ``e`` format keeps per record and head;
    formats that have none ignore it. ``clip_search`` spends time on a smaller error, in nvfp4 and
    the turbo formats. FormatError for another count or an exponent that no row sets, ConfigError
    for a scale that cannot scale.
    """
    if len(values) != fmt.group:
        raise FormatError(f"{fmt.name} packs groups of {fmt.group} values, got {len(values)}")
    group = [to_f32(value) for value in values]
    match fmt.family:
        case Family.GGML:
            return _pack_ggml(fmt, group)
        case Family.NVFP4 | Family.TURBO:
            return pack_sixteen(fmt, group, _exponent(fmt, exponent), clip_search=clip_search)
        case Family.SCALED:
            return bytes([e4m3_code(to_f32(group[0] * fp8_reciprocal(scale)))]), b""
        case Family.PLAIN:
            return _pack_plain(fmt, group[0]), b""


def unpack_group(
    fmt: Format, codes: bytes, scales: bytes, *, scale: float = 1.0, exponent: int = EXPONENT_BIAS
) -> list[float]:
    """The ``fmt.group`` elements of a group, each an f32 number, rotated if the format is.

    FormatError for other lengths, or an exponent that no row sets.
    """
    if (len(codes), len(scales)) != (fmt.code_bytes, fmt.scale_bytes):
        raise FormatError(
            f"a group of {fmt.name} is {fmt.code_bytes} + {fmt.scale_bytes} bytes,"
            f" got {len(codes)} + {len(scales)}"
        )
    match fmt.family:
        case Family.GGML:
            return _unpack_ggml(fmt, codes, scales)
        case Family.NVFP4 | Family.TURBO:
            return unpack_sixteen(fmt, codes, scales, _exponent(fmt, exponent))
        case Family.SCALED:
            fp8_reciprocal(scale)
            return [to_f32(e4m3_value(codes[0]) * to_f32(scale))]
        case Family.PLAIN:
            wide = b"\0\0" + codes if fmt.name == "bf16" else codes
            return [struct.unpack("<e" if fmt.name == "f16" else "<f", wide)[0]]


def to_ggml_block(fmt: Format, codes: bytes, scales: bytes) -> bytes:
    """The ggml block of a group of a ggml format; FormatError for another format."""
    _check_ggml(fmt)
    return scales + codes[_HALF:] + codes[:_HALF] if _has_fifth_bit(fmt) else scales + codes


def from_ggml_block(fmt: Format, block: bytes) -> tuple[bytes, bytes]:
    """(codes, scales) of a ggml block, the inverse of ``to_ggml_block``."""
    _check_ggml(fmt)
    if len(block) != fmt.group_bytes:
        raise FormatError(f"a block of {fmt.name} is {fmt.group_bytes} bytes, got {len(block)}")
    scales, codes = block[: fmt.scale_bytes], block[fmt.scale_bytes :]
    return (codes[4:] + codes[:4] if _has_fifth_bit(fmt) else codes), scales


def fp8_reciprocal(scale: float) -> float:
    """``1 / scale`` in f32; ConfigError unless both are positive and finite."""
    rounded = to_f32(scale)
    inverse = to_f32(1 / rounded) if rounded > 0 else math.nan
    if not (0 < rounded < math.inf and 0 < inverse < math.inf):
        raise ConfigError(
            f"fp8 scale: {scale} is not positive and finite with a finite reciprocal",
            "take it from the checkpoint or calibrate it: the largest magnitude divided by 448",
        )
    return inverse


def _exponent(fmt: Format, exponent: int) -> int:
    if not fmt.exponent:
        return EXPONENT_BIAS
    check_exponent(exponent)
    return exponent


def _pack_plain(fmt: Format, value: float) -> bytes:
    if fmt.name == "bf16":
        return struct.pack("<H", bf16_bits(value))
    return struct.pack("<f", value) if fmt.name == "f32" else _f16_bytes(value)


def _has_fifth_bit(fmt: Format) -> bool:
    return fmt.name in ("q5_0", "q5_1")


def _has_minimum(fmt: Format) -> bool:
    return fmt.name in ("q4_1", "q5_1")


def _check_ggml(fmt: Format) -> None:
    if fmt.family is not Family.GGML:
        raise FormatError(f"{fmt.name} is no ggml block format")


def _f16_bytes(value: float) -> bytes:
    if math.isnan(value):
        return struct.pack("<H", _F16_NAN)
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def _inverse(d: float) -> float:
    return to_f32(1 / d) if d else 0.0


def _truncate(value: float, highest: int) -> int:
    return min(max(int(value), 0), highest) if math.isfinite(value) else 0


def _pack_ggml(fmt: Format, group: list[float]) -> tuple[bytes, bytes]:
    if fmt.name == "q8_0":
        largest = 0.0
        for x in group:
            # False where ``largest`` is a NaN, so that the search begins again behind it.
            largest = largest if largest > abs(x) else abs(x)
        d = to_f32(largest / 127)
        inverse = _inverse(d)
        return bytes(_signed_byte(to_f32(x * inverse)) for x in group), _f16_bytes(d)
    highest = 31 if _has_fifth_bit(fmt) else 15
    if _has_minimum(fmt):
        low, high = _F32_MAX, -_F32_MAX
        for x in group:
            low = x if x < low else low
            high = x if x > high else high
        d = to_f32(to_f32(high - low) / highest)
        scales = _f16_bytes(d) + _f16_bytes(low)
        origin, offset = low, 0.5
    else:
        zero_code = (highest + 1) // 2
        extreme = 0.0
        for x in group:
            extreme = x if abs(x) > abs(extreme) else extreme
        d = to_f32(extreme / -zero_code)
        scales = _f16_bytes(d)
        origin, offset = 0.0, zero_code + 0.5
    inverse = _inverse(d)
    q = [_truncate(to_f32(to_f32(to_f32(x - origin) * inverse) + offset), highest) for x in group]
    codes = bytes(q[j] & 15 | (q[_HALF + j] & 15) << 4 for j in range(_HALF))
    if _has_fifth_bit(fmt):
        codes += struct.pack("<I", sum((code >> 4) << j for j, code in enumerate(q)))
    return codes, scales


def _signed_byte(value: float) -> int:
    """The low byte of the nearest whole number, halves away from zero; 0 from 2^31 on."""
    if not abs(value) < 2**31:
        return 0
    return int(math.copysign(math.floor(abs(value) + 0.5), value)) & 0xFF


def _unpack_ggml(fmt: Format, codes: bytes, scales: bytes) -> list[float]:
    d: float = struct.unpack("<e", scales[:2])[0]
    # A code times an f16 number is exact in f32: a kernel may fuse it with the sum that follows.
    if fmt.name == "q8_0":
        return [q * d for q in struct.unpack("<32b", codes)]
    q = [byte & 15 for byte in codes[:_HALF]] + [byte >> 4 for byte in codes[:_HALF]]
    if _has_fifth_bit(fmt):
        fifth: int = struct.unpack("<I", codes[_HALF:])[0]
        q = [code | (fifth >> j & 1) << 4 for j, code in enumerate(q)]
    if _has_minimum(fmt):
        m: float = struct.unpack("<e", scales[2:])[0]
        return [to_f32(code * d + m) for code in q]
    zero_code = 16 if _has_fifth_bit(fmt) else 8
    return [(code - zero_code) * d for code in q]
