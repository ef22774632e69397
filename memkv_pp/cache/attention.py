"""Attention over packed rows where they lie: what a stage asks of a kernel, on any device.

Shape legend: T query rows, Q query heads, S segments, E head size of V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memkv_pp.cache.ops import SideView
from memkv_pp.units import ceil_div


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Whose rows attend to which records, for all layers of a step, on the records' device.

    ``segments``: int64 [S, 4] of (first row, rows, length, place of its first record in
    ``records``); the rows are the last of ``length`` rows. ``num_rows`` sums the rows up;
    ``max_rows`` and ``max_length`` bound those of one segment.
    """

    segments: torch.Tensor
    records: torch.Tensor
    num_rows: int
    max_rows: int
    max_length: int


def segment_table(
    entries: Sequence[tuple[int, int, int, torch.Tensor]], record_rows: int
) -> SegmentTable:
    """A table of (first row, rows, length, int64 records in order); rows do not overlap.

    All records are on one device; without an entry the table is empty, on the CPU.
    """
    rows: list[tuple[int, int, int, int]] = []
    records: list[torch.Tensor] = []
    at = 0
    for first, num_rows, length, held in entries:
        used = held[: ceil_div(length, record_rows)]
        rows.append((first, num_rows, length, at))
        records.append(used)
        at += len(used)
    joined = torch.cat(records) if records else torch.empty(0, dtype=torch.int64)
    segments = torch.tensor(rows, dtype=torch.int64, device=joined.device).reshape(len(rows), 4)
    return SegmentTable(
        segments,
        joined,
        sum(row[1] for row in rows),
        max((row[1] for row in rows), default=0),
        max((row[2] for row in rows), default=0),
    )


class PackedAttention(Protocol):
    """A kernel of one device. A row's result does not depend on the rows beside it."""

    def serves(self, side: SideView) -> bool:
        """Whether the kernel reads this side."""
        ...

    def attend(
        self,
        k: SideView,
        v: SideView,
        query_TQD: torch.Tensor,
        table: SegmentTable,
        scale: float,
        *,
        threads: int,
        window: int = 0,
        cap: float = 0.0,
        sinks_Q: torch.Tensor | None = None,
        log_sum_exp_TQ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each segment's rows over its records: [T, Q, E], the query's dtype.

        ``query_TQD``: f32, bf16 or f16, Q a multiple of the KV heads; rotated if K's rows are. The
        output is rotated if V's rows are. Scores are ``cap * tanh(q . k * scale / cap)``, without
        the cap where it is 0. ``window``: a row sees so many keys, itself among them; 0 is all.
        ``sinks_Q``, f32: a further score of each query head, without a value. Rows of no segment
        come out as zeros. ``log_sum_exp_TQ``, f32, is filled for the rows of segments: the
        logarithm of the summed exponentials of the scores of keys, without the sink, so that
        disjoint keys merge. ``threads`` is for the CPU. InternalError for what the kernel does not
        serve.
        """
        ...
