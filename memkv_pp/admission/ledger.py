"""The byte ledger: what every stage may promise, and who holds what.

A charge is atomic over all stages: it is made on each of them or on none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from memkv_pp.errors import DoubleRelease, InternalError, StageShortfall
from memkv_pp.sizing import Footprint, StageSizing
from memkv_pp.units import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStatistics:
    """A snapshot: per stage what may be promised and what is held, in bytes."""

    promised_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    peak_held_bytes: tuple[int, ...]
    requests: int
    refused_releases: int


class Ledger:
    """Charges requests on every stage at once.

    ``sizings`` and ``capacities`` have an entry per stage: what a unit costs, and how many units
    of each pool the stage's arena holds.
    """

    def __init__(self, sizings: Sequence[StageSizing], capacities: Sequence[Footprint]) -> None:
        if len(sizings) != len(capacities) or not sizings:
            raise InternalError(f"{len(sizings)} sizings for {len(capacities)} capacities")
        self.sizings = tuple(sizings)
        self.capacities = tuple(capacities)
        self._held = [Footprint()] * len(sizings)
        self._peak_bytes = [0] * len(sizings)
        self._charges: dict[int, tuple[Footprint, ...]] = {}
        self._footprints: dict[int, tuple[Footprint, ...]] = {}
        self._refused_releases = 0
        self._grid = gcd(*(sizing.options.record_rows for sizing in sizings))

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.sizings)

    def promised_bytes(self, stage: int) -> int:
        """All that ``stage`` may promise: the bytes of its arena."""
        return self.sizings[stage].bytes_of(self.capacities[stage])

    def held_bytes(self, stage: int) -> int:
        """What requests hold on ``stage``."""
        return self.sizings[stage].bytes_of(self._held[stage])

    def footprints(self, rows: int) -> tuple[Footprint, ...]:
        """What a sequence of ``rows`` takes on each stage; remembered per block."""
        key = ceil_div(rows, self._grid)
        found = self._footprints.get(key)
        if found is None:
            found = tuple(sizing.footprint(rows) for sizing in self.sizings)
            self._footprints[key] = found
        return found

    def never_fits(self, rows: int) -> tuple[StageShortfall, ...]:
        """Every stage's have and need if an empty pipeline is short for ``rows``; else empty."""
        return self._compare(self.footprints(rows), [Footprint()] * self.num_stages)

    def short_now(self, rows: int) -> tuple[StageShortfall, ...]:
        """What each stage has left and needs if ``rows`` do not fit now; else empty."""
        return self._compare(self.footprints(rows), self._held)

    def charge(self, request: int, rows: int) -> tuple[StageShortfall, ...]:
        """Hold ``rows`` for ``request`` on every stage; empty when done.

        Otherwise nothing changed, and the answer is what each stage has left and needs.
        """
        if request in self._charges:
            raise InternalError(f"request {request} is already charged")
        wanted = self.footprints(rows)
        if short := self._compare(wanted, self._held):
            return short
        self._charges[request] = wanted
        for stage, footprint in enumerate(wanted):
            self._held[stage] = self._held[stage].plus(footprint)
            self._peak_bytes[stage] = max(self._peak_bytes[stage], self.held_bytes(stage))
        return ()

    def release(self, request: int) -> None:
        """Give back all that ``request`` holds; DoubleRelease, counted, if it holds nothing."""
        charged = self._charges.pop(request, None)
        if charged is None:
            self._refused_releases += 1
            raise DoubleRelease(f"request {request} holds nothing in the ledger")
        for stage, footprint in enumerate(charged):
            self._held[stage] = self._held[stage].minus(footprint)

    def charged(self, request: int) -> tuple[Footprint, ...]:
        """What ``request`` holds on each stage; empty if nothing."""
        return self._charges.get(request, ())

    def statistics(self) -> LedgerStatistics:
        """A snapshot in bytes."""
        stages = range(self.num_stages)
        return LedgerStatistics(
            promised_bytes=tuple(self.promised_bytes(stage) for stage in stages),
            held_bytes=tuple(self.held_bytes(stage) for stage in stages),
            peak_held_bytes=tuple(self._peak_bytes),
            requests=len(self._charges),
            refused_releases=self._refused_releases,
        )

    def check(self) -> None:
        """Raise InternalError with the equation unless held = sum of charges <= capacity."""
        for stage, held in enumerate(self._held):
            total = Footprint()
            for charged in self._charges.values():
                total = total.plus(charged[stage])
            if total != held:
                raise InternalError(f"stage {stage}: sum of charges {total} != held {held}")
            if not held.within(self.capacities[stage]):
                raise InternalError(
                    f"stage {stage}: held {held} > capacity {self.capacities[stage]}"
                )

    def _compare(
        self, wanted: Sequence[Footprint], held: Sequence[Footprint]
    ) -> tuple[StageShortfall, ...]:
        if all(
            want.plus(hold).within(capacity)
            for want, hold, capacity in zip(wanted, held, self.capacities, strict=True)
        ):
            return ()
        return tuple(
            self._shortfall(stage, want, hold)
            for stage, (want, hold) in enumerate(zip(wanted, held, strict=True))
        )

    def _shortfall(self, stage: int, want: Footprint, held: Footprint) -> StageShortfall:
        """Bytes of the first pool that is short on ``stage``, or of all pools if none is."""
        free = self.capacities[stage].minus(held)
        for pool, (have, need) in enumerate(zip(free, want, strict=True)):
            if need > have:
                free = Footprint(*(have if p == pool else 0 for p in range(3)))
                want = Footprint(*(need if p == pool else 0 for p in range(3)))
                break
        sizing = self.sizings[stage]
        return StageShortfall(
            stage=stage, have_bytes=sizing.bytes_of(free), need_bytes=sizing.bytes_of(want)
        )
