"""The cache bytes of every run of layers at once, for searches that weigh many fences.

The figures are those of ``sizing.size_layers``, which stays the authority: a layer's part of a
record or slot comes from ``records.py``, and parts add up because each is a multiple of their
alignment. Arrays are int64 of shape [cuts, cuts], indexed ``[hi, lo]`` for the layers
``[lo, hi)``::

    bytes[hi, lo]   rises with hi, falls with lo; only lo < hi means anything

Only the last stage ends behind the last layer, so row ``num_layers`` holds the NextN layers too,
while they draft.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from memkv_pp.formats import Pair
from memkv_pp.geometry import LayerGeometry, ModelGeometry
from memkv_pp.records import FLAT_TAIL_BYTES, RECORD_ALIGNMENT, record_layout, state_layout
from memkv_pp.sizing import SLOTS_PER_SEQUENCE, CacheOptions, Layout, size_layers
from memkv_pp.units import ceil_div

Table = NDArray[np.int64]

SATURATED_BYTES = 1 << 60


class RangeSizes:
    """What the layers ``[lo, hi)`` of a model take, for every lo and hi."""

    def __init__(
        self, geometry: ModelGeometry, formats: Sequence[Pair], options: CacheOptions
    ) -> None:
        self.num_layers = geometry.num_layers
        self._options = options
        self._flat = options.layout is Layout.FLAT
        drafts = options.spec_tokens > 0
        stored = [*geometry.layers, *(geometry.nextn_layers if drafts else ())]
        alone = [
            size_layers(geometry, formats, range(i, i + 1), options) for i in range(len(stored))
        ]
        tail_bytes = FLAT_TAIL_BYTES if self._flat else 0
        layers = list(zip(stored, formats, strict=False))

        @cache
        def record_part(layer: LayerGeometry, pair: Pair, rows: int) -> int:
            twice = record_layout([(0, layer, pair), (1, layer, pair)], rows, tail_bytes=tail_bytes)
            assert twice is not None
            return twice.layers[1].k.codes.offset

        @cache
        def slot_part(layer: LayerGeometry) -> int:
            twice = state_layout([(0, layer), (1, layer)])
            assert twice is not None
            return twice.layers[1].conv_offset

        full = [
            record_part(layer, pair, options.record_rows) if one.full else 0
            for (layer, pair), one in zip(layers, alone, strict=True)
        ]
        self._ring_rows = self._most_in_range([one.ring_rows for one in alone])
        self._full = self._aligned_sums(full)
        self._window = np.zeros_like(self._full)
        self._rings: list[tuple[int, NDArray[np.bool_]]] = []
        for rows in {one.ring_rows for one in alone if one.window}:
            # In the flat layout a record has the rows of the largest ring on the stage.
            record_rows = min(rows, options.flat_rows) if self._flat else options.block_tokens
            window = [
                record_part(layer, pair, record_rows) if one.window else 0
                for (layer, pair), one in zip(layers, alone, strict=True)
            ]
            inside = self._ring_rows == rows
            np.copyto(self._window, self._aligned_sums(window), where=inside)
            self._rings.append((rows, inside))
        self._slot = self._aligned_sums(
            [slot_part(layer) if one.state else 0 for layer, one in zip(stored, alone, strict=True)]
        )
        self._full_part_bytes = sum(full)
        self.grows = not self._flat and self._full_part_bytes > 0
        self.ring_rows = max(one.ring_rows for one in alone)

    def context_bytes(self, rows: int, sequences: int) -> Table:
        """Bytes of ``sequences`` of ``rows`` tokens; figures past ``SATURATED_BYTES`` stop there."""
        options = self._options
        total = _times(self._full, ceil_div(rows, options.record_rows) * sequences)
        for ring, inside in self._rings:
            blocks = 1 if self._flat else ceil_div(min(rows, ring), options.block_tokens)
            np.add(total, _times(self._window, blocks * sequences), out=total, where=inside)
        return total + _times(self._slot, SLOTS_PER_SEQUENCE * sequences)

    def least_bytes(self, rows: int, sequences: int) -> int:
        """No fence's stages take less than this together: the full layers without padding."""
        return self._full_part_bytes * ceil_div(rows, self._options.record_rows) * sequences

    def weight_bytes(self, layer_bytes: Sequence[int]) -> Table:
        """Sums of ``layer_bytes`` (one per trunk layer) over every run of layers."""
        below = np.cumsum([0, *layer_bytes], dtype=np.int64)
        return below[:, None] - below[None, :]

    def _aligned_sums(self, parts: Sequence[int]) -> Table:
        """Sums of ``parts`` over every run of layers, in whole records."""
        below = np.cumsum([0, *parts], dtype=np.int64)
        ends = below[: self.num_layers + 1].copy()
        ends[-1] = below[-1]
        sums = np.maximum(ends[:, None] - below[None, : self.num_layers + 1], 0)
        return -(-sums // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    def _most_in_range(self, values: Sequence[int]) -> Table:
        """The largest of ``values`` in every run of layers; 0 in an empty one."""
        cuts = self.num_layers + 1
        most = np.zeros((cuts, cuts), dtype=np.int64)
        for lo in range(self.num_layers):
            most[lo + 1 :, lo] = np.maximum.accumulate(values[lo : self.num_layers])
        behind = max(values[self.num_layers :], default=0)
        most[-1, :-1] = np.maximum(most[-1, :-1], behind)
        return most


def _times(table: Table, count: int) -> Table:
    """``table * count`` for a table of sums, stopping at ``SATURATED_BYTES``."""
    if int(table[-1, 0]) * count <= SATURATED_BYTES:
        return table * np.int64(count)
    within = SATURATED_BYTES // count
    return np.where(table <= within, table * np.int64(min(count, SATURATED_BYTES)), SATURATED_BYTES)
