"""The coordinator under any interleaving, its growth, and canaries that must be found."""

import random
import time
from statistics import median
from typing import ClassVar

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
from memkv_pp.errors import DoubleRelease, InternalError
from memkv_pp.pools import Pool
from memkv_pp.sizing import Footprint
from memkv_pp.testing.fakes import FakeStages, fake_token, tiny_sizings
from memkv_pp.testing.stepped import SteppedPipeline, replay
from memkv_pp.wire import Arrived, Cancelled, Emit, Request, Sampling, Tick

DEADLINE_S = 10.0
CONTEXT_TOKENS = 30
FIND_ONLY = settings(
    phases=[Phase.generate], report_multiple_bugs=False, max_examples=50, database=None
)


def make_coordinator(
    *, stages=3, blocks=6, waves=2, chunk=4, ledger_class=Ledger, coordinator_class=Coordinator
):
    sizings = tiny_sizings(stages)
    units = [
        Footprint(
            blocks if sizing.full else 0,
            blocks if sizing.window else 0,
            6 if sizing.state else 0,
        )
        for sizing in sizings
    ]
    config = CoordinatorConfig(
        waves=waves,
        prefill_chunk=chunk,
        context_tokens=CONTEXT_TOKENS,
        vocabulary_size=1000,
        plan_deadline_s=DEADLINE_S,
    )
    return coordinator_class(ledger_class(sizings, units), config)


def make_pipeline(**knobs):
    coordinator = make_coordinator(**knobs)
    ledger = coordinator.ledger
    return SteppedPipeline(coordinator, FakeStages(ledger.sizings, ledger.capacities))


def make_request(request, prompt_tokens, max_new, end_after):
    """A request whose token number ``end_after`` ends it, if it is drawn."""
    return Request(
        request=request,
        prompt=tuple((request + i) % 1000 for i in range(prompt_tokens)),
        max_new=max_new,
        sampling=Sampling(prompt_index=request),
        end_ids=frozenset({fake_token(request, prompt_tokens - 1 + end_after)}),
    )


def expected_answer(request):
    """The tokens and the finish reason that the fake's function leads to."""
    tokens = []
    for i in range(request.max_new):
        token = fake_token(request.request, len(request.prompt) - 1 + i)
        if token in request.end_ids:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


def judge_request(pipeline, request):
    """What the request was told must follow from its own tokens alone, however it ended."""
    expected, finish = expected_answer(request)
    found = pipeline.tokens.get(request.request, [])
    reason = pipeline.reason(request.request)
    if reason in ("stop", "length"):
        assert (found, reason) == (expected, finish)
    else:
        assert found == expected[: len(found)]
    for stage in pipeline.stages.stages:
        fed = stage.inputs.get(request.request, [])
        assert fed == [*request.prompt, *expected][: len(fed)], "fed what was never drawn"


def judge_the_end(pipeline, requests):
    """Everything ended once and nothing is left anywhere."""
    lost = pipeline.coordinator.lost
    assert lost is None or lost.kind == "StageLost", f"nobody broke this stage: {lost.message}"
    for request in requests:
        judge_request(pipeline, request)
        which = request.request
        assert pipeline.reason(which) != "", f"request {which} has no ending"
        assert (which in pipeline.released) != pipeline.reason(which).startswith("refused")
    statistics = pipeline.coordinator.statistics()
    assert (statistics.waiting, statistics.live, statistics.in_flight) == (0, 0, 0)
    ledger = pipeline.coordinator.ledger.statistics()
    assert ledger.held_bytes == (0,) * len(ledger.held_bytes)
    assert ledger.refused_releases == 0
    if lost is None:
        assert all(stage.used() == Footprint() for stage in pipeline.stages.stages)
        assert all(stage.num_sequences == 0 for stage in pipeline.stages.stages)
    else:
        reasons = {e.error for e in pipeline.endings.values() if isinstance(e, Emit) and e.error}
        assert reasons <= {(lost.kind, lost.message)}


