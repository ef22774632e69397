"""The cache of one stage: what every sequence holds of its three pools, and where new rows go."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from memkv_pp.cache.arena import Arena
from memkv_pp.cache.attention import PackedAttention
from memkv_pp.cache.batch import Batch, PoolRows, PoolShape, Segment, StateRows, pad_positions
from memkv_pp.cache.device import Device
from memkv_pp.cache.layers import Layers
from memkv_pp.cache.recurrent_ops import span_table
from memkv_pp.cache.tables import Ring, Table
from memkv_pp.errors import ConfigError, InternalError, NotResident
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales
from memkv_pp.geometry import ModelGeometry
from memkv_pp.pools import Pool
from memkv_pp.sizing import Footprint, Layout, StageSizing
from memkv_pp.units import ceil_div
from memkv_pp.wire import PoolBytes, Rows


class StageCache:
    """Rows and states of a stage's layers, in the records and slots of its arena.

    ``max_sequences`` bounds the open sequences. ``layers`` reads and writes what a batch says.
    ConfigError for a flat layout whose ring would have to move rows.
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
        options = sizing.options
        if options.layout is Layout.FLAT and sizing.window and sizing.ring_rows < options.flat_rows:
            raise ConfigError(
                f"--layout flat: a ring of {sizing.ring_rows} rows would be moved in a context of"
                f" {options.flat_rows}",
                "use --layout paged, or --ring off",
            )
        self._device = device
        self._sizing = sizing
        self.arena = Arena(device, sizing, units)
        self.layers = Layers(self.arena, geometry, sizing, attention, fp8_scales)
        self._full = self.layers.shape(options.record_rows, in_window=False)
        self._ring: Ring | None = None
        self._window = self._full
        if sizing.window is not None:
            widest = max(geometry.layers[layout.layer].window for layout in sizing.window.layers)
            self._ring = Ring(sizing.ring_rows, sizing.window.rows, widest)
            self._window = self.layers.shape(sizing.window.rows, in_window=True)
        self._slots = Pool(max_sequences, "sequence slots")
        self._lengths = device.zeros(max_sequences, torch.int32)
        self._tables: dict[int, Table] = {}

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._tables)

    def length(self, sequence: int) -> int:
        """Rows held of an open sequence."""
        return self._table(sequence).length

    def records(self, sequence: int) -> torch.Tensor:
        """The full records of an open sequence in order, int64."""
        return self._table(sequence).on_device

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
        self._tables[sequence] = Table(slot, self._int64([]))

    def close(self, sequence: int) -> None:
        """Give back all that the sequence holds; InternalError if it is not open."""
        table = self._table(sequence)
        self.arena.give_back(table.full, table.window, table.states, "close")
        self._slots.release([table.slot], "close")
        del self._tables[sequence]

    def extend(self, rows: Sequence[Rows]) -> Batch:
        """Take units for the new rows of each sequence, and say where every row goes.

        InternalError, with nothing taken, when a sequence is not as long as the plan says, comes
        twice, or brings more rows than its ring keeps beside the window; OutOfRecords or
        OutOfSlots when a pool is empty, which the ledger rules out.
        """
        if len({entry.sequence for entry in rows}) != len(rows):
            raise InternalError(f"a sequence comes twice in the rows {list(rows)}")
        for entry in rows:
            self._check_rows(entry)
        wanted = [
            self._sizing.footprint(entry.start + entry.num_rows).minus(
                self._tables[entry.sequence].held()
            )
            for entry in rows
        ]
        total = Footprint()
        for units in wanted:
            total = total.plus(units)
        full, window, states = self.arena.take(total, "extend")
        for entry, units in zip(rows, wanted, strict=True):
            table = self._tables[entry.sequence]
            if units.full_records:
                table.full += _first(full, units.full_records)
                table.on_device = self._int64(table.full)
            table.window += _first(window, units.window_records)
            table.states += _first(states, units.state_slots)
            if units.state_slots:
                self.layers.clear_states(table.states)
            self._set_length(table, entry.start + entry.num_rows)
        return self._batch(rows)

    def idle(self, num_rows: int) -> Batch:
        """Rows that are stored nowhere and see no key."""
        rows = self._int64([0] * num_rows)
        segment = Segment(0, num_rows, 0, 0, rows[:0])
        full = window = states = None
        if self._sizing.full is not None:
            full = self._full.rows(rows - 1, rows, [segment])
        if self._ring is not None:
            window = self._window.rows(rows - 1, rows, [segment])
        if self._sizing.state is not None:
            spans = span_table([(0, num_rows, -1, -1)])
            states = StateRows((), spans.to(self._device.torch_device))
        return Batch(rows, num_rows, full, window, states)

    def part(self, batch: Batch, first: int, last: int, padded: int) -> Batch:
        """Rows ``[first, last)`` of ``batch``, padded to ``padded`` rows that write nothing.

        State slots are those of now: take a part when the parts before it have run.
        """
        full, window = batch.full, batch.window
        return Batch(
            pad_positions(batch.positions[first:last], padded),
            last - first,
            None if full is None else self._full.part(full, first, last),
            None if window is None else self._window.part(window, first, last),
            None if batch.states is None else self._state_rows(batch.states.clipped(first, last)),
        )

    def advance(self, batch: Batch) -> None:
        """Make the states that the layers wrote for ``batch`` the current ones of its sequences."""
        if batch.states is not None:
            for sequence, _, _ in batch.states.segments:
                self._tables[sequence].states.reverse()

    def can_rewind_to(self, sequence: int, length: int) -> bool:
        """Whether the rows from ``length`` on can be taken back, and the rest used as before.

        False where the window before ``length`` was overwritten, and where a recurrent layer
        would have to go back.
        """
        table = self._table(sequence)
        if not 0 <= length <= table.length:
            return False
        if length == table.length:
            return True
        return not table.states and (self._ring is None or self._ring.can_rewind_to(table, length))

    def rewind(self, sequence: int, length: int) -> None:
        """Take the rows from ``length`` on back; NotResident, with nothing changed, if refused."""
        table = self._table(sequence)
        if not self.can_rewind_to(sequence, length):
            raise NotResident(
                f"sequence {sequence} of {table.length} rows cannot go back to {length}: rows from"
                f" {table.first_resident} on are resident"
                + (", and recurrent layers do not go back" if table.states else "")
            )
        keep = self._sizing.footprint(length)
        self.arena.give_back(
            table.full[keep.full_records :], table.window[keep.window_records :], [], "rewind"
        )
        del table.full[keep.full_records :], table.window[keep.window_records :]
        table.on_device = self._int64(table.full)
        self._set_length(table, length)

    def release(self) -> None:
        """Give the arena back; may be called twice."""
        self.layers.release()
        self._tables.clear()
        self._slots.release_all()
        self.arena.release()

    def check(self) -> None:
        """Raise InternalError unless tables, lengths and pools agree."""
        self.arena.check()
        self._slots.check()
        held = Footprint()
        for table in self._tables.values():
            held = held.plus(table.held())
        references = self.arena.references()
        if held != references:
            raise InternalError(
                f"stage {self._sizing.stage}: units in tables {tuple(held)} != references"
                f" {tuple(references)}"
            )
        lengths = self._lengths.tolist()
        for sequence, table in self._tables.items():
            if lengths[table.slot] != table.length:
                raise InternalError(
                    f"sequence {sequence}: device length {lengths[table.slot]} != host length"
                    f" {table.length}"
                )
            needed = self._sizing.footprint(table.length)
            if table.held() != needed:
                raise InternalError(
                    f"sequence {sequence}: units {tuple(table.held())} for {table.length} rows,"
                    f" sizing says {tuple(needed)}"
                )

    def _table(self, sequence: int) -> Table:
        table = self._tables.get(sequence)
        if table is None:
            raise InternalError(f"sequence {sequence} is not open")
        return table

    def _set_length(self, table: Table, length: int) -> None:
        if self._ring is not None:
            table.first_resident = self._ring.first_resident(table, length)
        table.length = length
        self._device.set_i32(self._lengths, table.slot, length)

    def _check_rows(self, entry: Rows) -> None:
        table = self._table(entry.sequence)
        if table.length != entry.start:
            raise InternalError(
                f"sequence {entry.sequence} has {table.length} rows, the plan starts at"
                f" {entry.start}"
            )
        ring, end = self._ring, entry.start + entry.num_rows
        if ring is not None and not ring.fits(table, entry.start, end):
            raise InternalError(
                f"sequence {entry.sequence}: rows [{entry.start}, {end}) would overwrite the window"
                f" of {ring.window} before them in a ring of {ring.num_blocks * ring.block} rows"
            )

    def _batch(self, rows: Sequence[Rows]) -> Batch:
        positions = [p for entry in rows for p in range(entry.start, entry.start + entry.num_rows)]
        column = self._int64(positions)
        full = window = states = None
        if self._sizing.full is not None:
            full = self._pool_rows(self._full, column, rows, None)
        if self._ring is not None:
            window = self._pool_rows(self._window, column, rows, self._ring)
        if self._sizing.state is not None:
            states = self._state_rows(
                tuple(
                    (entry.sequence, first, entry.num_rows)
                    for entry, first in zip(rows, _firsts(rows), strict=True)
                )
            )
        return Batch(column, len(positions), full, window, states)

    def _pool_rows(
        self, shape: PoolShape, positions: torch.Tensor, rows: Sequence[Rows], ring: Ring | None
    ) -> PoolRows:
        block = shape.record_rows
        records: list[int] = []
        segments: list[Segment] = []
        for entry in rows:
            table, end = self._tables[entry.sequence], entry.start + entry.num_rows
            base, held, on_device = 0, table.full, table.on_device
            if ring is not None:
                base = max(entry.start - ring.window + 1, 0) // shape.view_rows * shape.view_rows
                held = ring.records(table, base // block, ceil_div(end, block))
                on_device = self._int64(held)
            segments.append(Segment(len(records), entry.num_rows, end, base, on_device))
            records.extend(held[(p - base) // block] for p in range(entry.start, end))
        return shape.rows(self._int64(records), positions % block, segments)

    def _state_rows(self, segments: tuple[tuple[int, int, int], ...]) -> StateRows:
        """Each segment reads its sequence's current slot and writes the spare."""
        spans: list[tuple[int, int, int, int]] = []
        for sequence, first, num_rows in segments:
            current, spare = self._tables[sequence].states
            spans.append((first, num_rows, current, spare))
        return StateRows(segments, span_table(spans).to(self._device.torch_device))

    def _int64(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)


def _firsts(rows: Sequence[Rows]) -> Iterator[int]:
    """The first row of each entry in the batch."""
    return accumulate((entry.num_rows for entry in rows[:-1]), initial=0) if rows else iter(())


def _first(units: list[int], count: int) -> list[int]:
    """The first ``count``, taken off ``units``."""
    taken = units[:count]
    del units[:count]
    return taken
