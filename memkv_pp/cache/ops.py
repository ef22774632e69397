"""The one door to kernels: rows into records, rows out of records, attention over records.

Shape legend: T rows of the step, H KV heads, G query heads per KV head, D head size,
N records, B rows of a record, L cached rows of a sequence.

Results are those of plain torch arithmetic; masked or unwritten rows never enter a sum.
"""

from dataclasses import dataclass, field

import torch

from memkv_pp.cache import cuda_ops, host_kernels
from memkv_pp.cache.arena import Arena
from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.cuda_launch import CUDA_DTYPES
from memkv_pp.cache.fp8_scale import Fp8Scale
from memkv_pp.cache.host_codec import HostCodec
from memkv_pp.cache.packing_groups import exponent_bytes
from memkv_pp.cache.rotation import rotate, sign_rows
from memkv_pp.formats import Family, Format
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales
from memkv_pp.records import LayerLayout, Side

FIXED_ROWS = 16
FIXED_KEYS = 128


@dataclass(frozen=True, slots=True)
class SideView:
    """K or V of one layer in the arena: codes and scales, uint8 [N, H, B, row bytes].

    ``exponents`` is uint8 [N, H, 1, 1], or [N, H, 1, 0] for a format without them. ``fp8`` holds
    the scale of the whole side, which fp8 alone uses; it is 1.0 for other formats.
    """

    format: Format
    head_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    exponents: torch.Tensor
    fp8: Fp8Scale = field(default_factory=Fp8Scale)


@dataclass(frozen=True, slots=True)
class LayerView:
    """Both sides of one layer."""

    k: SideView
    v: SideView


def layer_view(
    arena: Arena, layout: LayerLayout, fp8: Fp8Scales = UNIT_SCALES, *, in_window: bool = False
) -> LayerView:
    """Views of ``layout``'s parts in every full record, or in every window record.

    Without a V side, K's is both. ``fp8`` says the scales of all layers.
    """
    part = arena.window_part if in_window else arena.full_part

    def side(side: Side, scale: float) -> SideView:
        rows = fp8.calibration_rows if side.format.family is Family.SCALED else 0
        return SideView(
            side.format,
            side.head_size,
            part(side.codes),
            part(side.scales),
            part(side.exponents),
            Fp8Scale(scale, rows),
        )

    k_scale, v_scale = fp8.of_layer(layout.layer)
    k = side(layout.k, k_scale)
    return LayerView(k, k if layout.v is None else side(layout.v, v_scale))


def append(
    side: SideView, records_T: torch.Tensor, rows_T: torch.Tensor, values_THD: torch.Tensor
) -> None:
    """Pack ``values_THD`` into (record, row) pairs, int64 and distinct within one call.

    A negative record writes nothing. Rows of a rotated format are rotated first. Row 0 of a
    record sets the exponents of an ``e`` format, so it is written before the others, or with them.
    An fp8 side that is to be calibrated takes its scale from the first rows it is given.
    """
    if side.format.family is Family.SCALED:
        side.fp8.calibrate(records_T, values_THD)
    if _on_cuda(side.codes.device, values_THD.dtype):
        torch.ops.memkv.append(
            *(side.codes, side.scales, side.exponents, side.format.name, side.fp8.value),
            *(values_THD, records_T, rows_T),
        )
        return
    codec = _host_codec(side, values_THD.dtype)
    if codec is not None:
        codec.append(
            side.format,
            side.codes,
            side.scales,
            records_T,
            rows_T,
            values_THD,
            side.fp8.value,
            exponents=side.exponents,
        )
        return
    if bool((records_T < 0).any()):
        written = records_T >= 0
        records_T, rows_T, values_THD = records_T[written], rows_T[written], values_THD[written]
    if side.format.rotated:
        values_THD = rotate(values_THD)
    exponents = None
    if side.format.exponent:
        first = rows_T == 0
        side.exponents[records_T[first], :, 0, 0] = exponent_bytes(values_THD[first])
        exponents = side.exponents[records_T, :, 0, 0]
    codes, scales = encode(side.format, values_THD, side.fp8.value, exponents=exponents)
    side.codes[records_T, :, rows_T] = codes
    if scales.shape[-1]:
        side.scales[records_T, :, rows_T] = scales


