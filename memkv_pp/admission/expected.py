"""What every stage must hold after the last formed plan: the other side of the digests."""

from memkv_pp.admission.ledger import Ledger
from memkv_pp.sizing import Footprint
from memkv_pp.wire import PoolBytes


class ExpectedUse:
    """Rows of every open sequence, and the units they take on each stage."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rows: dict[int, int] = {}
        self.used = [Footprint()] * ledger.num_stages

    @property
    def num_open(self) -> int:
        """Sequences that exist on the stages."""
        return len(self._rows)

    def extend(self, sequence: int, rows: int) -> None:
        """The sequence has ``rows`` from the next plan on; the first call opens it."""
        self._move(self._rows.get(sequence, 0), rows)
        self._rows[sequence] = rows

    def close(self, sequence: int) -> bool:
        """The next plan closes the sequence; False if it was never opened."""
        rows = self._rows.pop(sequence, 0)
        self._move(rows, 0)
        return rows > 0

    def clear(self) -> None:
        """Nothing is held anywhere."""
        self._rows.clear()
        self.used = [Footprint()] * self._ledger.num_stages

    def pool_bytes(self) -> tuple[PoolBytes, ...]:
        """The bytes in use on each stage, by pool."""
        return tuple(
            PoolBytes(
                used.full_records * sizing.record_bytes,
                used.window_records * sizing.window_record_bytes,
                used.state_slots * sizing.slot_bytes,
            )
            for sizing, used in zip(self._ledger.sizings, self.used, strict=True)
        )

    def _move(self, before: int, after: int) -> None:
        old, new = self._ledger.footprints(before), self._ledger.footprints(after)
        if old is not new:
            for stage, used in enumerate(self.used):
                self.used[stage] = used.minus(old[stage]).plus(new[stage])
