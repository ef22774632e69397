"""The flat ring by the source's own vectors, and against the paged ring it is the oracle of."""

import random

import pytest
import torch

from memkv_pp.cache.tables import Ring, Table
from memkv_pp.errors import GeometryError, NotResident
from memkv_pp.flat_ring import Contiguous, FlatRing, Rebase, retain_from, retain_in_blocks
from memkv_pp.rings import ALIGNMENT_ROWS, ring_rows


def test_the_rows_are_those_of_both_eras():
    assert ring_rows(512, chunk=4096, slack=0) == 4639
    assert ring_rows(512, chunk=4096, slack=512) == 5151
    assert min(4096, ring_rows(512, chunk=4096, slack=512)) == 4096
    assert ring_rows(32, chunk=4096, slack=512) == 4671


def test_a_chunk_that_does_not_fit_moves_the_window_to_the_front():
    ring = FlatRing(5151, 512)
    assert ring.append_plan(0, 0, 4096) == Contiguous(0)
    plan = ring.append_plan(4096, 3584, 4096)
    assert plan == Rebase(src_row=3584, keep_rows=512, new_base=3584, write_row=512)
    ring.apply_rebase(3584)
    assert ring.can_rewind_to(4095)
    assert not ring.can_rewind_to(4094)
    assert not ring.can_rewind_to(0)


def test_a_restore_copies_the_live_window_alone():
    assert FlatRing(5151, 512).restore_plan(400) == (0, range(400))
    ring, length = FlatRing(5151, 512), 0
    for _ in range(10):
        plan = ring.append_plan(length, retain_from(length, 512, ring.base), 4096)
        if isinstance(plan, Rebase):
            ring.apply_rebase(plan.new_base)
        length += 4096
    assert length == 40960
    assert ring.base > 0
    base, rows = ring.restore_plan(length)
    assert base == (length - 511) // 32 * 32 >= ring.base
    assert len(rows) == length - base <= ring.rows
    with pytest.raises(NotResident, match=r"\[0, 400\) is outside resident"):
        ring.restore_plan(400)


def test_an_append_after_a_rewind_keeps_what_both_need():
    ring = FlatRing(4671, 32, base=4096)
    retained = min((8762 + 10 - 32) // 32 * 32, (8762 - 31) // 32 * 32)
    assert retained == 8704
    plan = ring.append_plan(8762, retained, 10)
    assert plan == Rebase(src_row=4608, keep_rows=58, new_base=8704, write_row=58)
    ring.apply_rebase(8704)
    assert ring.physical_range(8740, 8772) == range(36, 68)
    assert not ring.can_rewind_to(8200)


@pytest.mark.parametrize(
    ("length", "retain", "num_rows", "message"),
    [
        (99, 99, 1, "lapped"),
        (150, 99, 1, "lapped"),
        (150, 151, 1, "lapped"),
        (201, 150, 1, "101 rows in use of 100"),
        (180, 120, 41, "60 rows to keep and 41 new ones do not fit 100"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_nothing_changes(
    length, retain, num_rows, message
):
    ring = FlatRing(100, 8, base=100)
    with pytest.raises(NotResident, match=message):
        ring.append_plan(length, retain, num_rows)
    assert ring.base == 100


def test_views_outside_the_resident_rows_are_refused_never_wrapped():
    ring = FlatRing(100, 8, base=64)
    assert ring.physical_range(64, 164) == range(100)
    for start, end in ((63, 70), (80, 79), (64, 165)):
        with pytest.raises(NotResident, match=rf"view \[{start}, {end}\)"):
            ring.physical_range(start, end)
    with pytest.raises(NotResident, match="cannot go back"):
        ring.apply_rebase(63)
    for rows, window in ((0, 8), (8, 0)):
        with pytest.raises(GeometryError, match="ring of"):
            FlatRing(rows, window)


def test_slack_is_granted_where_it_is_there_and_never_demanded():
    assert retain_from(10_000, 512, 0) == (10_000 - 511 - 512) // 32 * 32
    assert retain_from(10_000, 512, 9_600) == 9_600
    assert retain_from(100, 512, 0) == 0


class FlatRows:
    """A flat ring that holds positions, moved as its plans say."""

    def __init__(self, rows, window):
        self.ring = FlatRing(rows, window)
        self.held = [-1] * rows

    def append(self, length, num_rows, block):
        ring = self.ring
        keep = retain_in_blocks(length, num_rows, ring.rows, block, ring.base)
        plan = ring.append_plan(length, keep, num_rows)
        if isinstance(plan, Rebase):
            kept = self.held[plan.src_row : plan.src_row + plan.keep_rows]
            self.held[: plan.keep_rows] = kept
            ring.apply_rebase(plan.new_base)
        for i in range(num_rows):
            self.held[plan.write_row + i] = length + i

    def read(self, start, end):
        return [self.held[row] for row in self.ring.physical_range(start, end)]


class PagedRows:
    """The paged ring's records, each a list of positions."""

    def __init__(self, rows, window, block):
        self.ring = Ring(rows, block, window)
        self.table = Table(0, torch.empty(0), window=list(range(rows // block))[::-1])
        self.held = [[-1] * block for _ in range(rows // block)]

    def append(self, length, num_rows):
        for position in range(length, length + num_rows):
            self.held[self.record(position)][position % self.ring.block] = position
        self.table.first_resident = self.ring.first_resident(self.table, length + num_rows)

    def record(self, position):
        (record,) = self.ring.records(
            self.table, position // self.ring.block, position // self.ring.block + 1
        )
        return record

    def read(self, start, end):
        block = self.ring.block
        return [self.held[self.record(p)][p % block] for p in range(start, end)]


@pytest.mark.parametrize("seed", range(20))
def test_the_paged_ring_grants_and_refuses_what_the_flat_one_does(seed):
    random_source = random.Random(seed)
    window, block = random_source.randint(1, 40), random_source.choice((1, 4, 16, 32, 24, 64))
    chunk, slack = random_source.randint(1, 48), random_source.randint(0, 40)
    alignment = max(ALIGNMENT_ROWS, block)
    rows = ring_rows(window, chunk=chunk, slack=slack, block_tokens=block, alignment=alignment)
    flat, paged = FlatRows(rows, window), PagedRows(rows, window, block)
    length = longest = refused = rewound = 0
    for _ in range(300):
        if random_source.random() < 0.7:
            num_rows = random_source.randint(1, chunk)
            assert paged.ring.fits(paged.table, length, length + num_rows)
            flat.append(length, num_rows, block)
            paged.append(length, num_rows)
            length += num_rows
            longest = max(longest, length)
        else:
            target = max(length - random_source.randint(0, slack + 60), 0)
            allowed = flat.ring.can_rewind_to(target)
            assert allowed is paged.ring.can_rewind_to(paged.table, target)
            assert allowed or longest - target > slack or ALIGNMENT_ROWS % block
            refused, rewound = refused + (not allowed), rewound + allowed
            length = target if allowed else length
        assert flat.ring.base == paged.table.first_resident
        start = max(length - random_source.randint(0, 2 * rows), 0)
        if start >= paged.table.first_resident:
            expected = list(range(start, length))
            assert flat.read(start, length) == paged.read(start, length) == expected
        else:
            with pytest.raises(NotResident):
                flat.read(start, length)
    assert rewound
    assert refused or longest < 2 * rows
