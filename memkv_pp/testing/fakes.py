"""Stages without tensors: they keep the books of a real pipeline and answer when they are told to.

``FakeStages`` is stepped by hand, so that a test chooses the interleaving; ``FakePort`` puts it
behind the driver's port.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from memkv_pp.errors import InternalError, MemkvError, PlanOrderError
from memkv_pp.fence import Fence
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.pools import Pool
from memkv_pp.sizing import CacheOptions, Footprint, StageSizing, size_fence
from memkv_pp.testing.geometries import full_layer, recurrent_layer, sliding_layer
from memkv_pp.wire import NO_TOKEN, Plan, PoolBytes, Rows, StageLost, StageReady, StepDone, Tick

FakeAnswer = StageReady | StepDone | StageLost

FAKE_VOCABULARY = 1000
FAKE_COMPUTE_NS = 1000


def fake_token(sequence: int, position: int) -> int:
    """The token that fake stages draw after ``position`` of ``sequence``, in [0, 1000)."""
    return (sequence * 7919 + position * 104_729 + 17) % FAKE_VOCABULARY


def tiny_sizings(num_stages: int = 3, *, block_tokens: int = 4) -> tuple[StageSizing, ...]:
    """Up to four unequal stages with blocks of four tokens, for tests of what is above them.

    Stage 0 has one full layer, stage 1 two, stage 2 a full, a sliding (ring of 40 rows) and a
    recurrent layer, stage 3 only a recurrent one.
    """
    full, recurrent = full_layer(1, 32), recurrent_layer(key_groups=1, value_heads=1, state_size=8)
    stages = ((full,), (full, full), (full, sliding_layer(1, 32, 4), recurrent), (recurrent,))
    layers = [layer for stage in stages[:num_stages] for layer in stage]
    cuts = [sum(map(len, stages[:count])) for count in range(num_stages + 1)]
    options = CacheOptions(block_tokens=block_tokens, prefill_chunk=4, rewind_slack=0)
    pairs = (parse_pair("q8_0:q5_1"),) * len(layers)
    geometry = ModelGeometry(name="tiny", family="tiny", layers=tuple(layers))
    return size_fence(geometry, pairs, Fence(tuple(cuts)), options)


class FaultKind(StrEnum):
    """What goes wrong on a stage.

    ``LENGTH``: the plan's first sequence keeps one block of rows too many, until it is closed.
    ``BYTES``: from that plan on, the stage says it uses one byte more than it does. ``TOKENS``:
    the last token drawn is missing from the answer. ``NAN``: the first sequence's logits are NaN.
    ``LOST``: the stage dies instead of answering.
    ``REPEAT``: the plan is answered twice. ``ALLOCATED``: the arena is one byte larger than it
    should be (``plan`` means nothing).
    """

    LENGTH = "length"
    BYTES = "bytes"
    TOKENS = "tokens"
    NAN = "nan"
    LOST = "lost"
    REPEAT = "repeat"
    ALLOCATED = "allocated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """``kind`` happens on ``stage`` when it applies plan number ``plan``."""

    kind: FaultKind
    stage: int
    plan: int = 0


@dataclass(slots=True)
class _Held:
    """An open sequence: its rows, and its ids in the full, window and state pools."""

    length: int = 0
    ids: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))


class FakeStage:
    """One stage: pools of ids of the sizes that ``units`` says, and strict plan order."""

    def __init__(
        self, sizing: StageSizing, units: Footprint, *, last: bool, faults: Sequence[Fault] = ()
    ) -> None:
        self.sizing = sizing
        self.units = units
        self.inputs: dict[int, list[int]] = {}
        self._last = last
        self._faults = {(fault.plan, fault.kind) for fault in faults}
        self._extra_bytes = 0
        self._pools = tuple(
            Pool(capacity, f"{name} of stage {sizing.stage}")
            for capacity, name in zip(units, ("full records", "windows", "slots"), strict=True)
        )
        self._open: dict[int, _Held] = {}
        self._next_plan = 0

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._open)

    def used(self) -> Footprint:
        """Units in use, by pool."""
        return Footprint(*(pool.num_used for pool in self._pools))

    def lengths(self) -> dict[int, int]:
        """Rows held of every open sequence."""
        return {sequence: held.length for sequence, held in self._open.items()}

    def apply(self, plan: Plan) -> StepDone:
        """Close, open, take the rows in, and answer.

        PlanOrderError unless ``plan`` is the next; InternalError for rows that do not follow on;
        OutOfRecords when a pool is too small.
        """
        stage = self.sizing.stage
        if plan.number != self._next_plan:
            raise PlanOrderError(f"plan {plan.number} came, {self._next_plan} is next", stage=stage)
        self._next_plan += 1
        for sequence in plan.closed:
            self._resize(self._held(sequence), 0)
            del self._open[sequence]
        for opened in plan.opened:
            if opened.sequence in self._open:
                raise InternalError(f"sequence {opened.sequence} is already open")
            self._open[opened.sequence] = _Held()
            self.inputs[opened.sequence] = []
        first = 0
        for rows in plan.rows:
            self._extend(rows, plan.tokens[first : first + rows.num_rows])
            first += rows.num_rows
        if plan.rows and self._has_fault(plan, FaultKind.LENGTH):
            held = self._held(plan.rows[0].sequence)
            self._resize(held, held.length + self.sizing.options.block_tokens)
        if self._has_fault(plan, FaultKind.BYTES):
            self._extra_bytes = 1
        return self._answer(plan)

    def repeats(self, plan: Plan) -> bool:
        """Whether the answer to ``plan`` is to be given twice."""
        return self._has_fault(plan, FaultKind.REPEAT)

    def dies_of(self, plan: Plan) -> bool:
        """Whether the stage is to be lost instead of answering ``plan``."""
        return self._has_fault(plan, FaultKind.LOST)

    def ready(self) -> StageReady:
        """The announcement of the stage's arena."""
        extra = int(any(kind is FaultKind.ALLOCATED for _, kind in self._faults))
        return StageReady(self.sizing.stage, self.sizing.bytes_of(self.units) + extra)

    def check(self) -> None:
        """Raise InternalError unless pools and lengths agree."""
        for pool in self._pools:
            pool.check()
        total = Footprint()
        for held in self._open.values():
            total = total.plus(self.sizing.footprint(held.length))
        if total != self.used():
            raise InternalError(
                f"stage {self.sizing.stage}: footprints of open sequences {total} != used"
                f" {self.used()}"
            )

    def _answer(self, plan: Plan) -> StepDone:
        sizing, used = self.sizing, self.used()
        tokens = tuple(
            fake_token(rows.sequence, rows.start + rows.num_rows - 1)
            for rows in plan.rows
            if rows.sample and self._last
        )
        if self._has_fault(plan, FaultKind.TOKENS):
            tokens = tokens[:-1]
        if self._has_fault(plan, FaultKind.NAN):
            tokens = (NO_TOKEN, *tokens[1:])
        return StepDone(
            sizing.stage,
            plan.number,
            tuple(self._open[rows.sequence].length for rows in plan.rows),
            PoolBytes(
                used.full_records * sizing.record_bytes + self._extra_bytes,
                used.window_records * sizing.window_record_bytes,
                used.state_slots * sizing.slot_bytes,
            ),
            len(self._open),
            tokens,
            FAKE_COMPUTE_NS,
        )

    def _extend(self, rows: Rows, tokens: tuple[int, ...]) -> None:
        held = self._held(rows.sequence)
        if held.length != rows.start or len(tokens) != rows.num_rows or not tokens:
            raise InternalError(
                f"stage {self.sizing.stage}: sequence {rows.sequence} has {held.length} rows,"
                f" {rows} came with {len(tokens)} tokens"
            )
        self._resize(held, rows.start + rows.num_rows)
        self.inputs[rows.sequence] += tokens

    def _resize(self, held: _Held, rows: int) -> None:
        for pool, ids, wanted in zip(
            self._pools, held.ids, self.sizing.footprint(rows), strict=True
        ):
            ids += pool.allocate(max(wanted - len(ids), 0))
            pool.release(ids[wanted:])
            del ids[wanted:]
        held.length = rows

    def _held(self, sequence: int) -> _Held:
        held = self._open.get(sequence)
        if held is None:
            raise InternalError(f"stage {self.sizing.stage}: sequence {sequence} is not open")
        return held

    def _has_fault(self, plan: Plan, kind: FaultKind) -> bool:
        return (plan.number, kind) in self._faults


