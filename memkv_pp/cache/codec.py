"""Packs and unpacks rows of tensors, byte for byte as ``packing.py`` does group by group.

A row is the last dimension: ``head_size`` elements of one head of one token. Its codes are its
groups' codes in order and its scales its groups' scales in order::

    rows [..., head_size]  <->  codes  uint8 [..., head_size / group * code_bytes]
                                scales uint8 [..., head_size / group * scale_bytes]

Works on any device. Only tensor operations that round each f32 result once are used; wrapping
these functions in ``torch.compile`` may fuse a product and a sum and change bytes. Shapes below:
``G`` groups of a row.
"""

import torch
from torch import Tensor

from memkv_pp.errors import FormatError
from memkv_pp.formats import Family, Format
from memkv_pp.packing import BF16_NAN, E4M3_MAX, E4M3_NAN, check_packed, fp8_reciprocal, to_f32

_PLAIN_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CANONICAL_NAN = {torch.float16: 0x7E00, torch.bfloat16: BF16_NAN}
_F16_NAN = 0x7E00
_F16_DEFAULT_NAN = 0xFE00 - 0x10000

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


def encode(fmt: Format, rows: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ``rows`` [..., head_size] in f32, bf16 or f16.

    ``scale`` is fp8's; other formats ignore it. Formats without scales return [..., 0]. Rows that
    are already in a plain format's own dtype come back as a view of the same memory, NaN and all.
    FormatError for a format that is not packed yet or cannot hold the head size.
    """
    check_packed(fmt)
    head_size = rows.shape[-1]
    fmt.check_head_size(head_size)
    if fmt.family is Family.GGML:
        groups = rows.to(torch.float32).reshape(*rows.shape[:-1], head_size // fmt.group, fmt.group)
        codes, scales = _encode_q8(groups) if fmt.name == "q8_0" else _encode_q4_q5(fmt, groups)
        return codes.flatten(-2), scales.flatten(-2)
    codes = _encode_fp8(rows, scale) if fmt.name == "fp8" else _encode_plain(fmt, rows)
    return codes, codes.new_empty((*rows.shape[:-1], 0))


def decode(
    fmt: Format,
    codes: Tensor,
    scales: Tensor,
    head_size: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """Rows [..., head_size] in ``dtype``: the f32 elements of ``unpack_group``, rounded once.

    ``codes`` [..., code_row_bytes] and ``scales`` [..., scale_row_bytes] are uint8 and may be
    strided slices of an arena. A plain format read in its own dtype is a view of ``codes``.
    FormatError for a format that is not packed yet, a head size it cannot hold, or other lengths.
    """
    check_packed(fmt)
    fmt.check_head_size(head_size)
    expected = fmt.code_row_bytes(head_size), fmt.scale_row_bytes(head_size)
    if (codes.shape[-1], scales.shape[-1]) != expected:
        raise FormatError(
            f"a row of {head_size} elements of {fmt.name} is {expected[0]} + {expected[1]} bytes,"
            f" got {codes.shape[-1]} + {scales.shape[-1]}"
        )
    if fmt.family is not Family.GGML:
        if fmt.name == "fp8":
            return _decode_fp8(codes, scale).to(dtype)
        return _view(codes, _PLAIN_DTYPES[fmt.name]).to(dtype)
    halves = _view(scales, torch.float16).to(torch.float32)
    halves = halves.unflatten(-1, (head_size // fmt.group, fmt.scale_bytes // 2))
    d = halves[..., :1]
    if fmt.name == "q8_0":
        q = codes.view(torch.int8).unflatten(-1, (head_size // 32, 32))
    else:
        q = _unpack_q4_q5(fmt, codes, head_size // fmt.group)
    values = q.to(torch.float32).mul_(d)
    if fmt.scale_bytes == 4:
        values.add_(halves[..., 1:])
    return values.flatten(-2).to(dtype)


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """``data`` (bytes) as ``dtype`` along its last dimension, copied only where it is unaligned."""
    size = dtype.itemsize
    aligned = data.stride(-1) == 1 and not any(
        step % size for step in (data.storage_offset(), *data.stride()[:-1])
    )
    return (data if aligned else data.clone(memory_format=torch.contiguous_format)).view(dtype)


def _encode_plain(fmt: Format, rows: Tensor) -> Tensor:
    dtype = _PLAIN_DTYPES[fmt.name]
    if rows.dtype is dtype:
        return rows.contiguous().view(torch.uint8)
    values = rows.to(torch.float32).to(dtype).contiguous()
    nan = _CANONICAL_NAN.get(dtype)
    if nan is not None:
        values.view(torch.int16).masked_fill_(rows.isnan(), nan)
    return values.view(torch.uint8)


def _encode_fp8(rows: Tensor, scale: float) -> Tensor:
    values = (rows.to(torch.float32) * fp8_reciprocal(scale)).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), E4M3_NAN).contiguous()


def _decode_fp8(codes: Tensor, scale: float) -> Tensor:
    """f32 elements, by way of f16: the same fields with an exponent bias of 15 instead of 7."""
    fp8_reciprocal(scale)
    wide = codes.view(torch.int8).to(torch.int16)
    nan = wide.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    halves = wide.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000).bitwise_or_(nan)
    return halves.view(torch.float16).to(torch.float32).mul_(2.0**8).mul_(to_f32(scale))


def _divide(values: Tensor, divisor: float) -> Tensor:
    """``values / divisor``; a divisor on the CPU would become a rounded reciprocal on a GPU."""
    return values / values.new_full((), divisor)


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
    d = _divide(groups.abs().amax(-1, keepdim=True), 127.0)
    scaled = _finite(groups * _inverse(d))
    # `round` takes halves to even: adding a half and cutting off takes them away from zero.
    q = (scaled.abs() + 0.5).floor_().copysign_(scaled)
    return q.to(torch.int8).view(torch.uint8), _half_bits(d).view(torch.uint8)


def _encode_q4_q5(fmt: Format, groups: Tensor) -> tuple[Tensor, Tensor]:
    """codes [..., G, code_bytes] and scales [..., G, scale_bytes]."""
    fifth_bit = fmt.code_bytes == 20
    highest = 31 if fifth_bit else 15
    if fmt.scale_bytes == 4:
        # `min` along a dimension keeps the first of equals, so a zero keeps the first zero's sign.
        low = groups.min(-1, keepdim=True).values
        d = _divide((groups.amax(-1, keepdim=True) - low).abs_(), float(highest))
        born = d.isnan() & ~low.isnan()
        d_bits = _half_bits(d).masked_fill_(born, _F16_DEFAULT_NAN)
        scales = torch.cat([d_bits, _half_bits(low)], -1).view(torch.uint8)
        values = (groups - low).mul_(_inverse(d)).add_(0.5)
    else:
        zero_code = (highest + 1) // 2
        largest = groups.gather(-1, groups.abs().max(-1, keepdim=True).indices)
        d = _divide(largest, float(-zero_code))
        scales = _half_bits(d).view(torch.uint8)
        values = (groups * _inverse(d)).add_(zero_code + 0.5)
    q = _finite(values).clamp_(0, highest).to(torch.uint8)
    codes = q[..., :16].bitwise_and(15).bitwise_or_(q[..., 16:] << 4)
    if fifth_bit:
        eights = (q >> 4).view(torch.int64)
        fifth = (eights * _GATHER >> 56).to(torch.uint8)
        codes = torch.cat([codes, fifth], -1)
    return codes, scales


def _unpack_q4_q5(fmt: Format, codes: Tensor, num_groups: int) -> Tensor:
    """Signed whole numbers int8 [..., G, 32], the zero code of q4_0 and q5_0 taken off."""
    fifth_bit = fmt.code_bytes == 20
    words = _view(codes, torch.int32).unflatten(-1, (num_groups, fmt.code_bytes // 4))
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
