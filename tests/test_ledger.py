import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memkv_pp.admission.coordinator import Coordinator, CoordinatorConfig
from memkv_pp.admission.ledger import Ledger
from memkv_pp.errors import ConfigError, DoubleRelease, InternalError, StageShortfall
from memkv_pp.fence import Fence
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import uniform_geometry
from memkv_pp.sizing import CacheOptions, Footprint, Layout, size_fence
from memkv_pp.testing.fakes import tiny_sizings
from memkv_pp.wire import Admit, Arrived, Refuse, Request, Wait

SIZINGS = tiny_sizings()
FIND_ONLY = settings(
    phases=[Phase.generate], report_multiple_bugs=False, max_examples=50, database=None
)
# Units of (full, window, state) per stage: 8 blocks of 4 tokens, slots for two sequences.
UNITS = (Footprint(8, 0, 0), Footprint(8, 0, 0), Footprint(8, 8, 4))


def make_ledger(units=UNITS):
    return Ledger(SIZINGS, units)


def shortfalls(*have_need):
    return tuple(
        StageShortfall(stage=stage, have_bytes=have, need_bytes=need)
        for stage, (have, need) in enumerate(have_need)
    )


def test_a_charge_holds_its_bytes_on_every_stage_and_a_release_gives_them_back():
    ledger = make_ledger()
    assert ledger.charge(1, 5) == ()
    # Two blocks: 256 B on stage 0, 512 B on stage 1; on stage 2 256 B full and window, 2 x 768 B.
    assert ledger.statistics().held_bytes == (512, 1024, 2560)
    assert ledger.charged(1) == (Footprint(2, 0, 0), Footprint(2, 0, 0), Footprint(2, 2, 2))
    ledger.release(1)
    statistics = ledger.statistics()
    assert statistics.held_bytes == (0, 0, 0)
    assert statistics.peak_held_bytes == (512, 1024, 2560)
    assert statistics.requests == 0
    ledger.check()


def test_promised_bytes_are_those_of_the_whole_arena():
    assert make_ledger().statistics().promised_bytes == (2048, 4096, 2048 + 2048 + 3072)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_charge_is_made_on_all_stages_or_on_none(stage):
    units = [*UNITS]
    units[stage] = units[stage]._replace(full_records=1)
    ledger = make_ledger(units)
    assert ledger.charge(1, 5) != ()
    assert ledger.statistics().held_bytes == (0, 0, 0)
    assert ledger.charged(1) == ()
    assert ledger.charge(2, 4) == ()
    ledger.check()


def test_a_shortfall_says_what_every_stage_has_left_and_needs():
    ledger = make_ledger()
    ledger.charge(1, 20)
    # Five of eight blocks are held; four are wanted.
    short = shortfalls((768, 1024), (1536, 2048), (768, 1024))
    assert ledger.charge(2, 16) == short
    assert ledger.short_now(16) == short
    assert ledger.never_fits(16) == ()


def test_a_stage_that_is_not_short_reports_the_bytes_of_all_its_pools():
    ledger = make_ledger((Footprint(1, 0, 0), Footprint(8, 0, 0), Footprint(8, 8, 4)))
    assert ledger.charge(1, 8) == shortfalls((256, 512), (4096, 1024), (7168, 2560))


@pytest.mark.parametrize(
    ("units", "have_need"),
    [
        (Footprint(1, 8, 4), (256, 512)),
        (Footprint(8, 1, 4), (256, 512)),
        (Footprint(8, 8, 1), (768, 1536)),
    ],
    ids=["full records", "window records", "state slots"],
)
def test_a_shortfall_is_told_in_bytes_of_the_pool_that_binds(units, have_need):
    ledger = make_ledger((*UNITS[:2], units))
    assert ledger.charge(1, 8)[2] == shortfalls((0, 0), (0, 0), have_need)[2]


def test_a_request_that_fits_exactly_is_admitted_and_one_row_more_is_not():
    ledger = make_ledger()
    assert ledger.never_fits(32) == ()
    assert ledger.never_fits(33) == shortfalls((2048, 2304), (4096, 4608), (2048, 2304))
    assert ledger.charge(1, 32) == ()
    assert ledger.statistics().held_bytes[0] == ledger.promised_bytes(0)
    assert ledger.charge(2, 1) != ()


def test_a_ring_stops_growing_at_its_rows():
    ledger = make_ledger()
    # A ring has 40 rows: ten window records, however long the sequence.
    assert ledger.footprints(40)[2].window_records == 10
    assert ledger.footprints(400)[2] == Footprint(100, 10, 2)


