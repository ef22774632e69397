"""Packs and unpacks rows of tensors, byte for byte as ``packing.py`` does group by group.

A row is the last dimension: ``head_size`` elements of one head of one token. Its codes are its
groups' codes in order and its scales its groups' scales in order::

    rows [..., head_size]  <->  codes  uint8 [..., head_size / group * code_bytes]
                                scales uint8 [..., head_size / group * scale_bytes]

nvfp4 and the turbo formats are in ``packing_groups.py``. Works on any device. Only tensor
operations that round each f32 result once are used; wrapping these functions in ``torch.compile``
may fuse a product and a sum and change bytes. Shapes below: ``G`` groups of a row.
"""

import math

import torch
from torch import Tensor

from memkv_pp.cache.packing_groups import decode_groups, encode_groups
from memkv_pp.cache.small_floats import bytes_of, divide, e4m3_codes, e4m3_values, view_as
from memkv_pp.errors import FormatError
from memkv_pp.formats import Family, Format
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.small_floats import BF16_NAN, to_f32

_PLAIN_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CANONICAL_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, BF16_NAN),
}
_F16_NAN = 0x7E00
_F32_MAX = torch.finfo(torch.float32).max

# Low and high nibble of four bytes at once.
_NIBBLES = 0x0F0F0F0F
# Byte k of the product of a byte with _EVERY_BYTE holds it; _BIT_K keeps bit k of byte k. Adding
# _CARRY moves any such bit to bit 7 of its byte.
_EVERY_BYTE = 0x0101010101010101
_BIT_K = 0x8040201008040201 - (1 << 64)
_CARRY = 0x7F7F7F7F7F7F7F7F
_FIFTH_BITS = 0x1010101010101010
# A product with this gathers bit 0 of byte k into bit 56 + k.
_GATHER = 0x0102040810204080


