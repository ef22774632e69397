from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from memkv_pp.errors import DoubleRelease, InternalError, MemkvError, OutOfRecords
from memkv_pp.pools import Pool


def test_ids_start_at_zero_and_the_last_one_back_is_the_first_one_out():
    pool = Pool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.release([1]) == [1]
    assert pool.allocate(2) == [1, 3]


def test_released_ids_come_back_in_the_order_they_were_given():
    pool = Pool(3)
    ids = pool.allocate(3)
    assert pool.release(ids) == [0, 1, 2]
    assert pool.allocate(3) == [0, 1, 2]


def test_a_refused_allocation_takes_nothing_and_says_how_many_there_are():
    pool = Pool(3, "slots")
    pool.allocate(2)
    with pytest.raises(OutOfRecords, match="pool slots: 2 of 3 wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_shared_id_is_free_only_when_its_last_owner_lets_go():
    pool = Pool(2)
    (record,) = pool.allocate(1)
    pool.share([record])
    assert pool.release([record]) == []
    assert pool.references(record) == 1
    assert pool.evict([record]) == [record]
    assert pool.num_free == 2


def test_a_free_id_cannot_be_shared_and_a_refusal_changes_nothing():
    pool = Pool(2)
    pool.allocate(1)
    with pytest.raises(InternalError, match="id 1 is free"):
        pool.share([0, 1])
    assert pool.references(0) == 1


def test_a_double_release_is_found_counted_and_changes_nothing():
    pool = Pool(3, record_history=True)
    pool.allocate(2, "alice")
    pool.release([0], "alice")
    with pytest.raises(DoubleRelease, match=r"bob released id 0 .* 0 owner.*alice"):
        pool.release([1, 0], "bob")
    assert pool.references(1) == 1
    assert pool.statistics().refused_releases == 1
    pool.check()


def test_one_call_cannot_take_away_more_owners_than_an_id_has():
    pool = Pool(2)
    pool.allocate(1)
    with pytest.raises(DoubleRelease, match="released id 0 2 time"):
        pool.release([0, 0])
    pool.share([0])
    assert pool.release([0, 0]) == [0]


def test_the_history_of_an_id_names_every_caller():
    pool = Pool(1, record_history=True)
    pool.allocate(1, "a")
    pool.share([0], "b")
    pool.release([0], "a")
    pool.evict([0], "b")
    assert [(e.what, e.references, e.caller) for e in pool.history(0)] == [
        ("alloc", 1, "a"), ("share", 2, "b"), ("release", 1, "a"), ("evict", 0, "b"),
    ]  # fmt: skip
    assert Pool(1).history(0) == ()


@pytest.mark.parametrize("record", [-1, 2])
def test_an_id_that_does_not_exist_is_our_bug(record):
    pool = Pool(2)
    for use in (pool.references, pool.history):
        with pytest.raises(InternalError, match=r"not in \[0, 2\)"):
            use(record)
    with pytest.raises(InternalError):
        pool.release([record])


def test_negative_counts_and_capacities_are_our_bug():
    with pytest.raises(InternalError, match="capacity -1"):
        Pool(-1)
    with pytest.raises(InternalError, match="cannot allocate -1"):
        Pool(1).allocate(-1)


def test_taking_none_of_a_full_pool_takes_none():
    pool = Pool(3)
    assert pool.allocate(0) == []
    assert pool.num_free == 3
    assert Pool(0).allocate(0) == []


def test_forgetting_all_owners_can_be_done_twice():
    pool = Pool(3)
    pool.allocate(2)
    pool.release_all()
    pool.release_all()
    pool.check()
    assert pool.allocate(3) == [0, 1, 2]


def test_the_statistics_count_owners_and_remember_the_peak():
    pool = Pool(5, "windows")
    pool.allocate(4)
    pool.share([1, 2])
    pool.release([0, 3])
    found = pool.statistics()
    assert (found.name, found.capacity, found.free, found.used) == ("windows", 5, 3, 2)
    assert (found.references, found.peak_used, found.refused_releases) == (4, 4, 0)


class PoolMachine(RuleBasedStateMachine):
    """Compares a pool with a count of owners per id. A handle is the ids one owner holds."""

    handles = Bundle("handles")
    pool_class = Pool
    pool: Pool

    @initialize(capacity=st.integers(0, 12))
    def build(self, capacity: int) -> None:
        self.pool = self.pool_class(capacity)
        self.owners: Counter[int] = Counter()
        self.refused = 0

    @rule(target=handles, count=st.integers(0, 6))
    def allocate(self, count: int) -> object:
        free_before = self.pool.num_free
        if count > free_before:
            with pytest.raises(OutOfRecords):
                self.pool.allocate(count)
            assert self.pool.num_free == free_before, "a refused allocation changes nothing"
            return multiple()
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count
        assert not any(self.owners[i] for i in ids), "handed out an id that someone holds"
        self.owners.update(ids)
        return tuple(ids)

    @rule(target=handles, ids=handles)
    def share(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        self.pool.share(ids)
        self.owners.update(ids)
        return ids

    @rule(ids=consumes(handles), evicts=st.booleans())
    def give_back(self, ids: tuple[int, ...], evicts: bool) -> None:
        freed = (self.pool.evict if evicts else self.pool.release)(ids)
        self.owners.subtract(ids)
        assert freed == [i for i in ids if self.owners[i] == 0]

    @rule(data=st.data())
    def release_once_too_often(self, data: st.DataObject) -> None:
        if self.pool.capacity == 0:
            return
        record = data.draw(st.integers(0, self.pool.capacity - 1))
        with pytest.raises(DoubleRelease):
            self.pool.release([record] * (self.owners[record] + 1))
        self.refused += 1

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        counts = [self.pool.references(i) for i in range(self.pool.capacity)]
        assert counts == [self.owners[i] for i in range(self.pool.capacity)]
        assert self.pool.num_used == sum(1 for count in counts if count)
        assert self.pool.statistics().refused_releases == self.refused


MACHINE_SETTINGS = settings(max_examples=60, stateful_step_count=20)


@pytest.mark.slow
def test_a_pool_agrees_with_a_count_of_owners_whatever_is_done_to_it():
    run_state_machine_as_test(PoolMachine, settings=MACHINE_SETTINGS)


class ForgetsSharing(Pool):
    def share(self, records: Sequence[int], caller: str = "") -> None:
        super().share(records[:-1], caller)


class FreesTwice(Pool):
    def release(self, records: Sequence[int], caller: str = "") -> list[int]:
        freed = super().release(records, caller)
        self._free.extend(freed[:1])
        return freed


class AcceptsDoubleRelease(Pool):
    def release(self, records: Sequence[int], caller: str = "") -> list[int]:
        try:
            return super().release(records, caller)
        except DoubleRelease:
            return []


@pytest.mark.slow
@pytest.mark.parametrize("broken", [ForgetsSharing, FreesTwice, AcceptsDoubleRelease])
def test_the_machine_finds_a_bug_planted_in_the_pool(broken):
    class Canary(PoolMachine):
        pool_class = broken

    quiet = settings(MACHINE_SETTINGS, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, MemkvError, pytest.fail.Exception)):
        run_state_machine_as_test(Canary, settings=quiet)