class FakeStages:
    """All stages of a pipeline. ``send`` queues a plan on each; ``answer`` lets one stage go on."""

    def __init__(
        self,
        sizings: Sequence[StageSizing],
        units: Sequence[Footprint],
        faults: Sequence[Fault] = (),
    ) -> None:
        self.stages = tuple(
            FakeStage(
                sizing,
                capacity,
                last=stage == len(sizings) - 1,
                faults=[fault for fault in faults if fault.stage == stage],
            )
            for stage, (sizing, capacity) in enumerate(zip(sizings, units, strict=True))
        )
        self._queues: list[deque[Plan | FakeAnswer]] = [deque([s.ready()]) for s in self.stages]
        self._lost: set[int] = set()

    def send(self, plan: Plan) -> None:
        """Queue ``plan`` on every stage that is not lost."""
        for stage, queue in enumerate(self._queues):
            if stage not in self._lost:
                queue.append(plan)

    def answerable(self) -> tuple[int, ...]:
        """Stages that have something to say, in order."""
        return tuple(stage for stage, queue in enumerate(self._queues) if queue)

    def answer(self, stage: int) -> FakeAnswer:
        """The next event of ``stage``: ready, then one per plan. What breaks it becomes StageLost."""
        item = self._queues[stage].popleft()
        if not isinstance(item, Plan):
            return item
        if self.stages[stage].dies_of(item):
            return self._lose(stage, f"stage {stage} died", "StageLost")
        try:
            done = self.stages[stage].apply(item)
        except MemkvError as error:
            return self._lose(stage, f"stage {stage}: {error}", type(error).__name__)
        if self.stages[stage].repeats(item):
            self._queues[stage].appendleft(done)
        return done

    def lose(self, stage: int, message: str = "", kind: str = "StageLost") -> None:
        """Kill ``stage``: the loss is its next and last event."""
        self._queues[stage].append(self._lose(stage, message or f"stage {stage} was killed", kind))

    def check(self) -> None:
        """Raise InternalError unless every living stage's books balance."""
        for stage, fake in enumerate(self.stages):
            if stage not in self._lost:
                fake.check()

    def _lose(self, stage: int, message: str, kind: str) -> StageLost:
        self._lost.add(stage)
        self._queues[stage].clear()
        return StageLost(stage, message, kind)