def test_a_double_release_is_refused_counted_and_changes_nothing():
    ledger = make_ledger()
    ledger.charge(1, 4)
    ledger.charge(2, 4)
    ledger.release(1)
    held = ledger.statistics().held_bytes
    with pytest.raises(DoubleRelease, match="request 1 holds nothing"):
        ledger.release(1)
    assert ledger.statistics().held_bytes == held
    assert ledger.statistics().refused_releases == 1
    ledger.check()


def test_a_request_cannot_be_charged_twice():
    ledger = make_ledger()
    ledger.charge(1, 4)
    with pytest.raises(InternalError, match="request 1 is already charged"):
        ledger.charge(1, 4)
    ledger.check()


def test_check_tells_the_equation_when_a_stage_holds_what_nobody_is_charged_for():
    ledger = make_ledger()
    ledger.charge(1, 8)
    ledger._held[1] = Footprint(3, 0, 0)
    with pytest.raises(
        InternalError,
        match=r"stage 1: sum of charges Footprint\(full_records=2,.*\) != held .*full_records=3",
    ):
        ledger.check()


def test_check_tells_when_a_stage_holds_more_than_its_capacity():
    ledger = make_ledger()
    ledger.charge(1, 8)
    ledger.capacities = (UNITS[0], Footprint(1, 0, 0), UNITS[2])
    with pytest.raises(InternalError, match=r"stage 1: held .*=2.* > capacity .*=1"):
        ledger.check()


def test_a_ledger_needs_a_capacity_for_every_stage():
    with pytest.raises(InternalError, match="3 sizings for 2 capacities"):
        Ledger(SIZINGS, UNITS[:2])
    with pytest.raises(InternalError, match="0 sizings"):
        Ledger((), ())


