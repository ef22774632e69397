"""A stage's layers over its arena: rows in, attention, convolution and scan over what is held.

Shape legend: T rows of the step, padding included, QH and KH query and KV heads, D and DV key and
value head sizes, C channels of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from memkv_pp.cache import ops
from memkv_pp.cache.arena import Arena
from memkv_pp.cache.attention import PackedAttention
from memkv_pp.cache.batch import Batch, PoolRows, PoolShape
from memkv_pp.cache.recurrent import recurrent_for
from memkv_pp.cache.recurrent_ops import conv_states, copy_slots, matrix_states
from memkv_pp.errors import InternalError
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales
from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.records import LayerLayout, RecordLayout, StateLayer
from memkv_pp.sizing import StageSizing


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """Where a layer's rows lie: its views, the pool they are of, and what it takes of a row.

    ``window``: keys that a row sees, itself among them; 0 is all. ``value_size``: the first
    elements of a V row that count: all, but in latent attention, where V is K's rows.
    """

    view: ops.LayerView
    in_window: bool
    in_place: bool
    window: int
    value_size: int


class Layers:
    """The layers ``[lo, hi)`` of a stage by absolute index.

    Layers that ``attention`` serves are attended where they lie; without it, and on other layers,
    rows are unpacked before each step, and ``rows_unpacked`` counts them. ``recurrent`` serves the
    others.
    """

    def __init__(
        self,
        arena: Arena,
        geometry: ModelGeometry,
        sizing: StageSizing,
        attention: PackedAttention | None,
        fp8: Fp8Scales = UNIT_SCALES,
    ) -> None:
        self._attention = attention
        self._attends: dict[int, AttentionLayer] = {}
        for layout, in_window in _layouts(sizing.full, sizing.window):
            view = ops.layer_view(arena, layout, fp8, in_window=in_window)
            layer = [*geometry.layers, *geometry.nextn_layers][layout.layer]
            self._attends[layout.layer] = AttentionLayer(
                view=view,
                in_window=in_window,
                in_place=attention is not None
                and attention.serves(view.k)
                and attention.serves(view.v),
                window=layer.window,
                value_size=layer.latent_size or layer.value_head_size,
            )
        self._own = frozenset(self._attends)
        for index in range(sizing.lo, sizing.hi):
            layer = geometry.layers[index]
            if layer.kind is LayerKind.SHARED:
                self._attends[index] = self._attends[layer.source_layer]
        self._states: dict[int, StateLayer] = {
            layer.layer: layer for layer in (sizing.state.layers if sizing.state else ())
        }
        self._slots = arena.state_slots()
        self.recurrent = recurrent_for(arena.storage.device)
        self.rows_unpacked = 0

    @property
    def views(self) -> dict[int, ops.LayerView]:
        """Where the rows of each layer that has any of its own lie, by absolute layer."""
        return {layer: place.view for layer, place in self._attends.items() if layer in self._own}

    @property
    def keeps_whole_rows(self) -> bool:
        """Whether every layer keeps K and V of every row: no windows in rings, latents or states."""
        places = (self._attends[layer] for layer in self._own)
        return not self._states and not any(
            place.in_window or place.view.v is place.view.k for place in places
        )

    def shape(self, record_rows: int, *, in_window: bool) -> PoolShape:
        """What a pool's batches need for its layers."""
        places = [layer for layer in self._attends.values() if layer.in_window is in_window]
        return PoolShape(
            record_rows,
            any(layer.in_place for layer in places),
            not all(layer.in_place for layer in places),
        )

    def attend(
        self,
        layer: int,
        batch: Batch,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor | None,
        value_THD: torch.Tensor | None,
        scale: float,
        *,
        fixed: bool,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the batch's rows of ``layer`` and attend: [T, QH, DV].

        Without key and value nothing is stored: the layer reads the rows of the one it shares. The
        value of latent layers is the first elements of their key. ``cap`` and ``sinks`` as ``PackedAttention.attend`` has them.
        ``fixed`` makes every row bit-identical in any company (``ops.attend_fixed``); in place it
        always is. Rows of no segment come out as zeros.
        """
        place = self._attends[layer]
        pool = batch.window if place.in_window else batch.full
        assert pool is not None
        if key_THD is not None:
            written = batch.num_written
            ops.append(place.view.k, pool.records, pool.rows, key_THD[:written])
            if place.view.v is not place.view.k:
                assert value_THD is not None
                ops.append(place.view.v, pool.records, pool.rows, value_THD[:written])
        query_THD = ops.rotate_query(place.view.k, query_THD)
        if place.in_place:
            out = self._attend_in_place(place, pool, query_THD, scale, cap, sinks)
        else:
            out = self._attend_unpacked(place, pool, query_THD, scale, cap, sinks, fixed=fixed)
        return ops.unrotate_output(place.view.v, out)[..., : place.value_size]

    def convolve(
        self,
        layer: int,
        batch: Batch,
        rows_TC: torch.Tensor,
        weight_CX: torch.Tensor,
        bias_C: torch.Tensor | None,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """``recurrent_ops.short_conv`` over the batch's rows behind what ``layer`` kept: [T, C]."""
        state = self._states[layer]
        assert batch.states is not None
        channels, taps = weight_CX.shape[0], weight_CX.shape[1] - 1
        _check_elements(layer, "convolution", state.conv_elements, (channels, taps))
        states = conv_states(self._slots, state.conv_offset, channels, taps)
        return self.recurrent.short_conv(
            states, batch.states.spans, rows_TC, weight_CX, bias_C, silu=silu
        )

    def scan(
        self,
        layer: int,
        batch: Batch,
        query_TGK: torch.Tensor,
        key_TGK: torch.Tensor,
        value_THV: torch.Tensor,
        gate_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        *,
        fixed: bool,
    ) -> torch.Tensor:
        """The gated delta rule over the batch's rows from the state of ``layer``: [T, H, V].

        ``fixed``: rows go one after another, whatever serves.
        """
        state = self._states[layer]
        assert batch.states is not None
        shape = (value_THV.shape[1], key_TGK.shape[2], value_THV.shape[2])
        _check_elements(layer, "matrix", state.state_elements, shape)
        states = matrix_states(self._slots, state.state_offset, *shape)
        rows = query_TGK, key_TGK, value_THV, gate_TH, beta_TH
        return self.recurrent.scan_delta(states, batch.states.spans, *rows, fixed=fixed)

    def clear_states(self, slots: Sequence[int]) -> None:
        """Zero every layer's state in ``slots``."""
        copy_slots(self._slots, [(-1, slot) for slot in slots])

    def release(self) -> None:
        """Forget the views of the arena."""
        self._attends.clear()
        self._states.clear()
        self._slots = self._slots.new_empty(0)

    def _attend_in_place(
        self,
        place: AttentionLayer,
        pool: PoolRows,
        query_THD: torch.Tensor,
        scale: float,
        cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._attention is not None
        assert pool.table is not None
        return self._attention.attend(
            place.view.k,
            place.view.v,
            query_THD,
            pool.table,
            scale,
            threads=torch.get_num_threads(),
            window=place.window,
            cap=cap,
            sinks_Q=sinks,
        )

    def _attend_unpacked(
        self,
        place: AttentionLayer,
        pool: PoolRows,
        query_THD: torch.Tensor,
        scale: float,
        cap: float,
        sinks: torch.Tensor | None,
        *,
        fixed: bool,
    ) -> torch.Tensor:
        view = place.view
        out = query_THD.new_zeros(*query_THD.shape[:2], view.v.head_size)
        kernel = ops.attend_fixed if fixed else ops.attend
        for gather in pool.gathers:
            key_HLD = ops.gather(view.k, gather.records, query_THD.dtype)
            value_HLD = key_HLD
            if view.v is not view.k:
                value_HLD = ops.gather(view.v, gather.records, query_THD.dtype)
            self.rows_unpacked += key_HLD.shape[1]
            for segment, begin in zip(gather.segments, gather.starts, strict=True):
                rows = slice(segment.first, segment.first + segment.num_rows)
                held = slice(begin, begin + segment.length - segment.base)
                key, value = key_HLD[:, held], value_HLD[:, held]
                if place.window:
                    # What moved out of the window may have been overwritten, or never written.
                    unseen = max(segment.start - place.window + 1 - segment.base, 0)
                    key[:, :unseen] = 0
                    value[:, :unseen] = 0
                out[rows] = kernel(
                    query_THD[rows], key, value, scale, window=place.window, cap=cap, sinks_Q=sinks
                )
        return out


def _check_elements(layer: int, what: str, held: int, shape: tuple[int, ...]) -> None:
    if prod(shape) != held:
        raise InternalError(
            f"layer {layer}: a {what} state of {held} elements is not {list(shape)}"
        )


def _layouts(
    full: RecordLayout | None, window: RecordLayout | None
) -> list[tuple[LayerLayout, bool]]:
    laid = [(layout, False) for layout in (full.layers if full else ())]
    return laid + [(layout, True) for layout in (window.layers if window else ())]