def first_stage(answerable: Sequence[int]) -> int:
    """The choice that lets the foremost stage answer."""
    return answerable[0]


class FakePort:
    """A StagePort over ``FakeStages``: ``choose`` picks which of the answerable stages goes on.

    ``tick_every_s``: how long ``receive`` waits for a plan before it returns a Tick.
    """

    def __init__(
        self,
        stages: FakeStages,
        choose: Callable[[Sequence[int]], int] = first_stage,
        *,
        tick_every_s: float = 0.01,
    ) -> None:
        self.stages = stages
        self.plans: list[Plan] = []
        self._choose = choose
        self._tick_every_s = tick_every_s
        self._something = asyncio.Event()

    def send(self, plan: Plan) -> None:
        """Queue the plan on every stage."""
        self.plans.append(plan)
        self.stages.send(plan)
        self._something.set()

    def lose(self, stage: int) -> None:
        """Kill a stage and wake whoever waits."""
        self.stages.lose(stage)
        self._something.set()

    async def receive(self) -> FakeAnswer | Tick:
        """The next event of the chosen stage; other tasks get their turn first."""
        await asyncio.sleep(0)
        while not (answerable := self.stages.answerable()):
            self._something.clear()
            try:
                await asyncio.wait_for(self._something.wait(), self._tick_every_s)
            except TimeoutError:
                return Tick()
        return self.stages.answer(self._choose(answerable))
