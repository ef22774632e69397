"""Numbers as the machine keeps them: f32, bf16 and E4M3, rounded to nearest, ties to even.

bf16 overflows to infinity; E4M3 has no infinity and saturates at 448. Every NaN becomes the one
positive quiet NaN of its type: 0x7FC0 and 0x7F.
"""

import math
import struct

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
BF16_NAN = 0x7FC0


def to_f32(value: float) -> float:
    """``value`` rounded to the nearest f32, ties to even; every NaN becomes the positive one."""
    if math.isnan(value):
        return math.nan
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16_bits(value: float) -> int:
    """The sixteen bits of an f32 number as bf16."""
    if math.isnan(value):
        return BF16_NAN
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits: int) -> float:
    """The number that sixteen bits of bf16 stand for."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def e4m3_code(value: float) -> int:
    """The E4M3 byte nearest to ``value``, ties to even, at most 448 in size.

    >>> [hex(e4m3_code(x)) for x in (2**-9, 1.0, 1.875, 2.0, 256.0, 1e9)]
    ['0x1', '0x38', '0x3f', '0x40', '0x78', '0x7e']
    """
    if math.isnan(value):
        return E4M3_NAN
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    size = min(abs(value), E4M3_MAX)
    if size < 2**-6:
        return sign | round(size * 2**9)
    exponent = math.frexp(size)[1] - 1
    # A mantissa that rounds up to 16 carries into the exponent, as it should.
    return sign | ((exponent + 7 << 3) + round(math.ldexp(size, 3 - exponent)) - 8)


def e4m3_value(code: int) -> float:
    """The number an E4M3 byte stands for: bias 7, three mantissa bits, 0x7F and 0xFF are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == E4M3_NAN:
        return math.nan
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if code & 0x80 else size
