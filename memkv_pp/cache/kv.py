"""The cache of one stage: which records a sequence holds, and rows in and out of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from memkv_pp.cache import ops
from memkv_pp.cache.arena import Arena
from memkv_pp.cache.attention import PackedAttention, SegmentTable, segment_table
from memkv_pp.cache.device import Device
from memkv_pp.errors import InternalError, ModelError
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales
from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.pools import Pool
from memkv_pp.sizing import Footprint, StageSizing
from memkv_pp.units import ceil_div
from memkv_pp.wire import PoolBytes, Rows

SERVED_KINDS = (LayerKind.FULL,)

# Rows that are unpacked at a time: few calls for many short sequences, bounded memory for long ones.
GATHER_ROWS = 8192


@dataclass(slots=True)
class _Table:
    """One open sequence: its index in the device's lengths, its records in order, its rows.

    ``on_device`` holds the same records, int64.
    """

    slot: int
    records: list[int]
    on_device: torch.Tensor
    length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[first, first + num_rows)`` of a batch belong to one sequence, which then has ``length``."""

    first: int
    num_rows: int
    length: int
    records: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """Segments whose cached rows are unpacked together.

    ``records`` are those of all, one segment's after another's; ``starts`` says at which of the
    unpacked rows each segment's begin.
    """

    records: torch.Tensor
    segments: tuple[Segment, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step: position (int64 [T]), record and row in the record (int64 [W]) of each.

    The last T - W rows are padding: they are at position 0 and write nothing. ``segments`` are in
    the order of their rows. ``table`` has them for layers that are attended where they lie,
    ``gathers`` each of them once, in that order, for layers that are unpacked first; a batch whose
    cache has none of either kind leaves it out.
    """

    positions: torch.Tensor
    records: torch.Tensor
    rows: torch.Tensor
    segments: tuple[Segment, ...]
    gathers: tuple[Gather, ...]
    table: SegmentTable | None


class StageCache:
    """Full-attention rows of a stage's layers, in records of the arena.

    ``max_sequences`` bounds the open sequences. Layers that ``attention`` serves are attended where
    they lie; without it, and on other layers, rows are unpacked before each step, and
    ``rows_unpacked`` counts them. ``ModelError`` for a layer kind that is not served.
    """

    def __init__(
        self,
        device: Device,
        geometry: ModelGeometry,
        sizing: StageSizing,
        units: Footprint,
        *,
        max_sequences: int,
        attention: PackedAttention | None = None,
        fp8_scales: Fp8Scales = UNIT_SCALES,
    ) -> None:
        for layer in range(sizing.lo, sizing.hi):
            kind = geometry.layers[layer].kind
            if kind not in SERVED_KINDS:
                raise ModelError(
                    f"layer {layer} of {geometry.name} is {kind.value}, which is sized and planned"
                    " but not served yet",
                    f"served kinds: {', '.join(kind.value for kind in SERVED_KINDS)}",
                )
        self._device = device
        self._sizing = sizing
        self.arena = Arena(device, sizing, units)
        self._views = {
            layout.layer: ops.layer_view(self.arena, layout, fp8_scales)
            for layout in (sizing.full.layers if sizing.full else ())
        }
        self._windows = {layer: geometry.layers[layer].window for layer in self._views}
        self._attention = attention
        self._in_place = frozenset(
            layer
            for layer, view in self._views.items()
            if attention is not None and attention.serves(view.k) and attention.serves(view.v)
        )
        self.rows_unpacked = 0
        self._slots = Pool(max_sequences, "sequence slots")
        self._lengths = device.zeros(max_sequences, torch.int32)
        self._tables: dict[int, _Table] = {}

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._tables)

    def length(self, sequence: int) -> int:
        """Rows held of an open sequence."""
        return self._table(sequence).length

    def records(self, sequence: int) -> torch.Tensor:
        """The records of an open sequence in order, int64."""
        return self._table(sequence).on_device

    @property
    def views(self) -> Mapping[int, ops.LayerView]:
        """Where each layer's rows lie, by absolute layer; empty once released."""
        return self._views

    def used_bytes(self) -> PoolBytes:
        """Bytes in use by pool."""
        used, sizing = self.arena.used(), self._sizing
        return PoolBytes(
            used.full_records * sizing.record_bytes,
            used.window_records * sizing.window_record_bytes,
            used.state_slots * sizing.slot_bytes,
        )

    def open(self, sequence: int) -> None:
        """Begin an empty sequence; InternalError if it is open."""
        if sequence in self._tables:
            raise InternalError(f"sequence {sequence} is already open")
        (slot,) = self._slots.allocate(1, "open")
        self._device.set_i32(self._lengths, slot, 0)
        self._tables[sequence] = _Table(
            slot, [], torch.empty(0, dtype=torch.int64, device=self._device.torch_device), 0
        )

    def close(self, sequence: int) -> None:
        """Give back all that the sequence holds; InternalError if it is not open."""
        table = self._table(sequence)
        self.arena.full.release(table.records, "close")
        self._slots.release([table.slot], "close")
        del self._tables[sequence]

    def extend(self, rows: Sequence[Rows]) -> Batch:
        """Take records for the new rows of each sequence, and say where every row goes.

        InternalError, with nothing taken, when a sequence is not as long as the plan says or comes
        twice; OutOfRecords when the pool is empty, which the ledger rules out.
        """
        if len({entry.sequence for entry in rows}) != len(rows):
            raise InternalError(f"a sequence comes twice in the rows {list(rows)}")
        for entry in rows:
            table = self._table(entry.sequence)
            if table.length != entry.start:
                raise InternalError(
                    f"sequence {entry.sequence} has {table.length} rows, the plan starts at"
                    f" {entry.start}"
                )
        wanted = [self._records_wanted(entry) for entry in rows]
        taken = self.arena.full.allocate(sum(wanted), "extend")
        device, block = self._device.torch_device, self._sizing.options.record_rows
        segments: list[Segment] = []
        positions: list[int] = []
        records: list[int] = []
        at = 0
        for entry, count in zip(rows, wanted, strict=True):
            table = self._tables[entry.sequence]
            if count:
                table.records += taken[at : at + count]
                table.on_device = torch.tensor(table.records, device=device)
                at += count
            table.length = entry.start + entry.num_rows
            self._device.set_i32(self._lengths, table.slot, table.length)
            segments.append(Segment(len(positions), entry.num_rows, table.length, table.on_device))
            new = range(entry.start, table.length)
            positions.extend(new)
            records.extend(table.records[position // block] for position in new)
        columns = torch.tensor([positions, records], dtype=torch.int64, device=device)
        return Batch(
            columns[0],
            columns[1],
            columns[0] % block,
            tuple(segments),
            self._gathers(segments),
            self._table_of(segments),
        )

    def sub_batch(self, batch: Batch, first: int, last: int, padded: int) -> Batch:
        """Rows ``[first, last)`` of ``batch``, padded to ``padded`` rows that write nothing."""
        segments: list[Segment] = []
        for segment in batch.segments:
            low = max(segment.first, first)
            high = min(segment.first + segment.num_rows, last)
            if low < high:
                length = segment.length - (segment.first + segment.num_rows - high)
                segments.append(Segment(low - first, high - low, length, segment.records))
        positions = batch.positions[first:last]
        return Batch(
            torch.nn.functional.pad(positions, (0, padded - len(positions))),
            batch.records[first:last],
            batch.rows[first:last],
            tuple(segments),
            self._gathers(segments),
            self._table_of(segments),
        )

    def append_and_attend(
        self,
        layer: int,
        batch: Batch,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        scale: float,
        *,
        fixed: bool,
        cap: float = 0.0,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the batch's rows of ``layer`` and attend: [T, query heads, D of V].

        ``fixed`` makes every row bit-identical in any company (``ops.attend_fixed``); in place it
        always is. ``cap`` and ``sinks_Q`` are those of ``ops.attend``, and so is the layer's
        window. Rows of no segment come out as zeros.
        """
        view = self._views[layer]
        written = len(batch.records)
        ops.append(view.k, batch.records, batch.rows, key_THD[:written])
        ops.append(view.v, batch.records, batch.rows, value_THD[:written])
        window = self._windows[layer]
        query_THD = ops.rotate_query(view.k, query_THD)
        if layer in self._in_place:
            assert self._attention is not None
            assert batch.table is not None
            out = self._attention.attend(
                view.k,
                view.v,
                query_THD,
                batch.table,
                scale,
                threads=torch.get_num_threads(),
                window=window,
                cap=cap,
                sinks_Q=sinks_Q,
            )
            return ops.unrotate_output(view.v, out)
        out = query_THD.new_zeros(*query_THD.shape[:2], view.v.head_size)
        attend = ops.attend_fixed if fixed else ops.attend
        for gather in batch.gathers:
            key_HLD = ops.gather(view.k, gather.records, query_THD.dtype)
            value_HLD = ops.gather(view.v, gather.records, query_THD.dtype)
            self.rows_unpacked += key_HLD.shape[1]
            for segment, start in zip(gather.segments, gather.starts, strict=True):
                rows = slice(segment.first, segment.first + segment.num_rows)
                held = slice(start, start + segment.length)
                out[rows] = attend(
                    query_THD[rows],
                    key_HLD[:, held],
                    value_HLD[:, held],
                    scale,
                    window=window,
                    cap=cap,
                    sinks_Q=sinks_Q,
                )
        return ops.unrotate_output(view.v, out)

    def release(self) -> None:
        """Give the arena back; may be called twice."""
        self._views.clear()
        self._tables.clear()
        self._slots.release_all()
        self.arena.release()

    def check(self) -> None:
        """Raise InternalError unless tables, lengths and pools agree."""
        self.arena.check()
        self._slots.check()
        held = [record for table in self._tables.values() for record in table.records]
        if len(held) != self.arena.full.statistics().references:
            raise InternalError(
                f"stage {self._sizing.stage}: records in tables {len(held)} != references"
                f" {self.arena.full.statistics().references}"
            )
        lengths = self._lengths.tolist()
        for sequence, table in self._tables.items():
            if lengths[table.slot] != table.length:
                raise InternalError(
                    f"sequence {sequence}: device length {lengths[table.slot]} != host length"
                    f" {table.length}"
                )
            needed = self._sizing.footprint(table.length).full_records
            if len(table.records) != needed:
                raise InternalError(
                    f"sequence {sequence}: {len(table.records)} records for {table.length} rows,"
                    f" sizing says {needed}"
                )

    def _table(self, sequence: int) -> _Table:
        table = self._tables.get(sequence)
        if table is None:
            raise InternalError(f"sequence {sequence} is not open")
        return table

    def _records_wanted(self, entry: Rows) -> int:
        after = self._sizing.footprint(entry.start + entry.num_rows).full_records
        return after - len(self._tables[entry.sequence].records)

    def _table_of(self, segments: Sequence[Segment]) -> SegmentTable | None:
        if not self._in_place:
            return None
        entries = [(s.first, s.num_rows, s.length, s.records) for s in segments]
        return segment_table(entries, self._sizing.options.record_rows)

    def _gathers(self, segments: Sequence[Segment]) -> tuple[Gather, ...]:
        if len(self._in_place) == len(self._views):
            return ()
        block = self._sizing.options.record_rows
        gathers: list[Gather] = []
        records: list[torch.Tensor] = []
        starts: list[int] = []
        first = at = 0
        for index, segment in enumerate(segments):
            used = segment.records[: ceil_div(segment.length, block)]
            if records and at + len(used) * block > GATHER_ROWS:
                gathers.append(
                    Gather(torch.cat(records), tuple(segments[first:index]), tuple(starts))
                )
                records, starts, first, at = [], [], index, 0
            records.append(used)
            starts.append(at)
            at += len(used) * block
        if records:
            gathers.append(Gather(torch.cat(records), tuple(segments[first:]), tuple(starts)))
        return tuple(gathers)
