"""Checks that any implementation of a room's door must pass. AssertionError says what it got wrong."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from memkv_pp.admission.ports import StagePort
from memkv_pp.sizing import Footprint, StageSizing
from memkv_pp.wire import (
    Opened,
    Plan,
    PoolBytes,
    Rows,
    Sampling,
    StageLost,
    StageReady,
    StepDone,
    Tick,
)

Pipeline = tuple[StagePort, Sequence[StageSizing], Sequence[Footprint]]
MakePipeline = Callable[[], AbstractAsyncContextManager[Pipeline]]

MOST_TICKS = 600


async def check_stage_port(make: MakePipeline) -> None:
    """Judge a port and the stages behind it; AssertionError unless they keep the contract.

    ``make()`` opens a fresh pipeline and yields its port, the sizing of every stage and the units
    of its pools, which must hold a sequence of two blocks beside one of one block; token ids 0 to
    7 must be in the vocabulary. Checked: every stage announces its arena once; plans that were sent
    together are answered in order, once per stage, with the right lengths, bytes and number of
    open sequences; tokens come from the last stage alone, one for each sampled entry; a plan
    that only closes is answered; nothing is in use at the end.
    """
    async with make() as (port, sizings, units):
        block = sizings[0].options.block_tokens
        for sizing, capacity in zip(sizings, units, strict=True):
            needed = sizing.footprint(2 * block).plus(sizing.footprint(block))
            _require(needed.within(capacity), f"make: {capacity} units, {needed} are needed")
        await _check_ready(port, sizings, units)
        plans = conformance_plans(block)
        for plan in plans[:3]:
            port.send(plan)
        answers = await _collect(port, len(sizings), 3)
        for plan in plans[3:]:
            port.send(plan)
        answers += await _collect(port, len(sizings), len(plans) - 3)
        _check_answers(answers, plans, sizings)
        event = await port.receive()
        _require(isinstance(event, Tick), f"one event too many: {event}")


def conformance_plans(block_tokens: int) -> tuple[Plan, ...]:
    """Two sequences: 1 grows over a block's edge by chunks, 2 joins, 1 ends, 2 ends.

    Every plan but the close-only ones has rows; two close without rows, the last leaves nothing.
    """
    chunk = tuple(i % 8 for i in range(block_tokens))
    greedy, drawn = Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3, prompt_index=1)
    return (
        Plan(0, (), (Opened(1, greedy),), (Rows(1, 0, block_tokens, False),), chunk),
        Plan(
            1,
            (),
            (Opened(2, drawn),),
            (Rows(1, block_tokens, 1, True), Rows(2, 0, 1, True)),
            (3, 4),
        ),
        Plan(2, (), (), (Rows(2, 1, 1, True),), (5,)),
        Plan(3, (1,), (), (), ()),
        Plan(4, (), (Opened(3, greedy),), (Rows(3, 0, 1, False), Rows(2, 2, 1, True)), (6, 7)),
        Plan(5, (3, 2), (), (), ()),
    )


async def _check_ready(
    port: StagePort, sizings: Sequence[StageSizing], units: Sequence[Footprint]
) -> None:
    ready: set[int] = set()
    while len(ready) < len(sizings):
        event = await _next_event(port)
        if not isinstance(event, StageReady):
            raise AssertionError(f"{event} came before every stage was ready")
        _require(event.stage not in ready, f"stage {event.stage} announced itself twice")
        sized = sizings[event.stage].bytes_of(units[event.stage])
        _require(
            event.allocated_bytes == sized,
            f"stage {event.stage}: allocated {event.allocated_bytes} != sized {sized}",
        )
        ready.add(event.stage)


async def _collect(port: StagePort, num_stages: int, num_plans: int) -> list[StepDone]:
    answers: list[StepDone] = []
    while len(answers) < num_stages * num_plans:
        event = await _next_event(port)
        if not isinstance(event, StepDone):
            raise AssertionError(f"{event} came instead of an answer to a plan")
        answers.append(event)
    return answers


async def _next_event(port: StagePort) -> StageReady | StepDone:
    for _ in range(MOST_TICKS):
        event = await port.receive()
        if isinstance(event, StageLost):
            raise AssertionError(f"stage {event.stage} was lost: {event.kind}: {event.message}")
        if not isinstance(event, Tick):
            return event
    raise AssertionError(f"nothing but {MOST_TICKS} ticks: a plan was not answered")


def _check_answers(
    answers: Sequence[StepDone], plans: Sequence[Plan], sizings: Sequence[StageSizing]
) -> None:
    for stage, sizing in enumerate(sizings):
        own = [answer for answer in answers if answer.stage == stage]
        numbers = [answer.plan for answer in own]
        _require(
            numbers == [plan.number for plan in plans], f"stage {stage} answered plans {numbers}"
        )
        lengths: dict[int, int] = {}
        for plan, answer in zip(plans, own, strict=True):
            for sequence in plan.closed:
                del lengths[sequence]
            lengths |= {rows.sequence: rows.start + rows.num_rows for rows in plan.rows}
            _check_answer(plan, answer, lengths, sizing, last=stage == len(sizings) - 1)
        _require(own[-1].used == PoolBytes(0, 0, 0), f"stage {stage} ends with {own[-1].used}")


def _check_answer(
    plan: Plan, answer: StepDone, lengths: dict[int, int], sizing: StageSizing, *, last: bool
) -> None:
    used = Footprint()
    for length in lengths.values():
        used = used.plus(sizing.footprint(length))
    sampled = sum(rows.sample for rows in plan.rows) if last else 0
    expected = (
        tuple(lengths[rows.sequence] for rows in plan.rows),
        PoolBytes(
            used.full_records * sizing.record_bytes,
            used.window_records * sizing.window_record_bytes,
            used.state_slots * sizing.slot_bytes,
        ),
        len(lengths),
        sampled,
    )
    found = (answer.lengths, answer.used, answer.sequences, len(answer.tokens))
    _require(
        found == expected,
        f"stage {answer.stage}, plan {plan.number}: (lengths, used, sequences, number of tokens)"
        f" {found} != {expected}",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
