"""The asyncio driver over fake stages: what callers see of completions, refusals and losses."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from memkv_pp import errors
from memkv_pp.admission.coordinator import Coordinator, CoordinatorConfig
from memkv_pp.admission.driver import Driver
from memkv_pp.admission.ledger import Ledger
from memkv_pp.clock import ManualClock
from memkv_pp.errors import CapacityError, ConfigError, InternalError
from memkv_pp.sizing import Footprint
from memkv_pp.testing.fakes import (
    FAKE_COMPUTE_NS,
    FakePort,
    FakeStages,
    Fault,
    FaultKind,
    fake_token,
    tiny_sizings,
)
from memkv_pp.wire import Request, StepDone


class Pipeline:
    """A driver, the port below it and the coordinator above, on two fake stages."""

    def __init__(self, faults=(), *, blocks=8, choose=min, **config):
        sizings = tiny_sizings(2)
        knobs = {"waves": 2, "prefill_chunk": 16, "vocabulary_size": 1000, **config}
        self.coordinator = Coordinator(
            Ledger(sizings, [Footprint(blocks, 0, 0)] * 2), CoordinatorConfig(**knobs)
        )
        self.stages = FakeStages(sizings, self.coordinator.ledger.capacities, faults)
        self.port = FakePort(self.stages, choose)
        self.clock = ManualClock(5.0)
        self.driver = Driver(self.coordinator, self.clock)

    def check_nothing_is_left(self):
        self.coordinator.check()
        self.stages.check()
        assert self.coordinator.ledger.statistics().held_bytes == (0, 0)
        assert [stage.num_sequences for stage in self.stages.stages] == [0, 0]


@asynccontextmanager
async def running(*args, **knobs):
    pipeline = Pipeline(*args, **knobs)
    pipeline.driver.start(pipeline.port)
    try:
        yield pipeline
    finally:
        await pipeline.driver.stop()


def request(which=1, prompt: int | tuple[int, ...] = 3, max_new=3, end_ids=()):
    if isinstance(prompt, int):
        prompt = (7,) * prompt
    return Request(request=which, prompt=prompt, max_new=max_new, end_ids=frozenset(end_ids))


def drawn(which, first_position, count):
    return [fake_token(which, first_position + i) for i in range(count)]


async def until(condition):
    """Let the driver work until ``condition()`` holds."""
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("choose", [min, max])
def test_completions_fill_and_nothing_is_left(choose):
    async def main():
        async with running(choose=choose, blocks=4) as pipeline:
            completions = [pipeline.driver.submit(request(which, 3 + which)) for which in range(5)]
            await pipeline.driver.wait_ready()
            await pipeline.driver.wait(completions)
            for which, completion in enumerate(completions):
                assert completion.tokens == drawn(which, 2 + which, 3)
                assert completion.finish_reason == "length"
                assert completion.error is None
                assert completion.first_token_s == 5.0
            pipeline.check_nothing_is_left()

    asyncio.run(main())


def test_an_end_token_stops_a_completion_and_is_not_part_of_it():
    async def main():
        async with running() as pipeline:
            a, end = drawn(1, 2, 2)
            completion = pipeline.driver.submit(request(max_new=9, end_ids=[end]))
            await pipeline.driver.wait([completion])
            assert (completion.tokens, completion.finish_reason) == ([a], "stop")

    asyncio.run(main())


def test_requests_submitted_before_start_are_all_in_before_the_first_plan():
    async def main():
        pipeline = Pipeline(waves=1)
        completions = [pipeline.driver.submit(request(which)) for which in (1, 2, 3)]
        assert pipeline.port.plans == []
        pipeline.driver.start(pipeline.port)
        await pipeline.driver.wait(completions)
        await pipeline.driver.stop()
        assert [rows.sequence for rows in pipeline.port.plans[0].rows] == [1, 2, 3]

    asyncio.run(main())


def test_the_time_in_the_layers_is_added_up_per_stage():
    async def main():
        async with running() as pipeline:
            await pipeline.driver.wait([pipeline.driver.submit(request())])
            plans = len(pipeline.port.plans)
            assert pipeline.driver.compute_ns == [plans * FAKE_COMPUTE_NS] * 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("refused", "error_class", "message"),
    [
        (request(prompt=40), CapacityError, "42 rows do not fit: stage 0 has 2048"),
        (request(prompt=24), CapacityError, "26 rows, the context holds 25"),
        (request(prompt=()), ConfigError, "no tokens"),
        (request(max_new=0), ConfigError, "--max-new: 0"),
        (request(prompt=(1000,)), ConfigError, "a prompt token is not in"),
    ],
)
def test_a_refusal_is_a_completion_with_a_typed_error_and_the_others_go_on(
    refused, error_class, message
):
    async def main():
        limit = 25 if "context" in message else 0
        async with running(context_tokens=limit) as pipeline:
            completions = [pipeline.driver.submit(r) for r in (refused, request(2))]
            await pipeline.driver.wait(completions)
            assert completions[0].finish_reason == "refused"
            assert type(completions[0].error) is error_class
            assert message in str(completions[0].error)
            assert completions[1].tokens == drawn(2, 2, 3)

    asyncio.run(main())


def test_a_capacity_refusal_carries_what_every_stage_has_and_needs():
    async def main():
        async with running() as pipeline:
            completion = pipeline.driver.submit(request(prompt=40))
            assert isinstance(completion.error, CapacityError)
            assert [(s.stage, s.have_bytes, s.need_bytes) for s in completion.error.stages] == [
                (0, 2048, 11 * 256),
                (1, 4096, 11 * 512),
            ]

    asyncio.run(main())


def test_cancelling_keeps_the_tokens_so_far_and_gives_everything_back():
    async def main():
        async with running() as pipeline:
            completion = pipeline.driver.submit(request(max_new=25))
            other = pipeline.driver.submit(request(2, prompt=2, max_new=3))
            await until(lambda: len(completion.tokens) == 2)
            pipeline.driver.cancel(1)
            await pipeline.driver.wait([completion, other])
            assert completion.finish_reason == "cancelled"
            assert completion.tokens == drawn(1, 2, 2)
            assert completion.error is None
            assert other.finish_reason == "length"
            pipeline.check_nothing_is_left()

    asyncio.run(main())


def test_cancelling_a_request_that_is_done_changes_nothing():
    async def main():
        async with running() as pipeline:
            completion = pipeline.driver.submit(request())
            await pipeline.driver.wait([completion])
            pipeline.driver.cancel(1)
            assert completion.finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "error_class"),
    [
        (Fault(kind=FaultKind.LOST, stage=1, plan=2), errors.StageLost),
        (Fault(kind=FaultKind.BYTES, stage=0, plan=2), errors.DigestMismatch),
        (Fault(kind=FaultKind.LENGTH, stage=0, plan=2), errors.DigestMismatch),
    ],
)
def test_what_breaks_a_stage_reaches_the_caller_as_an_error_of_its_class(fault, error_class):
    async def main():
        async with running([fault]) as pipeline:
            completion = pipeline.driver.submit(request(max_new=20))
            await pipeline.driver.wait([completion])
            assert completion.finish_reason == "error"
            assert type(completion.error) is error_class
            assert f"stage {fault.stage}" in str(completion.error)
            assert completion.tokens == drawn(1, 2, 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [
        ("OutOfRecords", errors.OutOfRecords),
        ("ModelError", errors.ModelError),
        ("InternalError", InternalError),
        ("RuntimeError", errors.StageError),
    ],
)
def test_an_error_of_a_stage_keeps_its_class_and_a_foreign_one_is_a_stage_error(kind, error_class):
    async def main():
        pipeline = Pipeline()
        completion = pipeline.driver.submit(request())
        pipeline.stages.lose(1, "it broke", kind)
        pipeline.driver.start(pipeline.port)
        await pipeline.driver.wait_ready()
        await pipeline.driver.wait([completion])
        await pipeline.driver.stop()
        assert type(completion.error) is error_class
        assert str(completion.error) == "it broke"

    asyncio.run(main())


def test_after_a_loss_new_requests_are_refused_with_what_was_lost():
    async def main():
        async with running() as pipeline:
            completion = pipeline.driver.submit(request(max_new=20))
            await until(lambda: completion.tokens)
            pipeline.port.lose(0)
            await pipeline.driver.wait([completion])
            late = pipeline.driver.submit(request(2))
            await pipeline.driver.wait([late])
            assert late.finish_reason == "refused"
            assert type(late.error) is errors.StageLost
            assert "stage 0 was killed" in str(late.error)

    asyncio.run(main())


def test_a_silent_stage_is_lost_when_the_deadline_of_its_plan_has_passed():
    class Silent(FakePort):
        """Stage 1 announces itself and then says nothing."""

        async def receive(self):
            while True:
                event = await super().receive()
                if not (isinstance(event, StepDone) and event.stage == 1):
                    return event

    async def main():
        pipeline = Pipeline(plan_deadline_s=3.0)
        pipeline.driver.start(Silent(pipeline.stages))
        completion = pipeline.driver.submit(request())
        await until(lambda: pipeline.stages.stages[1].num_sequences)
        assert not completion.finished.is_set()
        pipeline.clock.advance(3.5)
        await pipeline.driver.wait([completion])
        await pipeline.driver.stop()
        assert type(completion.error) is errors.StageLost
        assert "stage 1 has not answered plan 0 within 3 s" in str(completion.error)

    asyncio.run(main())


def test_what_the_driver_dies_of_comes_out_of_wait():
    async def main():
        pipeline = Pipeline([Fault(kind=FaultKind.REPEAT, stage=0, plan=1)])
        completion = pipeline.driver.submit(request())
        pipeline.driver.start(pipeline.port)
        with pytest.raises(InternalError, match="stage 0 answered plan 1, which is not in flight"):
            await pipeline.driver.wait([completion])
        await pipeline.driver.stop()

    asyncio.run(main())


def test_what_the_driver_dies_of_comes_out_of_wait_ready():
    async def main():
        pipeline = Pipeline([Fault(kind=FaultKind.ALLOCATED, stage=1)])
        pipeline.driver.start(pipeline.port)
        with pytest.raises(InternalError, match="stage 1: sized 4096 == allocated 4097"):
            await pipeline.driver.wait_ready()

    asyncio.run(main())


def test_stopping_is_harmless_before_the_start_and_twice():
    async def main():
        pipeline = Pipeline()
        await pipeline.driver.stop()
        pipeline.driver.start(pipeline.port)
        await pipeline.driver.stop()
        await pipeline.driver.stop()

    asyncio.run(main())
