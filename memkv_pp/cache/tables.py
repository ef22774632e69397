"""What one open sequence holds of a stage's pools, and which rows of its window are still there.

A window ring is a cyclic table: block ``b`` of a sequence lies in record ``window[b % ring_blocks]``,
so a block that moves out of the window is overwritten where it lies, and nothing is copied.
"""

from dataclasses import dataclass, field

import torch

from memkv_pp.rings import can_rewind_to
from memkv_pp.sizing import Footprint
from memkv_pp.units import ceil_div


@dataclass(slots=True)
class Table:
    """One sequence: its index in the device's lengths, its rows, its records and state slots.

    ``on_device`` is ``full``, int64. ``states`` is (current, spare), or empty. Rows before
    ``first_resident`` were overwritten in the ring; it never goes back.
    """

    slot: int
    on_device: torch.Tensor
    length: int = 0
    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    first_resident: int = 0

    def held(self) -> Footprint:
        """Units held of each pool."""
        return Footprint(len(self.full), len(self.window), len(self.states))


class Ring:
    """The arithmetic of a stage's rings of ``ring_rows``, in records of ``block`` rows.

    ``window`` is the widest layer's.
    """

    def __init__(self, ring_rows: int, block: int, window: int) -> None:
        self.block = block
        self.num_blocks = ceil_div(ring_rows, block)
        self.window = window

    def first_resident(self, table: Table, length: int) -> int:
        """The oldest row that is left once the sequence has ``length`` rows."""
        oldest = (ceil_div(length, self.block) - self.num_blocks) * self.block
        return max(table.first_resident, oldest)

    def fits(self, table: Table, start: int, length: int) -> bool:
        """Whether rows ``[start, length)`` find all that they look at, once they are written."""
        return max(start - (self.window - 1), 0) >= self.first_resident(table, length)

    def can_rewind_to(self, table: Table, length: int) -> bool:
        """Whether the view of the token at ``length``, aligned as readers take it, is whole."""
        return can_rewind_to(length, window=self.window, first_resident=table.first_resident)

    def records(self, table: Table, first: int, last: int) -> list[int]:
        """The records of blocks ``[first, last)``; of a block that is gone, the one in its place."""
        return [table.window[block % self.num_blocks] for block in range(first, last)]
