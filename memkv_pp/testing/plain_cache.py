"""A ``StepCache`` in plain torch that keeps every row of every sequence: what caches are judged by.

Nothing is packed, paged, overwritten or shared between sequences; windows are masks over all rows.
Shape legend: T rows of the step, QH and KH query and KV heads, L rows held, D head size.
"""

from collections.abc import Sequence

import torch

from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.recurrent_ops import delta_rule
from memkv_pp.cache.rotation import rotate
from memkv_pp.formats import Format, Pair
from memkv_pp.geometry import LayerKind, ModelGeometry


class PlainCache:
    """Rows by (layer, sequence). ``rows`` says whose the rows of a step are: (sequence, count).

    With ``formats``, a pair per layer, rows are kept as they come out of the packing: each row goes
    through it alone, so formats whose rows depend on others (``e``) are left out.
    """

    def __init__(self, geometry: ModelGeometry, formats: Sequence[Pair] | None = None) -> None:
        self._layers = geometry.layers
        self._formats = formats
        self.rows: Sequence[tuple[int, int]] = ()
        self._keys: dict[tuple[int, int], torch.Tensor] = {}
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``StepCache``."""
        own = self._layers[layer]
        shares = own.kind is LayerKind.SHARED
        assert shares is (key is None) is (value is None)
        source = own.source_layer if shares else layer
        outputs: list[torch.Tensor] = []
        for sequence, rows in self._segments():
            place = source, sequence
            if key is not None and value is not None:
                kept_key, kept_value = self._kept(layer, key[rows], value[rows])
                self._keys[place] = _behind(self._keys, place, kept_key)
                self._values[place] = _behind(self._values, place, kept_value)
            outputs.append(
                attend_rows(
                    query[rows],
                    self._keys[place],
                    self._values[place],
                    scale,
                    window=self._layers[source].window,
                    cap=cap,
                    sinks=sinks,
                )
            )
        return torch.cat(outputs)

    def convolve(
        self,
        layer: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """See ``StepCache``."""
        channels, kernel = weight.shape
        outputs: list[torch.Tensor] = []
        for sequence, part in self._segments():
            place = layer, sequence
            self._inputs[place] = _behind(self._inputs, place, rows[part])
            seen = torch.nn.functional.pad(self._inputs[place].T, (kernel - 1, 0))
            out = torch.nn.functional.conv1d(seen, weight[:, None], bias, groups=channels).T
            outputs.append(out[len(out) - (part.stop - part.start) :])
        out = torch.cat(outputs)
        return torch.nn.functional.silu(out) if silu else out

    def scan(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """See ``StepCache``."""
        outputs: list[torch.Tensor] = []
        zeros = torch.zeros(value.shape[1], key.shape[2], value.shape[2])
        for sequence, rows in self._segments():
            place = layer, sequence
            out, self._states[place] = delta_rule(
                self._states.get(place, zeros),
                query[rows], key[rows], value[rows], gate[rows], beta[rows],
            )  # fmt: skip
            assert out is not None
            outputs.append(out)
        return torch.cat(outputs).to(value.dtype)

    def rewind(self, sequence: int, length: int) -> None:
        """Forget the rows of attention layers from ``length`` on; there may be no others."""
        for held in (self._keys, self._values):
            for place in held:
                if place[1] == sequence:
                    held[place] = held[place][:length]

    def _kept(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._formats is None:
            return key, value
        pair, own = self._formats[layer], self._layers[layer]
        kept = through_packing(pair.k, key)
        if own.kind is LayerKind.LATENT:
            return kept, kept[..., : own.latent_size]
        return kept, through_packing(pair.v, value)

    def _segments(self) -> list[tuple[int, slice]]:
        segments: list[tuple[int, slice]] = []
        first = 0
        for sequence, count in self.rows:
            segments.append((sequence, slice(first, first + count)))
            first += count
        return segments


def attend_rows(
    query_THD: torch.Tensor,
    key_LHD: torch.Tensor,
    value_LHD: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of L rows: [T, QH, D of V], computed in the query's dtype.

    A row sees the last ``window`` keys up to its own; 0 is all. ``sinks``, [QH], are scores
    without a value.
    """
    num_rows, query_heads, _ = query_THD.shape
    length, heads, _ = key_LHD.shape
    key_LHD, value_LHD = (
        t.repeat_interleave(query_heads // heads, dim=1) for t in (key_LHD, value_LHD)
    )
    scores = torch.einsum("thd,lhd->htl", query_THD, key_LHD) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    row = torch.arange(length - num_rows, length)[:, None]
    hidden = torch.arange(length) > row
    if window:
        hidden |= torch.arange(length) <= row - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, num_rows, 1)
        scores = torch.cat([scores, column], dim=2)
    weights = torch.softmax(scores, dim=2)[..., :length]
    return torch.einsum("htl,lhd->thd", weights, value_LHD)


def through_packing(fmt: Format, rows_THD: torch.Tensor) -> torch.Tensor:
    """Rows as they come out of their packed form."""
    turned = rotate(rows_THD) if fmt.rotated else rows_THD
    out = decode(fmt, *encode(fmt, turned), rows_THD.shape[-1], torch.float32)
    return rotate(out, inverse=True) if fmt.rotated else out


def _behind(
    held: dict[tuple[int, int], torch.Tensor], place: tuple[int, int], rows: torch.Tensor
) -> torch.Tensor:
    return torch.cat([held[place], rows]) if place in held else rows
