"""A pool of ids with reference counts. Ids below, bytes above: no tensor comes near.

Free ids are handed out last-in first-out, starting 0, 1, 2, …; so the same calls give the same
ids in every process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.errors import DoubleRelease, InternalError, OutOfRecords


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One line of an id's history; ``references`` is the count after it."""

    what: str
    references: int
    caller: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStatistics:
    """A snapshot. ``refused_releases`` counts double releases, which change nothing."""

    name: str
    capacity: int
    free: int
    used: int
    references: int
    peak_used: int
    refused_releases: int


class Pool:
    """Ids ``[0, capacity)``, each free or held by one or more owners.

    ``record_history`` keeps every id's events (alloc, share, release, evict) with the caller's
    name, and puts them into the error text of a double release.
    """

    def __init__(
        self, capacity: int, name: str = "records", *, record_history: bool = False
    ) -> None:
        if capacity < 0:
            raise InternalError(f"pool {name}: capacity {capacity} is negative")
        self.name = name
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._references = [0] * capacity
        self._peak_used = 0
        self._refused_releases = 0
        self._history: dict[int, list[PoolEvent]] | None = {} if record_history else None

    @property
    def num_free(self) -> int:
        """Ids that ``allocate`` could hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids held by at least one owner."""
        return self.capacity - len(self._free)

    def references(self, record: int) -> int:
        """Owners of ``record``; 0 when it is free."""
        return self._references[self._known(record)]

    def allocate(self, count: int, caller: str = "") -> list[int]:
        """``count`` ids with one owner each; OutOfRecords, and nothing taken, if too few are free."""
        if count < 0:
            raise InternalError(f"pool {self.name}: cannot allocate {count} ids")
        if count > len(self._free):
            raise OutOfRecords(
                f"pool {self.name}: {count} of {self.capacity} wanted, {len(self._free)} free"
            )
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        for record in taken:
            self._references[record] = 1
        self._peak_used = max(self._peak_used, self.num_used)
        self._note("alloc", taken, caller)
        return taken

    def share(self, records: Sequence[int], caller: str = "") -> None:
        """One more owner for each; InternalError, and nothing changed, if one is free."""
        for record in records:
            if self.references(record) == 0:
                raise InternalError(f"pool {self.name}: id {record} is free, it cannot be shared")
        for record in records:
            self._references[record] += 1
        self._note("share", records, caller)

    def release(self, records: Sequence[int], caller: str = "") -> list[int]:
        """One owner less for each; the ids that became free, in order.

        DoubleRelease, counted and with nothing changed, if an id has fewer owners than the call
        takes away.
        """
        return self._give_back(records, "release", caller)

    def evict(self, records: Sequence[int], caller: str = "") -> list[int]:
        """As ``release``, for a cache that drops its own reference; kept apart in the history."""
        return self._give_back(records, "evict", caller)

    def release_all(self) -> None:
        """Forget every owner. May be called twice."""
        self._references = [0] * self.capacity
        self._free = list(range(self.capacity - 1, -1, -1))

    def history(self, record: int) -> tuple[PoolEvent, ...]:
        """The events of ``record``, oldest first; empty unless history is recorded."""
        return tuple((self._history or {}).get(self._known(record), ()))

    def statistics(self) -> PoolStatistics:
        """A snapshot of the counts."""
        return PoolStatistics(
            name=self.name,
            capacity=self.capacity,
            free=self.num_free,
            used=self.num_used,
            references=sum(self._references),
            peak_used=self._peak_used,
            refused_releases=self._refused_releases,
        )

    def check(self) -> None:
        """Raise InternalError with the whole equation unless the books balance."""
        held = sum(1 for count in self._references if count > 0)
        if held + len(self._free) != self.capacity:
            raise InternalError(
                f"pool {self.name}: held {held} + free {len(self._free)} != capacity {self.capacity}"
            )
        if len(set(self._free)) != len(self._free):
            raise InternalError(f"pool {self.name}: an id is twice on the free list")
        for record in self._free:
            if self._references[record] != 0:
                raise InternalError(
                    f"pool {self.name}: id {record} is free with {self._references[record]} owner(s)"
                )

    def _give_back(self, records: Sequence[int], what: str, caller: str) -> list[int]:
        for record, times in Counter(records).items():
            if self.references(record) < times:
                self._refused_releases += 1
                history = "" if self._history is None else f"; history {self.history(record)}"
                raise DoubleRelease(
                    f"pool {self.name}: {caller or 'a caller'} released id {record} {times} time(s),"
                    f" it has {self._references[record]} owner(s){history}"
                )
        freed: list[int] = []
        for record in records:
            self._references[record] -= 1
            if self._references[record] == 0:
                freed.append(record)
        self._free.extend(reversed(freed))
        self._note(what, records, caller)
        return freed

    def _known(self, record: int) -> int:
        if not 0 <= record < self.capacity:
            raise InternalError(f"pool {self.name}: id {record} is not in [0, {self.capacity})")
        return record

    def _note(self, what: str, records: Sequence[int], caller: str) -> None:
        if self._history is not None:
            for record in records:
                event = PoolEvent(what, self._references[record], caller)
                self._history.setdefault(record, []).append(event)