def gather(side: SideView, records_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All rows of ``records_N``, unpacked in order: [H, N * B, D] in ``dtype``, rotated as stored.

    Rows that were never written come out as anything, NaN included: do not read them.
    """
    if _on_cuda(side.codes.device, dtype):
        return torch.ops.memkv.gather(
            *(side.codes, side.scales, side.exponents, side.format.name, side.fp8.value),
            *(side.head_size, records_N, dtype),
        )
    codec = _host_codec(side, dtype)
    if codec is not None:
        return codec.gather(
            side.format,
            side.head_size,
            side.codes,
            side.scales,
            records_N,
            dtype,
            side.fp8.value,
            exponents=side.exponents,
        )

    # Heads move to the front while the rows are packed, when that moves the fewest bytes.
    def taken(part: torch.Tensor) -> torch.Tensor:
        return part.index_select(0, records_N).transpose(0, 1).contiguous()

    exponents = taken(side.exponents).squeeze(-1) if side.format.exponent else None
    rows_HNBD = decode(
        side.format,
        taken(side.codes),
        taken(side.scales),
        side.head_size,
        dtype,
        side.fp8.value,
        exponents=exponents,
    )
    return rows_HNBD.flatten(1, 2)


def rotate_query(side: SideView, query_THD: torch.Tensor) -> torch.Tensor:
    """The query as the rows of K are stored: rotated, in its own dtype, if they are."""
    return _rotated(query_THD) if side.format.rotated else query_THD


def unrotate_output(side: SideView, out_THD: torch.Tensor) -> torch.Tensor:
    """Weighted sums of V's rows as they were before they were rotated to be stored."""
    return _rotated(out_THD, inverse=True) if side.format.rotated else out_THD


def attend(
    query_THD: torch.Tensor,
    key_HLD: torch.Tensor,
    value_HLD: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of L rows over all L: [T, H * G, D of V].

    ``query_THD``: [T, H * G, D]; row t looks at keys ``[0, L - T + t]``, at the last ``window`` of
    them unless it is 0. Query heads of one KV head are grouped as rows. Scores are
    ``cap * tanh(q . k * scale / cap)``, without the cap where it is 0. ``sinks_Q``, f32 [H * G]: a
    further score of each query head, without a value.
    """
    heads, length, _ = key_HLD.shape
    num_rows = query_THD.shape[0]
    group = query_THD.shape[1] // heads
    query = query_THD.transpose(0, 1).reshape(heads, group * num_rows, -1)
    mask = None
    if num_rows > 1 or 0 < window < length:
        mask = _causal_mask(num_rows, length - num_rows, length, query.device, window)
        mask = mask.repeat(group, 1)
    if not cap and sinks_Q is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query[None], key_HLD[None], value_HLD[None], attn_mask=mask, scale=scale
        )[0]
    else:
        scores = _capped(torch.bmm(query.float(), key_HLD.float().transpose(1, 2)) * scale, cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        sums = torch.bmm(weights, value_HLD.float())
        total = weights.sum(-1, keepdim=True)
        out = _divided(sums, top, total, _grouped(sinks_Q, heads, num_rows)).to(query.dtype)
    return out.reshape(heads * group, num_rows, -1).transpose(0, 1)


def attend_fixed(
    query_THD: torch.Tensor,
    key_HLD: torch.Tensor,
    value_HLD: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``attend``, each row bit for bit the same in any company: T at most FIXED_ROWS.

    Every product has one shape: queries padded to FIXED_ROWS, keys in tiles of FIXED_KEYS padded
    with zeros, f32 throughout, tiles merged in order by online softmax. A tile that is masked for
    a row multiplies its sums by exactly 1 and adds exactly 0.
    """
    heads, length, size = key_HLD.shape
    num_rows = query_THD.shape[0]
    group = query_THD.shape[1] // heads
    query = query_THD.new_zeros(FIXED_ROWS, heads * group, size, dtype=torch.float32)
    query[:num_rows] = query_THD
    query = query.transpose(0, 1).reshape(heads, group * FIXED_ROWS, size)
    first = length - num_rows
    top = query.new_full((heads, group * FIXED_ROWS, 1), float("-inf"))
    total = torch.zeros_like(top)
    out = query.new_zeros(heads, group * FIXED_ROWS, value_HLD.shape[2])
    oldest = max(first - window + 1, 0) if window else 0
    for begin in range(oldest - oldest % FIXED_KEYS, length, FIXED_KEYS):
        keys = slice(begin, begin + FIXED_KEYS)
        key = _padded(key_HLD[:, keys])
        value = _padded(value_HLD[:, keys])
        scores = _capped(torch.bmm(query, key.transpose(1, 2)) * scale, cap)
        if window or keys.stop > first + 1:
            hidden = ~_causal_mask(FIXED_ROWS, first - begin, FIXED_KEYS, query.device, window)
            scores.view(heads, group, FIXED_ROWS, FIXED_KEYS).masked_fill_(hidden, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # Where no key was seen yet every weight is 0.
        base = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weights = torch.exp(scores - base)
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, value)
        top = new_top
    out = _divided(out, top, total, _grouped(sinks_Q, heads, FIXED_ROWS))
    out = out.reshape(heads * group, FIXED_ROWS, -1).transpose(0, 1)
    return out[:num_rows].to(query_THD.dtype)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def _grouped(sinks_Q: torch.Tensor | None, heads: int, num_rows: int) -> torch.Tensor | None:
    """Sinks as scores of grouped rows: [H, G * rows, 1]."""
    return None if sinks_Q is None else sinks_Q.view(heads, -1, 1).repeat_interleave(num_rows, 1)


def _divided(
    sums: torch.Tensor, top: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Weighted sums over the weights' total, a sink's weight in it; weights are ``exp(x - top)``."""
    if sinks is None:
        return sums / total
    largest = torch.maximum(top, sinks)
    keep = torch.exp(top - largest)
    return sums * keep / (total * keep + torch.exp(sinks - largest))


def _rotated(rows_THD: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    if _on_cuda(rows_THD.device, rows_THD.dtype):
        first, second = sign_rows(rows_THD.shape[-1], rows_THD.device)
        return torch.ops.memkv.rotate(rows_THD, *((second, first) if inverse else (first, second)))
    return rotate(rows_THD, inverse=inverse).to(rows_THD.dtype)


def _on_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    return cuda_ops.loaded(device) is not None and dtype in CUDA_DTYPES


def _host_codec(side: SideView, dtype: torch.dtype) -> HostCodec | None:
    kernels = host_kernels.loaded()
    if kernels is None or not HostCodec.covers(side.format, side.codes, dtype):
        return None
    return kernels.codec


def _causal_mask(
    num_rows: int, first: int, num_keys: int, device: torch.device, window: int = 0
) -> torch.Tensor:
    """bool [num_rows, num_keys]: row r, at position ``first + r``, sees keys up to itself.

    Of these it sees the last ``window``, or all where that is 0.
    """
    positions = torch.arange(first, first + num_rows, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None, :]
    seen = keys <= positions
    return seen & (keys > positions - window) if window else seen


def _padded(tile_HLD: torch.Tensor) -> torch.Tensor:
    """f32, zero rows appended up to FIXED_KEYS."""
    missing = FIXED_KEYS - tile_HLD.shape[1]
    return torch.nn.functional.pad(tile_HLD.float(), (0, 0, 0, missing)).contiguous()
