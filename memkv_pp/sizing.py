"""The only place that adds bytes up: allocation, ledger, planner and simulator all ask here.

A stage's cache is three pools of equal units: full records, window records, state slots. A
sequence of ``rows`` tokens takes on a stage::

    full records     ceil(rows / block_tokens)                  if it has full or latent layers
    window records   ceil(min(rows, ring_rows) / block_tokens)  if it has sliding layers
    state slots      2 (current and spare)                      if it has recurrent layers

Formulas and worked figures: ``dual-cache-and-pipeline.md`` 1 and 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from memkv_pp.errors import ConfigError, GeometryError, InternalError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.records import (
    F32_BYTES,
    FLAT_TAIL_BYTES,
    RecordLayout,
    StateLayout,
    record_layout,
    state_layout,
)
from memkv_pp.rings import ALIGNMENT_ROWS, resident_rows, ring_rows
from memkv_pp.units import ceil_div

SLOTS_PER_SEQUENCE = 2
BOUNDARY_SLOTS = 2
HIDDEN_ROWS = 4
FEED_FORWARD_ROWS = 2
INT32_BYTES = 4


class Layout(StrEnum):
    """``paged``: records of ``block_tokens`` rows; ``flat``: one record per sequence."""

    PAGED = "paged"
    FLAT = "flat"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """What the shared options of the command line say about the cache.

    ``flat_rows`` is the rows of a record in the flat layout (the context), 0 when paged.
    ``spec_tokens`` is K of ``--spec``: a window has 1 + K rows.
    """

    block_tokens: int = 16
    prefill_chunk: int = 512
    rewind_slack: int = 64
    ring: bool = True
    layout: Layout = Layout.PAGED
    flat_rows: int = 0
    spec_tokens: int = 0

    def __post_init__(self) -> None:
        for knob, value, least in (
            ("--block-tokens", self.block_tokens, 1),
            ("--prefill-chunk", self.prefill_chunk, 1),
            ("--rewind-slack", self.rewind_slack, 0),
            ("--spec", self.spec_tokens, 0),
            ("--ctx", self.flat_rows, 1 if self.layout is Layout.FLAT else 0),
        ):
            if value < least:
                raise ConfigError(f"{knob}: {value} is below {least}")

    @property
    def record_rows(self) -> int:
        """Tokens of one full record."""
        return self.flat_rows if self.layout is Layout.FLAT else self.block_tokens


class Footprint(NamedTuple):
    """Units of the three pools of a stage."""

    full_records: int = 0
    window_records: int = 0
    state_slots: int = 0

    def plus(self, other: "Footprint") -> "Footprint":
        """Unit-wise sum."""
        return Footprint(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: "Footprint") -> "Footprint":
        """Unit-wise difference."""
        return Footprint(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def times(self, count: int) -> "Footprint":
        """Unit-wise product."""
        return Footprint(self[0] * count, self[1] * count, self[2] * count)

    def within(self, other: "Footprint") -> bool:
        """Whether each figure is at most the other's."""
        return self[0] <= other[0] and self[1] <= other[1] and self[2] <= other[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSizing:
    """The units of one stage, and what they cost. Made by ``size_stage``."""

    stage: int
    lo: int
    hi: int
    options: CacheOptions
    full: RecordLayout | None
    window: RecordLayout | None
    state: StateLayout | None
    ring_rows: int
    bytes_per_token: int
    ring_bytes_per_token: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one full record, padding included; 0 without full layers."""
        return self.full.record_bytes if self.full else 0

    @property
    def window_record_bytes(self) -> int:
        """Bytes of one window record; 0 without sliding layers in rings."""
        return self.window.record_bytes if self.window else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot; 0 without recurrent layers."""
        return self.state.slot_bytes if self.state else 0

    @property
    def padding_bytes(self) -> int:
        """Bytes of a full and a window record that hold no data."""
        return sum(layout.padding_bytes for layout in (self.full, self.window) if layout)

    @property
    def bytes_per_sequence(self) -> int:
        """State slots of one sequence: current and spare."""
        return SLOTS_PER_SEQUENCE * self.slot_bytes

    @property
    def grows(self) -> bool:
        """Whether a longer sequence takes more, however long it already is."""
        return self.full is not None and self.options.layout is Layout.PAGED

    def footprint(self, rows: int) -> Footprint:
        """What a sequence of ``rows`` tokens takes here; ConfigError beyond a flat record."""
        options = self.options
        if options.layout is Layout.FLAT and rows > options.flat_rows:
            raise ConfigError(
                f"--ctx: {rows} rows do not fit a flat record of {options.flat_rows}",
                "raise --ctx, or use --layout paged",
            )
        if rows <= 0:
            return Footprint()
        window_rows = resident_rows(rows, self.ring_rows)
        return Footprint(
            ceil_div(rows, options.record_rows) if self.full else 0,
            (1 if options.layout is Layout.FLAT else ceil_div(window_rows, options.block_tokens))
            if self.window
            else 0,
            SLOTS_PER_SEQUENCE if self.state else 0,
        )

    def bytes_of(self, units: Footprint) -> int:
        """Bytes of so many units."""
        return (
            units.full_records * self.record_bytes
            + units.window_records * self.window_record_bytes
            + units.state_slots * self.slot_bytes
        )

    def context_bytes(self, rows: int, sequences: int = 1) -> int:
        """Bytes that ``sequences`` of ``rows`` tokens each take here."""
        return self.bytes_of(self.footprint(rows).times(sequences))

    def unpadded_bytes(self, rows: int) -> int:
        """Bytes of one sequence's attention rows without padding or block rounding.

        ``bytes_per_token * rows + ring_bytes_per_token * min(rows, ring_rows)``.
        """
        return self.bytes_per_token * rows + self.ring_bytes_per_token * resident_rows(
            rows, self.ring_rows
        )

    def capacity_tokens(self, budget_bytes: int, sequences: int = 1) -> int | None:
        """The most tokens each of ``sequences`` can have within ``budget_bytes``, in whole blocks.

        None when the stage does not grow with the tokens and fits; 0 when nothing fits.
        """
        block = self.options.record_rows
        if self.context_bytes(block, sequences) > budget_bytes:
            return 0
        if not self.grows:
            ring_full = self.ring_rows + block if self.options.layout is Layout.PAGED else block
            if self.context_bytes(ring_full, sequences) <= budget_bytes:
                return None if self.options.layout is Layout.PAGED else block
        low, high = 1, 2
        while self.context_bytes(high * block, sequences) <= budget_bytes:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.context_bytes(middle * block, sequences) <= budget_bytes:
                low = middle
            else:
                high = middle
        return low * block

    def sequences_within(self, rows: int, budget_bytes: int) -> int | None:
        """How many sequences of ``rows`` tokens fit; None when they cost nothing here."""
        each = self.context_bytes(rows)
        return budget_bytes // each if each else None

    def units_within(self, budget_bytes: int, sequences: int) -> Footprint:
        """Pools for ``budget_bytes``: slots and rings for ``sequences``, full records for the rest.

        Where the rings of all do not fit beside at least one full record each, ConfigError.
        """
        flat = self.options.layout is Layout.FLAT
        ring = 1 if flat else ceil_div(self.ring_rows, self.options.block_tokens)
        fixed = Footprint(
            sequences if self.full else 0,
            ring * sequences if self.window else 0,
            SLOTS_PER_SEQUENCE * sequences if self.state else 0,
        )
        if self.bytes_of(fixed) > budget_bytes:
            raise ConfigError(
                f"--kv-bytes: stage {self.stage} needs {self.bytes_of(fixed)} bytes for the rings,"
                f" slots and first records of {sequences} sequences, it has {budget_bytes}",
                "give the stage more bytes or lower --sequences",
            )
        if not self.full:
            return fixed
        more = (budget_bytes - self.bytes_of(fixed)) // self.record_bytes
        return fixed._replace(full_records=fixed.full_records + more)


def layer_bytes_per_token(layer: LayerGeometry, pair: Pair) -> tuple[int, int]:
    """(K, V) bytes of one token's row, unpadded; (0, 0) for kinds that keep no rows."""
    if layer.kind in (LayerKind.RECURRENT, LayerKind.SHORT_CONV, LayerKind.SHARED):
        return 0, 0
    heads, size = layer.key_row
    k = heads * pair.k.row_bytes(size)
    heads, size = layer.value_row
    return k, heads * pair.v.row_bytes(size) if heads else 0


def layer_context_bytes(layer: LayerGeometry, pair: Pair, tokens: int) -> int:
    """Live bytes of a layer at ``tokens``: its rows (at most the window), or conv + one state."""
    if layer.kind.has_state:
        return F32_BYTES * (layer.conv_elements + layer.state_elements)
    rows = min(tokens, layer.window) if layer.kind is LayerKind.SLIDING else tokens
    return rows * sum(layer_bytes_per_token(layer, pair))


def size_stage(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    fence: Fence,
    stage: int,
    options: CacheOptions,
) -> StageSizing:
    """Size ``stage`` of ``fence``. ``formats`` has a pair per layer, NextN layers included.

    NextN layers are charged on the last stage while ``options.spec_tokens`` is not 0.
    """
    return size_layers(
        geometry,
        formats,
        range(fence.cuts[stage], fence.cuts[stage + 1]),
        options,
        stage=stage,
        with_nextn=options.spec_tokens > 0 and stage == fence.num_stages - 1,
    )


def size_layers(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    layers: range,
    options: CacheOptions,
    *,
    stage: int = 0,
    with_nextn: bool = False,
) -> StageSizing:
    """Size the trunk ``layers``, and the NextN layers after them if asked."""
    every = (*geometry.layers, *geometry.nextn_layers)
    if len(formats) != len(every):
        raise GeometryError(f"{len(formats)} format pairs for {len(every)} layers")
    chosen = list(layers)
    if with_nextn:
        chosen += range(geometry.num_layers, len(every))
    stored = [(i, every[i], formats[i]) for i in chosen]
    rings = [s for s in stored if s[1].kind is LayerKind.SLIDING and options.ring]
    grows = [s for s in stored if s not in rings and s[1].kind in _ROW_KINDS]
    states = [(i, layer) for i, layer, _ in stored if layer.kind.has_state]
    flat = options.layout is Layout.FLAT
    tail = FLAT_TAIL_BYTES if flat else 0
    rows = max(
        (
            ring_rows(
                layer.window,
                chunk=options.prefill_chunk,
                slack=options.rewind_slack,
                block_tokens=1 if flat else options.block_tokens,
                alignment=ALIGNMENT_ROWS if flat else max(ALIGNMENT_ROWS, options.block_tokens),
            )
            for _, layer, _ in rings
        ),
        default=0,
    )
    window_rows = min(rows, options.flat_rows) if flat else options.block_tokens
    return StageSizing(
        stage=stage,
        lo=layers.start,
        hi=layers.stop,
        options=options,
        full=record_layout(grows, options.record_rows, tail_bytes=tail),
        window=record_layout(rings, window_rows, tail_bytes=tail),
        state=state_layout(states),
        ring_rows=rows,
        bytes_per_token=_row_bytes(grows),
        ring_bytes_per_token=_row_bytes(rings),
    )


def size_fence(
    geometry: ModelGeometry, formats: Sequence[Pair], fence: Fence, options: CacheOptions
) -> tuple[StageSizing, ...]:
    """Size every stage; FenceError if a cut parts a shared layer from its source."""
    fence.check_edges(geometry.shared_edges())
    return tuple(
        size_stage(geometry, formats, fence, stage, options) for stage in range(fence.num_stages)
    )


def recurrent_bytes(
    geometry: ModelGeometry, *, states: int = SLOTS_PER_SEQUENCE, count_nextn: bool = False
) -> int:
    """f32 bytes of one convolution state and ``states`` matrix states per recurrent layer.

    This is the source's arithmetic (``dual-cache-and-pipeline.md`` 1.5): it keeps one convolution
    state, and counts a layer for every NextN block (``count_nextn``). Our runtime's slots hold both
    states twice; ``StageSizing.bytes_per_sequence`` says what they take. ``states=1`` is a snapshot.
    """
    layers = [layer for layer in geometry.layers if layer.kind is LayerKind.RECURRENT]
    if layers and count_nextn:
        layers += [layers[-1]] * len(geometry.nextn_layers)
    return sum(F32_BYTES * (x.conv_elements + states * x.state_elements) for x in layers)


def stage_weight_elements(geometry: ModelGeometry, fence: Fence, stage: int, *, spec: bool) -> int:
    """Weight elements a stage holds.

    The embedding is on the first stage, the norm and head on the last. A tied head on another
    stage than the embedding is a second copy of it.
    """
    total = sum(geometry.layers[i].weight_elements for i in fence.layers_of(stage))
    first, last = stage == 0, stage == fence.num_stages - 1
    if first:
        total += geometry.embedding_elements
    if last:
        total += geometry.norm_elements
        if not geometry.tied_embedding:
            total += geometry.head_elements
        elif not first:
            total += geometry.embedding_elements
        if spec:
            total += sum(layer.weight_elements for layer in geometry.nextn_layers)
    return total


def stage_file_bytes(geometry: ModelGeometry, fence: Fence, stage: int) -> int:
    """Bytes of a stage's tensors in the weight file; 0 when no weight file was read."""
    if not geometry.file_bytes_by_layer:
        return 0
    total = sum(geometry.file_bytes_by_layer[i] for i in fence.layers_of(stage))
    if stage == 0:
        total += geometry.embedding_file_bytes
    if stage == fence.num_stages - 1:
        total += geometry.head_file_bytes
        if geometry.tied_embedding and stage != 0:
            total += geometry.embedding_file_bytes
    return total


def stage_fixed_bytes(
    geometry: ModelGeometry,
    fence: Fence,
    stage: int,
    options: CacheOptions,
    *,
    dtype_bytes: int,
    sequences: int = 1,
) -> int:
    """Bytes of a stage that grow neither with the tokens nor with the layers it owns.

    ::

        boundary     2 slots x rows x hidden_size x dtype_bytes, for each side that has a neighbour,
                     rows = max(prefill_chunk, sequences x (1 + spec_tokens))
        activations  rows x (4 x hidden_size + 2 x feed_forward_size) x dtype_bytes: the residual, its
                     norm, the mixer's output and the layer's, and the two halves of a gated
                     feed-forward, of one layer at a time
        logits       sequences x (1 + spec_tokens) x vocabulary_size x 4, f32, on the last stage
        lengths      sequences x 4, the int32 device array

    Two slots per boundary let one step be sent while the next is computed
    (``dual-cache-and-pipeline.md`` 6.1).
    """
    window_rows = sequences * (1 + options.spec_tokens)
    rows = max(options.prefill_chunk, window_rows)
    last = stage == fence.num_stages - 1
    neighbours = (stage > 0) + (not last)
    boundary = neighbours * BOUNDARY_SLOTS * rows * geometry.hidden_size * dtype_bytes
    row = HIDDEN_ROWS * geometry.hidden_size + FEED_FORWARD_ROWS * geometry.feed_forward_size
    activations = rows * row * dtype_bytes
    logits = window_rows * geometry.vocabulary_size * F32_BYTES if last else 0
    return boundary + activations + logits + sequences * INT32_BYTES


def check_equal_bytes(stage: int, *, sized: int, allocated: int, promised: int) -> None:
    """Raise InternalError with the equation unless the three figures of a stage agree.

    ``sized`` is this module's, ``allocated`` was asked of the tensors in the stage's process,
    ``promised`` is what the ledger may give away.
    """
    if not sized == allocated == promised:
        raise InternalError(
            f"stage {stage}: sized {sized} == allocated {allocated} == promised {promised}"
            " does not hold"
        )


_ROW_KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT)


def _row_bytes(stored: Iterable[tuple[int, LayerGeometry, Pair]]) -> int:
    return sum(sum(layer_bytes_per_token(layer, pair)) for _, layer, pair in stored)
