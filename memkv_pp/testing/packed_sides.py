"""Packed rows for tests of kernels: a layer's sides in a poisoned arena, and oracles over them.

Shape legend: T rows, H KV heads, G query heads per KV head, D head size, L cached rows, S sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.cuda_launch import PackedSide
from memkv_pp.cache.packing_groups import exponent_bytes
from memkv_pp.cache.rotation import rotate
from memkv_pp.errors import InternalError
from memkv_pp.formats import Pair, parse_format
from memkv_pp.geometry import LayerGeometry, LayerKind
from memkv_pp.records import Part, Side, record_layout
from memkv_pp.units import ceil_div

POISON = 0xFF
FP8_SCALE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayer:
    """K and V of one layer; ``arena`` has a record of poison before and after its records."""

    arena: Tensor
    record_bytes: int
    key: PackedSide
    value: PackedSide


def packed_layer(
    key: str,
    value: str,
    *,
    heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    record_rows: int = 16,
    num_records: int = 8,
    device: str = "cpu",
) -> PackedLayer:
    """A layer of formats ``key`` and ``value`` in records of ``record_rows`` rows, all poison."""
    layer = LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=heads,
        kv_heads=heads,
        key_head_size=key_size,
        value_head_size=value_size,
    )
    pair = Pair(parse_format(key), parse_format(value))
    layout = record_layout([(0, layer, pair)], record_rows)
    if layout is None or layout.layers[0].v is None:
        raise InternalError("a full layer has records with two sides")
    size = layout.record_bytes
    arena = torch.full(((num_records + 2) * size,), POISON, dtype=torch.uint8, device=device)
    return PackedLayer(
        arena=arena,
        record_bytes=size,
        key=side_at(arena, layout.layers[0].k, size, num_records, size),
        value=side_at(arena, layout.layers[0].v, size, num_records, size),
    )


def side_at(
    arena: Tensor, side: Side, record_bytes: int, num_records: int, base: int
) -> PackedSide:
    """``side`` in records ``record_bytes`` apart, the first of which begins at byte ``base``."""

    def view(part: Part) -> Tensor:
        shape = (num_records, part.heads, part.rows, part.row_bytes)
        strides = (record_bytes, part.rows * part.row_bytes, part.row_bytes, 1)
        return arena.as_strided(shape, strides, base + part.offset)

    return PackedSide(
        format=side.format,
        head_size=side.head_size,
        codes=view(side.codes),
        scales=view(side.scales),
        exponents=view(side.exponents),
        scale=FP8_SCALE if side.format.name == "fp8" else 1.0,
    )


def put(side: PackedSide, values_THD: Tensor, records: Sequence[int], rows: Sequence[int]) -> None:
    """Write rows by the torch codec, rotated if need be; a negative record writes nothing.

    Row 0 of a record comes before its other rows, or with them.
    """
    values_THD = values_THD.cpu()
    if side.format.rotated:
        values_THD = rotate(values_THD)
    exponents = None
    if side.format.exponent:
        for record, row, byte in zip(records, rows, exponent_bytes(values_THD), strict=True):
            if record >= 0 and row == 0:
                side.exponents[record, :, 0, 0] = byte.to(side.codes.device)
        at = torch.tensor(records, dtype=torch.int64, device=side.codes.device).clamp_min(0)
        exponents = side.exponents[at, :, 0, 0].cpu()
    codes, scales = encode(side.format, values_THD, side.scale, exponents=exponents)
    for t, (record, row) in enumerate(zip(records, rows, strict=True)):
        if record >= 0:
            side.codes[record, :, row] = codes[t].to(side.codes.device)
            side.scales[record, :, row] = scales[t].to(side.codes.device)


def fill(side: PackedSide, records: Sequence[int], length: int, seed: int) -> None:
    """Write ``length`` normal rows into ``records``, in order, and leave what follows them."""
    _, heads, block, _ = side.codes.shape
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, heads, side.head_size, generator=generator)
    put(
        side,
        values,
        [records[t // block] for t in range(length)],
        [t % block for t in range(length)],
    )


def rows_of(side: PackedSide, records: Sequence[int], length: int) -> Tensor:
    """The first ``length`` rows of ``records`` by the torch codec, as stored: f32 [H, L, D]."""
    at = torch.tensor(records, dtype=torch.int64, device=side.codes.device)
    codes, scales, exponents = (
        part[at].cpu() for part in (side.codes, side.scales, side.exponents)
    )
    values = decode(
        side.format,
        codes,
        scales,
        side.head_size,
        torch.float32,
        side.scale,
        exponents=exponents.squeeze(-1) if side.format.exponent else None,
    )
    return values.transpose(0, 1).flatten(1, 2)[:, :length]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequences:
    """Sequences over the records of a layer: ``tables`` of each, and what ``attend`` is given."""

    tables: tuple[tuple[int, ...], ...]
    records: Tensor
    segments: Tensor
    num_rows: int
    max_rows: int
    max_length: int


def packed_sequences(
    layer: PackedLayer, lengths: Sequence[int], num_rows: Sequence[int]
) -> PackedSequences:
    """Sequences of ``lengths`` rows, of which the last ``num_rows`` are new, filled on both sides.

    Their records run backwards through the arena.
    """
    block, device = layer.key.codes.shape[2], layer.arena.device
    counts = [ceil_div(length, block) for length in lengths]
    free = iter(range(sum(counts) - 1, -1, -1))
    tables = tuple(tuple(next(free) for _ in range(count)) for count in counts)
    segments: list[tuple[int, int, int, int]] = []
    for i, (length, new) in enumerate(zip(lengths, num_rows, strict=True)):
        segments.append((sum(num_rows[:i]), new, length, sum(counts[:i])))
        fill(layer.key, tables[i], length, seed=2 * i)
        fill(layer.value, tables[i], length, seed=2 * i + 1)
    held = [record for table in tables for record in table]
    return PackedSequences(
        tables=tables,
        records=torch.tensor(held, dtype=torch.int64, device=device),
        segments=torch.tensor(segments, dtype=torch.int64, device=device).view(-1, 4),
        num_rows=sum(num_rows),
        max_rows=max(num_rows, default=0),
        max_length=max(lengths, default=0),
    )


def attention(
    query_THD: Tensor,
    layer: PackedLayer,
    sequences: PackedSequences,
    scale: float,
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks_Q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention in f64: [T, H * G, D of V] and the log-sum-exp of keys' scores [T, H * G].

    The knobs are those of ``CudaKernels.attend``. A row that sees no key is 0 and minus infinity.
    """
    num_rows, query_heads, _ = query_THD.shape
    group = query_heads // layer.key.codes.shape[1]
    out = torch.zeros(num_rows, query_heads, layer.value.head_size, dtype=torch.float64)
    lse = torch.full((num_rows, query_heads), -math.inf, dtype=torch.float64)
    sinks = torch.full((query_heads,), -math.inf, dtype=torch.float64)
    if sinks_Q is not None:
        sinks = sinks_Q.cpu().double()
    segments: list[list[int]] = sequences.segments.tolist()
    for table, (first, rows, length, _) in zip(sequences.tables, segments, strict=True):
        if not length:
            continue
        keys = rows_of(layer.key, table, length).double().repeat_interleave(group, 0)
        values = rows_of(layer.value, table, length).double().repeat_interleave(group, 0)
        for t in range(rows):
            end = length - rows + t + 1
            seen = slice(max(end - window, 0) if window else 0, end)
            query = query_THD[first + t].cpu().double()
            scores = torch.einsum("hd,hld->hl", query, keys[:, seen]) * scale
            if cap:
                scores = torch.tanh(scores / cap) * cap
            lse[first + t] = scores.logsumexp(-1)
            weights = (scores - torch.logaddexp(lse[first + t], sinks)[:, None]).exp()
            out[first + t] = torch.einsum("hl,hld->hd", weights, values[:, seen])
    return out, lse
