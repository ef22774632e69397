"""Groups of sixteen as tensors: byte for byte as ``memkv_pp/packing_groups.py`` packs one.

Shapes: ``G`` groups of a row, ``C`` bytes of a group's codes, ``S`` of its scale.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from memkv_pp.cache.small_floats import bytes_of, divide, e4m3_codes, e4m3_values, view_as
from memkv_pp.formats import Family, Format
from memkv_pp.packing_groups import (
    CLIP_FACTORS,
    E2M1_BOUNDARIES,
    E2M1_MAX,
    EXPONENT_BIAS,
    FIRST_ROW_EXPONENT,
    GROUP,
    LEAST_TURBO,
    TURBO_BOUNDARIES,
    code_bits,
    levels_of,
)
from memkv_pp.small_floats import BF16_NAN, E4M3_MAX, E4M3_NAN

# Codes are packed word by word, little-endian: bits of a code -> codes and bytes of a word.
_WORDS = {2: (4, 1), 3: (8, 3), 4: (2, 1)}


def exponent_bytes(rows: Tensor) -> Tensor:
    """uint8 [...]: ``exponent_byte`` of every row of ``rows`` [..., head_size]."""
    largest = rows.to(torch.float32).abs().amax(-1)
    fields = largest.view(torch.int32) >> 23
    chosen = (fields - FIRST_ROW_EXPONENT).clamp_min_(1)
    plain = (largest == 0) | ~largest.isfinite()
    return chosen.masked_fill_(plain, EXPONENT_BIAS).to(torch.uint8)


def encode_groups(
    fmt: Format, groups: Tensor, exponents: Tensor | None, clip_search: bool
) -> tuple[Tensor, Tensor]:
    """codes [..., G, C] and scales [..., G, S] of f32 ``groups`` [..., G, 16].

    ``exponents`` [...] are the bytes of the rows' records, or None where they have none.
    """
    if exponents is not None:
        # 254 - b is the exponent field of 2^(127 - b): a product where the truth has a quotient.
        groups = groups * _powers(2 * EXPONENT_BIAS - exponents.to(torch.int32))[..., None, None]
    groups = groups.contiguous()
    amax = groups.abs().amax(-1, keepdim=True)
    void = ~amax.isfinite()
    if fmt.scale_bytes == 2:
        stored = divide(amax, E4M3_MAX).clamp_min_(LEAST_TURBO).to(torch.bfloat16)
        codes = e4m3_codes(groups / stored.to(torch.float32))
        bits = stored.view(torch.int16).masked_fill_(void, BF16_NAN)
        return codes.masked_fill_(void, 0), bytes_of(bits)
    if clip_search:
        scales, codes = _search(fmt, groups, amax)
    elif fmt.family is Family.NVFP4:
        scales, codes = _choose_e2m1(fmt, groups, amax, None)
    else:
        scales, codes = _choose_levels(fmt, groups, amax, None)
    return (
        _pack(fmt, codes.masked_fill_(void, 0)),
        scales.masked_fill_(void, E4M3_NAN),
    )


def decode_groups(fmt: Format, codes: Tensor, scales: Tensor, exponents: Tensor | None) -> Tensor:
    """f32 [..., G, 16] from codes [..., G * C], scales [..., G * S] and, of an ``e`` format, bytes."""
    if fmt.scale_bytes == 2:
        scale = view_as(scales, torch.bfloat16).to(torch.float32)
        levels = e4m3_values(codes).unflatten(-1, (-1, GROUP))
    else:
        scale = e4m3_values(scales)
        levels = _unpack(fmt, codes)
    if exponents is not None:
        scale = scale * _powers(exponents)[..., None]
    return levels.mul_(scale[..., None])


class _Choice(NamedTuple):
    """Bytes of the scales [..., G, 1] and codes int32 [..., G, 16]."""

    scales: Tensor
    codes: Tensor


def _powers(exponents: Tensor) -> Tensor:
    """The f32 numbers whose exponent fields are ``exponents``."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _search(fmt: Format, groups: Tensor, amax: Tensor) -> _Choice:
    choose = _choose_e2m1 if fmt.family is Family.NVFP4 else _choose_levels
    best = choose(fmt, groups, amax, None)
    least = _squared_error(fmt, groups, best)
    for clip in CLIP_FACTORS:
        tried = choose(fmt, groups, amax, clip)
        error = _squared_error(fmt, groups, tried)
        better = error < least
        least = torch.where(better, error, least)
        best = _Choice(
            torch.where(better, tried.scales, best.scales),
            torch.where(better, tried.codes, best.codes),
        )
    return best


