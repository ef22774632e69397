"""Hands a sequence's cached rows to another engine, and takes them from one.

Rows travel as bytes in an order of ``row_orders.py``, one tensor per layer and side; nothing is
unpacked. Shape legend: L rows of the sequence, N records, B rows of a record, H KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from memkv_pp.cache.kv import StageCache
from memkv_pp.cache.ops import LayerView, SideView
from memkv_pp.errors import ConfigError
from memkv_pp.formats import Family, Format
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.row_orders import FIFTH_BIT_FORMATS, NIBBLE_BYTES, RowOrder, check_order
from memkv_pp.units import ceil_div
from memkv_pp.wire import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRows:
    """K or V of one layer of a sequence: uint8, and fp8's scale.

    ``data`` is [L, H * row bytes] in the ggml order, and [N, B * H * row bytes] in the sections
    order, where rows past the sequence's end are zeros. ``scale`` is 1.0 for other formats.
    """

    data: torch.Tensor
    scale: float = 1.0


def export_rows(
    cache: StageCache, sequence: int, order: RowOrder
) -> dict[int, tuple[SideRows, SideRows]]:
    """(K, V) of every layer of the stage, by absolute layer; the cache does not change.

    FormatError where a layer's format has no such order; ConfigError for a stage that keeps windows in
    rings, latent rows or states; InternalError for a closed sequence.
    """
    length, records, views = cache.length(sequence), cache.records(sequence), _views(cache)
    for view in views.values():
        for side in (view.k, view.v):
            check_order(side.format, order)
    return {
        layer: (
            _export_side(view.k, records, length, order),
            _export_side(view.v, records, length, order),
        )
        for layer, view in views.items()
    }


def import_rows(
    cache: StageCache,
    sequence: int,
    num_rows: int,
    rows: Mapping[int, tuple[SideRows, SideRows]],
    order: RowOrder,
) -> None:
    """Give an open, empty sequence ``num_rows`` rows: the inverse of ``export_rows``.

    Every layer of the stage must come, in the formats of this cache. An fp8 side that waits for its
    calibration takes the scale that comes; one that has a scale must be given the same. The caller
    sees to it that the ledger has promised these rows. Raises, with nothing taken: FormatError as
    ``export_rows``, ConfigError for layers, bytes or scales that do not fit, OutOfRecords,
    InternalError for a sequence that is closed or holds rows.
    """
    views = _views(cache)
    if set(rows) != set(views) or num_rows < 1:
        raise ConfigError(
            f"import of {num_rows} rows: layers {sorted(rows)} came, this stage holds"
            f" {sorted(views)}"
        )
    sides = [
        (f"layer {layer} {name}", side, given)
        for layer, view in views.items()
        for name, side, given in zip("KV", (view.k, view.v), rows[layer], strict=True)
    ]
    for name, side, given in sides:
        check_order(side.format, order)
        _check_given(name, side, given, num_rows, order)
    cache.extend([Rows(sequence, 0, num_rows, sample=False)])
    records = cache.records(sequence)
    for _, side, given in sides:
        if side.format.family is Family.SCALED:
            side.fp8.fix(given.scale)
        _import_side(side, records, num_rows, given.data, order)


def _views(cache: StageCache) -> Mapping[int, LayerView]:
    if not cache.layers.keeps_whole_rows:
        raise ConfigError(
            "rows of this stage cannot be handed over: it keeps windows in rings, latent rows or"
            " states, which have no order of rows that another engine shares",
            "for windows alone, --ring off keeps every row",
        )
    return cache.layers.views


def _export_side(side: SideView, records: torch.Tensor, length: int, order: RowOrder) -> SideRows:
    fmt = side.format
    # [N, H, B, bytes] -> [N * B, H, bytes]
    codes, scales = (
        part[records].transpose(1, 2).flatten(0, 1) for part in (side.codes, side.scales)
    )
    if order is RowOrder.GGML:
        data = _to_blocks(fmt, codes[:length], scales[:length]).flatten(1)
    else:
        codes[length:] = 0
        scales[length:] = 0
        block = side.codes.shape[2]
        data = torch.cat(
            [part.unflatten(0, (len(records), block)).flatten(1) for part in (codes, scales)], 1
        )
    return SideRows(data=data, scale=side.fp8.value)


def _import_side(
    side: SideView, records: torch.Tensor, num_rows: int, data: torch.Tensor, order: RowOrder
) -> None:
    _, heads, block, code_bytes = side.codes.shape
    scale_bytes = side.scales.shape[3]
    data = data.to(side.codes.device)
    if order is RowOrder.GGML:
        codes, scales = _from_blocks(side.format, data.unflatten(1, (heads, -1)))
    else:
        section = block * heads * code_bytes
        codes = data[:, :section].reshape(-1, heads, code_bytes)[:num_rows]
        scales = data[:, section:].reshape(len(data) * block, heads, scale_bytes)[:num_rows]
    positions = torch.arange(num_rows, device=records.device)
    at = records[positions // block], slice(None), positions % block
    side.codes[at] = codes
    if scale_bytes:
        side.scales[at] = scales


def _to_blocks(fmt: Format, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[L, H, row bytes] of codes and of scales to [L, H, row bytes] of ggml blocks."""
    if fmt.family is Family.PLAIN:
        return codes
    codes = codes.unflatten(-1, (-1, fmt.code_bytes))
    if fmt.name in FIFTH_BIT_FORMATS:
        codes = codes.roll(-NIBBLE_BYTES, -1)
    return torch.cat([scales.unflatten(-1, (-1, fmt.scale_bytes)), codes], -1).flatten(-2)


def _from_blocks(fmt: Format, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if fmt.family is Family.PLAIN:
        return rows, rows[..., :0]
    blocks = rows.unflatten(-1, (-1, fmt.group_bytes))
    scales, codes = blocks[..., : fmt.scale_bytes], blocks[..., fmt.scale_bytes :]
    if fmt.name in FIFTH_BIT_FORMATS:
        codes = codes.roll(NIBBLE_BYTES, -1)
    return codes.flatten(-2), scales.flatten(-2)


def _check_given(
    name: str, side: SideView, given: SideRows, num_rows: int, order: RowOrder
) -> None:
    _, heads, block, code_bytes = side.codes.shape
    row_bytes = heads * (code_bytes + side.scales.shape[3])
    shape = (num_rows, row_bytes)
    if order is RowOrder.SECTIONS:
        shape = (ceil_div(num_rows, block), block * row_bytes)
    if given.data.dtype is not torch.uint8 or tuple(given.data.shape) != shape:
        raise ConfigError(
            f"import of {num_rows} rows: {name} in {side.format.name} is uint8 {list(shape)} in the"
            f" {order} order, got {given.data.dtype} {list(given.data.shape)}"
        )
    if side.format.family is Family.SCALED:
        fp8_reciprocal(given.scale)
        if not side.fp8.calibration_rows and side.fp8.value != given.scale:
            raise ConfigError(
                f"import of {num_rows} rows: {name} comes with the fp8 scale {given.scale}, this"
                f" cache has {side.fp8.value}",
                "give both the same --fp8-scales",
            )