def test_stages_with_blocks_of_different_sizes_are_each_charged_their_own():
    coarse = tiny_sizings(1, block_tokens=6)
    ledger = Ledger((SIZINGS[0], *coarse), (Footprint(9, 0, 0),) * 2)
    for rows in (8, 5, 7, 6, 12, 13):
        full = tuple(footprint.full_records for footprint in ledger.footprints(rows))
        assert full == (-(-rows // 4), -(-rows // 6)), rows


def test_a_flat_record_refuses_rows_beyond_it_whatever_was_asked_before():
    options = CacheOptions(layout=Layout.FLAT, flat_rows=100)
    geometry = uniform_geometry(1, kv_heads=1, head_size=32)
    sizings = size_fence(geometry, (parse_pair("f16"),), Fence((0, 1)), options)
    ledger = Ledger(sizings, (Footprint(2, 0, 0),))
    assert ledger.footprints(100) == (Footprint(1, 0, 0),)
    with pytest.raises(ConfigError, match="101 rows do not fit a flat record of 100"):
        ledger.footprints(101)


# R9: 13 blocks of 8,192 tokens of which one is reserved; 98,304 tokens are usable.


def r9_coordinator(blocks):
    geometry = uniform_geometry(len(blocks), kv_heads=1, head_size=32)
    stages = len(blocks)
    sizings = size_fence(
        geometry,
        (parse_pair("q8_0:q5_1"),) * stages,
        Fence(tuple(range(stages + 1))),
        CacheOptions(block_tokens=8192),
    )
    ledger = Ledger(sizings, [Footprint(count, 0, 0) for count in blocks])
    return Coordinator(ledger, CoordinatorConfig(waves=2, context_tokens=106_496))


BLOCK_BYTES = 8192 * (34 + 24)


def arrive(coordinator, request, prompt_tokens, max_new=1):
    made = Request(request=request, prompt=(1,) * prompt_tokens, max_new=max_new)
    (command,) = coordinator.handle(Arrived(made), 0.0)
    return command


def test_r9_a_request_that_can_never_fit_is_refused_at_submit_and_small_ones_go_on():
    coordinator = r9_coordinator((12, 12, 12))
    assert arrive(coordinator, 1, 98_304) == Admit(1)
    for request, tokens in ((2, 98_305), (3, 106_496)):
        refusal = arrive(coordinator, request, tokens)
        assert isinstance(refusal, Refuse)
        assert refusal.reason == "capacity"
        assert refusal.stages == shortfalls(*[(12 * BLOCK_BYTES, 13 * BLOCK_BYTES)] * 3)
        assert f"{tokens} rows do not fit: stage 0 has {12 * BLOCK_BYTES}" in refusal.message
    for request in range(4, 14):
        assert isinstance(arrive(coordinator, request, 100), Wait)
    assert coordinator.statistics().waiting == 10
    coordinator.check()


def test_r9_small_requests_are_admitted_after_refusals():
    coordinator = r9_coordinator((12, 12, 12))
    assert isinstance(arrive(coordinator, 1, 98_305), Refuse)
    for request in range(2, 12):
        assert arrive(coordinator, request, 100) == Admit(request)
    assert coordinator.statistics().refused == 1


def test_r9_one_stage_of_three_that_is_too_small_refuses_and_is_named():
    coordinator = r9_coordinator((20, 20, 12))
    assert arrive(coordinator, 1, 98_304) == Admit(1)
    refusal = arrive(coordinator, 2, 98_305)
    assert isinstance(refusal, Refuse)
    assert refusal.stages == shortfalls(
        (20 * BLOCK_BYTES, 13 * BLOCK_BYTES),
        (20 * BLOCK_BYTES, 13 * BLOCK_BYTES),
        (12 * BLOCK_BYTES, 13 * BLOCK_BYTES),
    )


def test_r9_a_prompt_that_fits_but_not_with_its_new_tokens_is_refused():
    coordinator = r9_coordinator((12, 12, 12))
    refusal = arrive(coordinator, 1, 98_304, max_new=2)
    assert isinstance(refusal, Refuse)
    assert refusal.reason == "capacity"
    assert "98305 rows" in refusal.message
    assert "--max-new" in refusal.hint
    assert arrive(coordinator, 2, 98_304 - 1, max_new=2) == Admit(2)


class LedgerMachine(RuleBasedStateMachine):
    """The model: rows by request; what a stage holds is counted anew from them each time."""

    ledger_class = Ledger

    @initialize(
        blocks=st.tuples(*[st.integers(1, 12)] * 3),
        rings=st.integers(1, 12),
        pairs=st.integers(1, 4),
    )
    def build(self, blocks, rings, pairs):
        self.capacities = (
            (blocks[0], 0, 0),
            (blocks[1], 0, 0),
            (blocks[2], rings, 2 * pairs),
        )
        self.ledger = self.ledger_class(SIZINGS, [Footprint(*units) for units in self.capacities])
        self.rows: dict[int, int] = {}
        self.next_request = 0
        self.refused = 0

    def held(self, rows_by_request):
        blocks = sum(-(-rows // 4) for rows in rows_by_request)
        windows = sum(-(-min(rows, 40) // 4) for rows in rows_by_request)
        slots = 2 * len(rows_by_request)
        return ((blocks, 0, 0), (blocks, 0, 0), (blocks, windows, slots))

    @rule(rows=st.integers(1, 60))
    def charge(self, rows):
        fits = all(
            used <= most
            for used_units, units in zip(
                self.held([*self.rows.values(), rows]), self.capacities, strict=True
            )
            for used, most in zip(used_units, units, strict=True)
        )
        short = self.ledger.charge(self.next_request, rows)
        assert (short == ()) == fits
        if fits:
            self.rows[self.next_request] = rows
        else:
            assert [shortfall.stage for shortfall in short] == [0, 1, 2]
            assert any(shortfall.have_bytes < shortfall.need_bytes for shortfall in short)
        self.next_request += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.sampled_from(sorted(self.rows)))
        self.ledger.release(request)
        del self.rows[request]

    @rule(request=st.integers(0, 50))
    def release_twice(self, request):
        if request in self.rows:
            return
        with pytest.raises(DoubleRelease):
            self.ledger.release(request)
        self.refused += 1

    @invariant()
    def books_agree(self):
        self.ledger.check()
        statistics = self.ledger.statistics()
        held = self.held(list(self.rows.values()))
        expected = tuple(
            sizing.bytes_of(Footprint(*units)) for sizing, units in zip(SIZINGS, held, strict=True)
        )
        assert statistics.held_bytes == expected, "the ledger holds other bytes than its requests"
        assert statistics.requests == len(self.rows)
        assert statistics.refused_releases == self.refused
        assert all(
            now <= peak <= most
            for now, peak, most in zip(
                expected, statistics.peak_held_bytes, statistics.promised_bytes, strict=True
            )
        )


@pytest.mark.slow
def test_any_sequence_of_charges_and_releases_agrees_with_counting_anew():
    run_state_machine_as_test(LedgerMachine)


class ForgetfulLedger(Ledger):
    """Does not charge the last stage."""

    def charge(self, request, rows):
        short = super().charge(request, rows)
        if not short:
            wanted = self._charges[request]
            self._charges[request] = (*wanted[:-1], Footprint())
            self._held[-1] = self._held[-1].minus(wanted[-1])
        return short


@pytest.mark.slow
def test_the_machine_finds_a_ledger_that_charges_one_stage_less():
    class Forgetful(LedgerMachine):
        ledger_class = ForgetfulLedger

    with pytest.raises(AssertionError, match="holds other bytes"):
        run_state_machine_as_test(Forgetful, settings=FIND_ONLY)