def _squared_error(fmt: Format, groups: Tensor, choice: _Choice) -> Tensor:
    levels = _at(_constant(levels_of(fmt), groups.device), choice.codes)
    misses = groups - levels.mul_(e4m3_values(choice.scales))
    return _sum_by_halves(misses * misses)


def _choose_e2m1(fmt: Format, groups: Tensor, amax: Tensor, clip: float | None) -> _Choice:
    scales = e4m3_codes(divide(amax * (clip or 1.0), E2M1_MAX))
    scale = e4m3_values(scales)
    codes = _count(E2M1_BOUNDARIES, (groups / scale).abs_())
    codes.add_(groups.signbit(), alpha=8)
    return _Choice(scales, codes.masked_fill_(scale == 0, 0))


def _choose_levels(fmt: Format, groups: Tensor, amax: Tensor, clip: float | None) -> _Choice:
    name = fmt.name.removesuffix("e")
    levels = _constant(levels_of(fmt), groups.device)
    factor = levels[-1] / (amax * (clip or 1.0))
    factor = torch.where(amax > LEAST_TURBO, factor, 1.0)
    codes = _count(TURBO_BOUNDARIES[name], groups * factor)
    chosen = _at(levels, codes)
    level_squares = _sum_by_halves(chosen * chosen)
    if clip is None:
        scale = _sum_by_halves(groups * groups).sqrt_() / level_squares.sqrt()
    else:
        scale = _sum_by_halves(groups * chosen) / level_squares
    return _Choice(e4m3_codes(scale), codes)


def _count(boundaries: tuple[float, ...], values: Tensor) -> Tensor:
    """int32: how many boundaries are at most each value."""
    return torch.bucketize(values, _constant(boundaries, values.device), out_int32=True, right=True)


def _at(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten()).view_as(codes)


def _sum_by_halves(values: Tensor) -> Tensor:
    """The sum of the last dimension, kept, in the order that ``packing_groups.py`` gives."""
    while values.shape[-1] > 1:
        low, high = values.chunk(2, -1)
        values = low + high
    return values


def _pack(fmt: Format, codes: Tensor) -> Tensor:
    """uint8 [..., G, C] of int32 codes [..., G, 16]."""
    bits = code_bits(fmt)
    word_codes, word_bytes = _WORDS[bits]
    shifts = torch.arange(0, word_codes * bits, bits, dtype=torch.int32, device=codes.device)
    words = (codes.unflatten(-1, (-1, word_codes)) << shifts).sum(-1, dtype=torch.int32)
    return words[..., None].view(torch.uint8)[..., :word_bytes].flatten(-2)


def _unpack(fmt: Format, codes: Tensor) -> Tensor:
    """The levels f32 [..., G, 16] of packed codes [..., G * C]: a look-up per byte or 12 bits."""
    index = codes.to(torch.int32)
    if code_bits(fmt) == 3:
        low, middle, high = index.unflatten(-1, (-1, 3)).unbind(-1)
        index = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), -1).flatten(-2)
    levels = torch.nn.functional.embedding(index, _unpack_table(fmt, codes.device))
    return levels.flatten(-2).unflatten(-1, (-1, GROUP))


@cache
def _unpack_table(fmt: Format, device: torch.device) -> Tensor:
    """f32 [indices, codes of an index]: the levels of a byte, or of 12 bits of three-bit codes."""
    bits = code_bits(fmt)
    width = math.lcm(bits, 4) if bits == 3 else 8
    levels, per_index = levels_of(fmt), width // bits
    rows = [
        [levels[index >> bits * i & (1 << bits) - 1] for i in range(per_index)]
        for index in range(1 << width)
    ]
    return torch.tensor(rows, dtype=torch.float32, device=device)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