class CoordinatorMachine(RuleBasedStateMachine):
    """Any legal interleaving of arrivals, cancels, answers, ticks and, rarely, a lost stage."""

    classes: ClassVar[dict[str, type]] = {}

    @initialize(
        stages=st.integers(1, 4),
        blocks=st.integers(2, 8),
        waves=st.integers(1, 4),
        chunk=st.integers(1, 6),
    )
    def build(self, stages, blocks, waves, chunk):
        self.knobs = {"stages": stages, "blocks": blocks, "waves": waves, "chunk": chunk}
        self.pipeline = make_pipeline(**self.knobs, **self.classes)
        self.requests: list[Request] = []
        self.now = 0.0
        self.sound = True

    def handle(self, event):
        self.sound = False
        self.pipeline.handle(event, self.now)
        self.sound = True

    @rule(
        prompt_tokens=st.integers(0, 14),
        max_new=st.integers(0, 8),
        end_after=st.integers(0, 9),
    )
    def arrive(self, prompt_tokens, max_new, end_after):
        request = make_request(len(self.requests), prompt_tokens, max_new, end_after)
        self.requests.append(request)
        self.handle(Arrived(request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        which = data.draw(st.integers(0, len(self.requests) - 1))
        before = self.pipeline.reason(which)
        self.handle(Cancelled(which))
        assert self.pipeline.reason(which) == before or not before

    def answer(self, data):
        answerable = self.pipeline.stages.answerable()
        if answerable:
            self.handle(self.pipeline.stages.answer(data.draw(st.sampled_from(answerable))))

    # Twice, so that answers come about as often as everything else together.
    answer_one = rule(data=st.data())(answer)
    answer_another = rule(data=st.data())(answer)

    @rule(seconds=st.floats(0.0, 1.0))
    def tick(self, seconds):
        self.now += seconds
        self.handle(Tick())

    @rule(chance=st.integers(0, 99), data=st.data())
    def break_something(self, chance, data):
        if chance == 41:
            stage = data.draw(st.integers(0, self.knobs["stages"] - 1))
            self.pipeline.stages.lose(stage)
        elif chance == 57:
            self.now += DEADLINE_S
            self.handle(Tick())

    @invariant()
    def every_token_follows_from_its_request(self):
        for request in self.requests:
            judge_request(self.pipeline, request)

    def teardown(self):
        if not self.sound:
            return
        self.pipeline.drain(now=self.now)
        judge_the_end(self.pipeline, self.requests)
        replay(make_coordinator(**self.knobs), self.pipeline.log)


@pytest.mark.slow
def test_any_interleaving_serves_every_request_its_own_tokens_and_leaves_nothing():
    run_state_machine_as_test(CoordinatorMachine)


class RandomRun:
    """Seeded random operations on pools, ledger and coordinator; books are checked after each."""

    def __init__(self, seed, **classes):
        self.random = random.Random(seed)
        self.classes = classes
        self.operations = 0
        self.finished = 0
        self.loose = Pool(16, "loose")
        self.loose_held: list[list[int]] = []
        self.begin()

    def begin(self):
        self.pipeline = make_pipeline(
            stages=self.random.randint(1, 4),
            blocks=self.random.randint(2, 8),
            waves=self.random.randint(1, 4),
            chunk=self.random.randint(1, 6),
            **self.classes,
        )
        self.requests = []
        self.now = 0.0

    def end(self):
        """Drain, judge, and begin anew."""
        self.pipeline.drain(self.random.choice, now=self.now)
        judge_the_end(self.pipeline, self.requests)
        self.finished += len(self.requests)

    def step(self):
        self.operations += 1
        chosen = self.random.random()
        answerable = self.pipeline.stages.answerable()
        if chosen < 0.002:
            self.pipeline.stages.lose(self.random.randrange(len(self.pipeline.stages.stages)))
        elif chosen < 0.006:
            self.end()
            self.begin()
        elif chosen < 0.1:
            self.use_the_pool()
        elif chosen < 0.2:
            self.now += self.random.random()
            self.pipeline.handle(Tick(), self.now)
        elif chosen < 0.25 and self.requests:
            self.pipeline.handle(Cancelled(self.random.randrange(len(self.requests))), self.now)
        elif chosen < 0.4 or not answerable:
            request = make_request(
                len(self.requests),
                self.random.randint(0, 14),
                self.random.randint(0, 8),
                self.random.randint(0, 9),
            )
            self.requests.append(request)
            self.pipeline.handle(Arrived(request), self.now)
        else:
            self.pipeline.answer(self.random.choice(answerable), self.now)
        self.check()

    def steps(self, count):
        for _ in range(count):
            self.step()

    def use_the_pool(self):
        if self.loose_held and self.random.random() < 0.5:
            self.loose.release(self.loose_held.pop())
        else:
            count = min(self.random.randint(0, 4), self.loose.num_free)
            self.loose_held.append(self.loose.allocate(count))

    def check(self):
        self.loose.check()
        assert self.loose.num_used == sum(map(len, self.loose_held))
        self.pipeline.coordinator.check()
        self.pipeline.stages.check()


@pytest.mark.slow
def test_the_books_balance_after_each_of_ten_thousand_random_operations():
    run = RandomRun(seed=5)
    run.steps(10_000)
    run.end()
    assert run.operations >= 10_000
    assert run.finished > 500, "the run must have served something"


class LedgerThatReleasesTwice(Ledger):
    """Gives the bytes of a request back twice, past its own guard."""

    def release(self, request):
        charged = self.charged(request)
        super().release(request)
        self._held = [held.minus(units) for held, units in zip(self._held, charged, strict=True)]


class CoordinatorThatReleasesTwice(Coordinator):
    """Releases what it has just closed."""

    def _close_sequences(self, commands):
        closing = tuple(self._closing)
        on_stages = super()._close_sequences(commands)
        for request in closing:
            self.ledger.release(request)
        return on_stages


class LedgerThatForgetsTheLastStage(Ledger):
    """Charges one stage less, and keeps its own books in order."""

    def charge(self, request, rows):
        short = super().charge(request, rows)
        if not short:
            wanted = self._charges[request]
            self._charges[request] = (*wanted[:-1], Footprint())
            self._held[-1] = self._held[-1].minus(wanted[-1])
        return short


class LedgerThatForgetsToRelease(Ledger):
    """Keeps the bytes of whoever leaves."""

    def release(self, request):
        self.charged(request)


class CoordinatorThatForgetsToClose(Coordinator):
    """Returns a finished sequence's bytes but does not tell the stages."""

    def _close_sequences(self, commands):
        super()._close_sequences(commands)
        return ()


CANARIES = {
    "the ledger releases twice": (
        {"ledger_class": LedgerThatReleasesTwice},
        InternalError,
        "sum of charges .* != held",
    ),
    "the coordinator releases twice": (
        {"coordinator_class": CoordinatorThatReleasesTwice},
        DoubleRelease,
        "holds nothing in the ledger",
    ),
    "the ledger charges one stage less": (
        {"ledger_class": LedgerThatForgetsTheLastStage},
        InternalError,
        "used .* > held .* by live requests",
    ),
    "the ledger keeps what was released": (
        {"ledger_class": LedgerThatForgetsToRelease},
        InternalError,
        "charged requests .* != live",
    ),
    "the stages are not told to close": (
        {"coordinator_class": CoordinatorThatForgetsToClose},
        AssertionError,
        "nobody broke this stage: stage . holds .* the ledger expects",
    ),
}


@pytest.mark.parametrize("name", CANARIES)
def test_a_planted_fault_is_found_within_ten_thousand_operations(name):
    classes, error, message = CANARIES[name]
    run = RandomRun(seed=5, **classes)
    with pytest.raises(error, match=message):
        run.steps(10_000)
    assert run.operations < 10_000


def test_a_stage_that_releases_an_id_twice_is_found():
    pipeline = make_pipeline()
    pipeline.start()
    pipeline.handle(Arrived(make_request(0, 3, 2, 9)))
    pipeline.drain()
    pool = pipeline.stages.stages[0]._pools[0]
    with pytest.raises(DoubleRelease, match="full records of stage 0"):
        pool.release([0])
    assert pool.statistics().refused_releases == 1
    pool._free.append(0)
    with pytest.raises(InternalError, match=r"held 0 \+ free 7 != capacity 6"):
        pipeline.stages.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [{"ledger_class": LedgerThatReleasesTwice}, {"ledger_class": LedgerThatForgetsTheLastStage}],
)
def test_the_machine_finds_a_planted_fault(planted):
    class Planted(CoordinatorMachine):
        classes = planted

    with pytest.raises(InternalError, match=r"stage \d"):
        run_state_machine_as_test(Planted, settings=FIND_ONLY)


def waiting_pipeline(num_waiting):
    """One long decoding request holds everything, ``num_waiting`` stand behind it."""
    sizings = tiny_sizings(2)
    coordinator = Coordinator(
        Ledger(sizings, [Footprint(500, 0, 0)] * 2), CoordinatorConfig(waves=1)
    )
    pipeline = SteppedPipeline(coordinator, FakeStages(sizings, coordinator.ledger.capacities))
    pipeline.start()
    for request in range(1 + num_waiting):
        made = Request(request=request, prompt=(1,), max_new=2000)
        coordinator_commands = coordinator.handle(Arrived(made), 0.0)
        for command in coordinator_commands:
            pipeline._carry_out(command)
    assert coordinator.statistics().waiting == num_waiting
    return pipeline


def seconds_of_a_decode_step(pipeline):
    """The coordinator's time for both stages' answers to one plan."""
    spent = 0.0
    for stage in (0, 1):
        event = pipeline.stages.answer(stage)
        started = time.perf_counter()
        commands = pipeline.coordinator.handle(event, 0.0)
        spent += time.perf_counter() - started
        for command in commands:
            pipeline._carry_out(command)
    return spent


@pytest.mark.slow
def test_handling_with_a_thousand_waiting_costs_under_twice_that_with_ten():
    few, many = waiting_pipeline(10), waiting_pipeline(1000)
    pairs = [(seconds_of_a_decode_step(few), seconds_of_a_decode_step(many)) for _ in range(500)]
    assert median(p[1] for p in pairs) < 2 * median(p[0] for p in pairs)


@pytest.mark.slow
def test_an_arrival_behind_a_thousand_waiting_costs_under_twice_that_behind_ten():
    few, many = waiting_pipeline(10), waiting_pipeline(1000)

    def seconds(pipeline, request):
        event = Arrived(Request(request=request, prompt=(1,), max_new=2000))
        started = time.perf_counter()
        pipeline.coordinator.handle(event, 0.0)
        spent = time.perf_counter() - started
        pipeline.coordinator.handle(Cancelled(request), 0.0)
        return spent

    pairs = [(seconds(few, 5000), seconds(many, 5000)) for _ in range(500)]
    assert median(p[1] for p in pairs) < 2 * median(p[0] for p in pairs)
