"""The one cache allocation of a stage, split at start into three pools.

::

    [ full records … | window records … | state slots … ]
    0                ^ window_offset    ^ state_offset   ^ allocated_bytes
"""

from collections.abc import Sequence

import torch

from memkv_pp.cache.device import Device
from memkv_pp.errors import InternalError, OutOfRecords, OutOfSlots
from memkv_pp.pools import Pool
from memkv_pp.records import Part
from memkv_pp.sizing import Footprint, StageSizing


class Arena:
    """Owns the bytes and the ids of a stage's cache. Units are laid out as ``sizing`` says."""

    def __init__(
        self, device: Device, sizing: StageSizing, units: Footprint, *, record_history: bool = False
    ) -> None:
        self.sizing = sizing
        self.units = units
        self._window_offset = units.full_records * sizing.record_bytes
        self._state_offset = self._window_offset + units.window_records * sizing.window_record_bytes
        self._bytes: torch.Tensor | None = device.bytes(sizing.bytes_of(units))
        self.full = Pool(units.full_records, "full records", record_history=record_history)
        self.window = Pool(units.window_records, "window records", record_history=record_history)
        self.state = Pool(units.state_slots, "state slots", record_history=record_history)
        self._pools = (self.full, self.window, self.state)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocation, asked of the tensor's storage; 0 once released."""
        return 0 if self._bytes is None else self._bytes.untyped_storage().nbytes()

    @property
    def storage(self) -> torch.Tensor:
        """The whole arena, uint8; InternalError once released."""
        if self._bytes is None:
            raise InternalError(f"stage {self.sizing.stage}: the arena was released")
        return self._bytes

    def full_part(self, part: Part) -> torch.Tensor:
        """uint8 [full records, heads, rows, row_bytes]: a view of ``part`` in every full record."""
        return self._part(part, 0, self.units.full_records, self.sizing.record_bytes)

    def window_part(self, part: Part) -> torch.Tensor:
        """As ``full_part``, for window records."""
        size = self.sizing.window_record_bytes
        return self._part(part, self._window_offset, self.units.window_records, size)

    def _part(self, part: Part, base: int, records: int, record_bytes: int) -> torch.Tensor:
        shape = (records, part.heads, part.rows, part.row_bytes)
        strides = (record_bytes, part.rows * part.row_bytes, part.row_bytes, 1)
        offset = base + part.offset if records else 0
        return self.storage.as_strided(shape, strides, offset)

    def state_slots(self) -> torch.Tensor:
        """uint8 [state slots, slot bytes]: a view of every slot."""
        shape = (self.units.state_slots, self.sizing.slot_bytes)
        offset = self._state_offset if self.units.state_slots else 0
        return self.storage.as_strided(shape, (self.sizing.slot_bytes, 1), offset)

    def take(self, units: Footprint, caller: str) -> tuple[list[int], list[int], list[int]]:
        """Ids of so many units of each pool; nothing is taken if one is short.

        OutOfRecords, or OutOfSlots where it is the state slots.
        """
        taken: list[list[int]] = []
        try:
            for pool, count in zip(self._pools, units, strict=True):
                taken.append(pool.allocate(count, caller))
        except OutOfRecords as error:
            for pool, ids in zip(self._pools, taken, strict=False):
                pool.release(ids, caller)
            if len(taken) == self._pools.index(self.state):
                raise OutOfSlots(error.message, error.hint) from error
            raise
        return taken[0], taken[1], taken[2]

    def give_back(
        self, full: Sequence[int], window: Sequence[int], states: Sequence[int], caller: str
    ) -> None:
        """One owner less for each unit."""
        for pool, ids in zip(self._pools, (full, window, states), strict=True):
            pool.release(ids, caller)

    def references(self) -> Footprint:
        """Owners of all units, by pool."""
        return Footprint(*(pool.statistics().references for pool in self._pools))

    def used(self) -> Footprint:
        """Units in use, by pool."""
        return Footprint(*(pool.num_used for pool in self._pools))

    def release(self) -> None:
        """Give the memory back and forget every owner; may be called twice.

        The first pool whose books do not balance is reported after all are released.
        """
        if self._bytes is None:
            return
        first: InternalError | None = None
        for pool in self._pools:
            try:
                pool.check()
            except InternalError as error:
                first = first or error
            pool.release_all()
        self._bytes = None
        if first is not None:
            raise first

    def check(self) -> None:
        """Raise InternalError unless sizing and storage agree and the pools balance."""
        sized = self.sizing.bytes_of(self.units)
        if self._bytes is not None and sized != self.allocated_bytes:
            raise InternalError(
                f"stage {self.sizing.stage}: sized {sized} == allocated {self.allocated_bytes}"
                " does not hold"
            )
        for pool in self._pools:
            pool.check()
