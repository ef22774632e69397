"""The rows of a step: where each goes, and which cached rows each sequence looks at.

Shape legend: T rows of the step, padding included, W of them that are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch

from memkv_pp.cache.attention import SegmentTable, segment_table
from memkv_pp.cache.recurrent_ops import SpanTable
from memkv_pp.units import ceil_div

# Rows that are unpacked at a time: few calls for many short sequences, bounded memory for long ones.
GATHER_ROWS = 8192

# Attention sums keys in groups at fixed absolute positions, of at most so many: a list of records
# that does not begin at position 0 begins at a multiple of it.
VIEW_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[first, first + num_rows)`` of a batch: the last of ``length`` rows of a sequence.

    ``records``, int64, hold the sequence's rows from position ``base`` on.
    """

    first: int
    num_rows: int
    length: int
    base: int
    records: torch.Tensor

    @property
    def start(self) -> int:
        """The position of its first row."""
        return self.length - self.num_rows

    def clipped(self, first: int, last: int) -> "Segment | None":
        """Its part in rows ``[first, last)`` of the batch, as a segment of those rows."""
        low = max(self.first, first)
        high = min(self.first + self.num_rows, last)
        if low >= high:
            return None
        length = self.length - (self.first + self.num_rows - high)
        return replace(self, first=low - first, num_rows=high - low, length=length)


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
class PoolRows:
    """A batch's rows in one pool: record and row in the record (int64 [W]) of each.

    ``segments`` are in the order of their rows. ``table`` has them for layers that are attended
    where they lie, ``gathers`` each of them once, in that order, for layers that are unpacked
    first; a pool that has none of either kind leaves it out.
    """

    records: torch.Tensor
    rows: torch.Tensor
    segments: tuple[Segment, ...]
    table: SegmentTable | None
    gathers: tuple[Gather, ...]


@dataclass(frozen=True, slots=True)
class StateRows:
    """A batch's rows for the recurrent layers: (sequence, first row, rows) of each segment.

    ``spans`` are they with the slots that they read and write.
    """

    segments: tuple[tuple[int, int, int], ...]
    spans: SpanTable

    def clipped(self, first: int, last: int) -> tuple[tuple[int, int, int], ...]:
        """The segments' parts in rows ``[first, last)`` of the batch, as segments of those rows."""
        parts: list[tuple[int, int, int]] = []
        for sequence, begin, num_rows in self.segments:
            low, high = max(begin, first), min(begin + num_rows, last)
            if low < high:
                parts.append((sequence, low - first, high - low))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step: the position of each, int64 [T], and what they are in each pool.

    The last T - W rows are padding: they are at position 0 and write nothing. A pool without
    layers, and ``states`` without recurrent ones, are None.
    """

    positions: torch.Tensor
    num_written: int
    full: PoolRows | None
    window: PoolRows | None
    states: StateRows | None


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How a pool's rows are reached: ``record_rows`` of a record, and the two kinds of layers."""

    record_rows: int
    in_place: bool
    unpacked: bool

    @property
    def view_rows(self) -> int:
        """What the first row of a list of records is a multiple of."""
        return lcm(VIEW_ROWS, self.record_rows)

    def rows(
        self, records: torch.Tensor, rows: torch.Tensor, segments: Sequence[Segment]
    ) -> PoolRows:
        """Segments with what their layers need."""
        table = None
        if self.in_place:
            entries = [(s.first, s.num_rows, s.length - s.base, s.records) for s in segments]
            table = segment_table(entries, self.record_rows)
        return PoolRows(records, rows, tuple(segments), table, self._gathers(segments))

    def part(self, whole: PoolRows, first: int, last: int) -> PoolRows:
        """Rows ``[first, last)`` of ``whole``."""
        clipped = [segment.clipped(first, last) for segment in whole.segments]
        segments = [segment for segment in clipped if segment is not None]
        return self.rows(whole.records[first:last], whole.rows[first:last], segments)

    def _gathers(self, segments: Sequence[Segment]) -> tuple[Gather, ...]:
        if not self.unpacked:
            return ()
        gathers: list[Gather] = []
        records: list[torch.Tensor] = []
        starts: list[int] = []
        first = at = 0
        for index, segment in enumerate(segments):
            used = segment.records[: ceil_div(segment.length - segment.base, self.record_rows)]
            if records and at + len(used) * self.record_rows > GATHER_ROWS:
                gathers.append(
                    Gather(torch.cat(records), tuple(segments[first:index]), tuple(starts))
                )
                records, starts, first, at = [], [], index, 0
            records.append(used)
            starts.append(at)
            at += len(used) * self.record_rows
        if records:
            gathers.append(Gather(torch.cat(records), tuple(segments[first:]), tuple(starts)))
        return tuple(gathers)


def pad_positions(positions: torch.Tensor, padded: int) -> torch.Tensor:
    """``positions`` with zeros behind, ``padded`` in all."""
    return torch.nn.functional.pad(positions, (0, padded - len(positions)))