def encode(
    fmt: Format,
    rows: Tensor,
    scale: float = 1.0,
    *,
    exponents: Tensor | None = None,
    clip_search: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ``rows`` [..., head_size] in f32, bf16 or f16.

    Rows of a rotated format come rotated. ``scale`` is fp8's, ``exponents`` uint8 [...] (or
    anything that broadcasts to it) the bytes of an ``e`` format, none meaning 127; other formats
    ignore them, as they do ``clip_search``. Formats without scales return [..., 0]. Rows that are
    already in a plain format's own dtype come back as a view of the same memory, NaN and all.
    FormatError for a head size that the format cannot hold.
    """
    head_size = rows.shape[-1]
    fmt.check_head_size(head_size)
    match fmt.family:
        case Family.GGML:
            groups = _groups(fmt, rows)
            codes, scales = _encode_q8(groups) if fmt.name == "q8_0" else _encode_q4_q5(fmt, groups)
            return codes.flatten(-2), scales.flatten(-2)
        case Family.NVFP4 | Family.TURBO:
            exponents = exponents if fmt.exponent else None
            codes, scales = encode_groups(fmt, _groups(fmt, rows), exponents, clip_search)
            return codes.flatten(-2), scales.flatten(-2)
        case Family.SCALED:
            codes = _encode_fp8(rows, scale)
        case Family.PLAIN:
            codes = _encode_plain(fmt, rows)
    return codes, codes.new_empty((*rows.shape[:-1], 0))


def decode(
    fmt: Format,
    codes: Tensor,
    scales: Tensor,
    head_size: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    *,
    exponents: Tensor | None = None,
) -> Tensor:
    """Rows [..., head_size] in ``dtype``: the f32 elements of ``unpack_group``, rounded once.

    ``codes`` [..., code_row_bytes] and ``scales`` [..., scale_row_bytes] are uint8 and may be
    strided slices of an arena; ``exponents`` are as in ``encode``. Rows of a rotated format come
    back rotated. A plain format read in its own dtype is a view of ``codes``. FormatError for a
    head size that the format cannot hold, or other lengths.
    """
    fmt.check_head_size(head_size)
    expected = fmt.code_row_bytes(head_size), fmt.scale_row_bytes(head_size)
    if (codes.shape[-1], scales.shape[-1]) != expected:
        raise FormatError(
            f"a row of {head_size} elements of {fmt.name} is {expected[0]} + {expected[1]} bytes,"
            f" got {codes.shape[-1]} + {scales.shape[-1]}"
        )
    match fmt.family:
        case Family.GGML:
            values = _decode_ggml(fmt, codes, scales, head_size).flatten(-2)
        case Family.NVFP4 | Family.TURBO:
            exponents = exponents if fmt.exponent else None
            values = decode_groups(fmt, codes, scales, exponents).flatten(-2)
        case Family.SCALED:
            values = _decode_fp8(codes, scale)
        case Family.PLAIN:
            values = view_as(codes, _PLAIN_DTYPES[fmt.name])
    return values.to(dtype)


def _groups(fmt: Format, rows: Tensor) -> Tensor:
    """f32 [..., G, group], contiguous."""
    values = rows.to(torch.float32).contiguous()
    return values.unflatten(-1, (rows.shape[-1] // fmt.group, fmt.group))


def _encode_plain(fmt: Format, rows: Tensor) -> Tensor:
    dtype = _PLAIN_DTYPES[fmt.name]
    if rows.dtype is dtype:
        return bytes_of(rows)
    values = rows.to(torch.float32).to(dtype).contiguous()
    bits, nan = _CANONICAL_NAN[dtype]
    values.view(bits).masked_fill_(rows.isnan(), nan)
    return bytes_of(values)


def _encode_fp8(rows: Tensor, scale: float) -> Tensor:
    return e4m3_codes(rows.to(torch.float32) * fp8_reciprocal(scale))


def _decode_fp8(codes: Tensor, scale: float) -> Tensor:
    fp8_reciprocal(scale)
    return e4m3_values(codes).mul_(to_f32(scale))


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, d.reciprocal())


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _half_bits(values: Tensor) -> Tensor:
    """f16 bits [...] as int16, NaN made the positive one."""
    bits = values.to(torch.float16).view(torch.int16)
    return bits.masked_fill_(values.isnan(), _F16_NAN)


def _encode_q8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """codes [..., G, 32] and scales [..., G, 2]."""
    largest = groups.abs().amax(-1, keepdim=True)
    nan = bool(largest.isnan().any())
    d = divide(_largest_behind_nan(groups) if nan else largest, 127.0)
    scaled = _finite(groups * _inverse(d))
    # `round` takes halves to even: adding the f32 below a half and cutting off takes them away from
    # zero, and 0.49999997 to zero.
    q = (scaled.abs() + (0.5 - 2**-25)).floor_().copysign_(scaled)
    if nan:
        # What does not fit keeps its low byte.
        q = q.masked_fill_(q.abs() >= 2.0**31, 0.0).to(torch.int32)
    return q.to(torch.int8).view(torch.uint8), bytes_of(_half_bits(d))


def _largest_behind_nan(groups: Tensor) -> Tensor:
    """The largest magnitude behind the last NaN, a NaN where that is the last element: [..., G, 1]."""
    sizes = groups.abs()
    up_to_nan = sizes.isnan().int().flip(-1).cummax(-1).values.flip(-1).bool()
    largest = sizes.masked_fill(up_to_nan, 0.0).amax(-1, keepdim=True)
    return torch.where(up_to_nan[..., -1:], torch.nan, largest)


def _encode_q4_q5(fmt: Format, groups: Tensor) -> tuple[Tensor, Tensor]:
    """codes [..., G, code_bytes] and scales [..., G, scale_bytes]."""
    fifth_bit = fmt.code_bytes == 20
    highest = 31 if fifth_bit else 15
    if fmt.scale_bytes == 4:
        # `min` along a dimension keeps the first of equals, so a zero keeps the first zero's sign.
        nan = groups.isnan()
        low = groups.masked_fill(nan, _F32_MAX).min(-1, keepdim=True).values.clamp_(max=_F32_MAX)
        high = groups.masked_fill(nan, -_F32_MAX).amax(-1, keepdim=True).clamp_(min=-_F32_MAX)
        # -0 - 0 is -0; adding 0 makes it 0.
        d = divide((high - low).add_(0.0), float(highest))
        scales = bytes_of(torch.cat([_half_bits(d), _half_bits(low)], -1))
        values = (groups - low).mul_(_inverse(d)).add_(0.5)
    else:
        zero_code = (highest + 1) // 2
        sizes = groups.abs().nan_to_num_(nan=0.0, posinf=math.inf)
        largest = groups.gather(-1, sizes.max(-1, keepdim=True).indices)
        largest = torch.where(largest.abs() > 0.0, largest, 0.0)
        d = divide(largest, float(-zero_code))
        scales = bytes_of(_half_bits(d))
        values = (groups * _inverse(d)).add_(zero_code + 0.5)
    q = _finite(values).clamp_(0, highest).to(torch.uint8)
    codes = q[..., :16].bitwise_and(15).bitwise_or_(q[..., 16:] << 4)
    if fifth_bit:
        eights = (q >> 4).view(torch.int64)
        fifth = (eights * _GATHER >> 56).to(torch.uint8)
        codes = torch.cat([codes, fifth], -1)
    return codes, scales


def _decode_ggml(fmt: Format, codes: Tensor, scales: Tensor, head_size: int) -> Tensor:
    """f32 [..., G, 32]."""
    halves = view_as(scales, torch.float16).to(torch.float32)
    halves = halves.unflatten(-1, (head_size // fmt.group, fmt.scale_bytes // 2))
    if fmt.name == "q8_0":
        q = codes.view(torch.int8).unflatten(-1, (head_size // 32, 32))
    else:
        q = _unpack_q4_q5(fmt, codes, head_size // fmt.group)
    values = q.to(torch.float32).mul_(halves[..., :1])
    return values.add_(halves[..., 1:]) if fmt.scale_bytes == 4 else values


def _unpack_q4_q5(fmt: Format, codes: Tensor, num_groups: int) -> Tensor:
    """Signed whole numbers int8 [..., G, 32], the zero code of q4_0 and q5_0 taken off."""
    fifth_bit = fmt.code_bytes == 20
    words = view_as(codes, torch.int32).unflatten(-1, (num_groups, fmt.code_bytes // 4))
    q = words.new_empty((*words.shape[:-1], 8))
    torch.bitwise_and(words[..., :4], _NIBBLES, out=q[..., :4])
    torch.bitwise_and(words[..., :4] >> 4, _NIBBLES, out=q[..., 4:])
    if fifth_bit:
        bits = words[..., 4:].contiguous().view(torch.uint8).to(torch.int64)
        bits.mul_(_EVERY_BYTE).bitwise_and_(_BIT_K).add_(_CARRY)
        bits.bitwise_right_shift_(3).bitwise_and_(_FIFTH_BITS)
        q.view(torch.int64).bitwise_or_(bits)
    signed = q.view(torch.int8)
    return signed if fmt.scale_bytes == 4 else signed.sub_(16 if fifth_bit else 8)
