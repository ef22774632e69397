"""A pipeline at work: coordinator, driver and stages, put together for a batch of requests."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.admission.coordinator import Coordinator, CoordinatorConfig
from memkv_pp.admission.driver import Completion, Driver
from memkv_pp.admission.ledger import Ledger
from memkv_pp.admission.policy import ReservePolicy
from memkv_pp.clock import Clock, SystemClock
from memkv_pp.config import Backend, PipelineConfig
from memkv_pp.errors import StageLost
from memkv_pp.serve.local import LocalStages
from memkv_pp.serve.stages import Stages
from memkv_pp.sizing import check_equal_bytes
from memkv_pp.stage.runtime import StageStatistics
from memkv_pp.wire import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds. ``prefill_s``: until every request has a token or ended; ``decode_s``: the rest.

    ``orchestration_s``: what the coordinator's process spent deciding and sending.
    ``compute_s``: in the layers, per stage.
    """

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    orchestration_s: float
    compute_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of every request, and what every stage holds."""

    completions: tuple[Completion, ...]
    stages: tuple[StageStatistics, ...]
    promised_bytes: tuple[int, ...]
    timing: Timing


def make_coordinator(config: PipelineConfig) -> Coordinator:
    """The coordinator of ``config``, its ledger promising exactly the arenas."""
    ledger = Ledger(config.sizings(), config.units)
    return Coordinator(
        ledger,
        CoordinatorConfig(
            waves=config.waves,
            prefill_chunk=config.options.prefill_chunk,
            context_tokens=config.context_tokens,
            vocabulary_size=config.geometry.vocabulary_size,
            max_sequences=config.max_sequences,
            plan_deadline_s=config.plan_deadline_s,
        ),
        ReservePolicy(config.options.spec_tokens),
    )


def make_stages(config: PipelineConfig) -> Stages:
    """The stages of ``config`` on its backend."""
    if config.backend is Backend.RAY:
        from memkv_pp.serve.cluster import RayStages

        return RayStages(config)
    return LocalStages(config)


class Pipeline:
    """Coordinator, driver and stages of one configuration: ``async with Pipeline(config) as p``.

    Requests submitted before ``start`` share plans in an order that does not depend on timing.
    """

    def __init__(self, config: PipelineConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.coordinator = make_coordinator(config)
        self.stages = make_stages(config)
        self.driver = Driver(self.coordinator, self.clock)

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.driver.stop()
        await self.stages.close()

    async def start(self) -> None:
        """Start the stages, and wait until each has loaded or one is lost.

        StageLost when that takes longer than ``config.start_timeout_s``.
        """
        self.driver.start(await self.stages.open())
        try:
            await asyncio.wait_for(self.driver.wait_ready(), self.config.start_timeout_s)
        except TimeoutError as error:
            raise StageLost(
                f"the stages did not load within {self.config.start_timeout_s:g} s"
            ) from error

    async def statistics(self) -> tuple[StageStatistics, ...]:
        """Every stage's account, after all books were compared; empty when a stage is lost.

        Only while no plan is in flight. Raises InternalError when books do not agree.
        """
        self.coordinator.check()
        if self.coordinator.lost is not None:
            return ()
        statistics = await self.stages.statistics()
        check_stages(self.config, self.coordinator, statistics)
        return statistics


async def generate(
    config: PipelineConfig, requests: Sequence[Request], clock: Clock | None = None
) -> Report:
    """Serve ``requests`` together, and close the pipeline.

    Every request ends in its completion, refused and failed ones too. Raises InternalError when
    the books of coordinator, ledger and stages do not agree afterwards.
    """
    async with Pipeline(config, clock) as pipeline:
        driver, now = pipeline.driver, pipeline.clock.now
        began = now()
        completions = [driver.submit(request) for request in requests]
        await pipeline.start()
        ready = now()
        await driver.wait(completions)
        ended = now()
        statistics = await pipeline.statistics()
    firsts = [c.first_token_s for c in completions if c.first_token_s is not None]
    first = max(firsts, default=ready)
    drawn = sum(len(c.tokens) for c in completions)
    return Report(
        completions=tuple(completions),
        stages=statistics,
        promised_bytes=pipeline.coordinator.ledger.statistics().promised_bytes,
        timing=Timing(
            load_s=ready - began,
            prefill_s=first - ready,
            decode_s=ended - first,
            tokens_per_s=drawn / max(ended - ready, 1e-9),
            orchestration_s=driver.handling_s,
            compute_s=tuple(ns / 1e9 for ns in driver.compute_ns),
        ),
    )


def check_stages(
    config: PipelineConfig, coordinator: Coordinator, stages: Sequence[StageStatistics]
) -> None:
    """Raise InternalError unless sized = allocated = promised on every stage."""
    for sizing, units, stage in zip(config.sizings(), config.units, stages, strict=True):
        check_equal_bytes(
            stage.stage,
            sized=sizing.bytes_of(units),
            allocated=stage.allocated_bytes,
            promised=coordinator.ledger.promised_bytes(stage.stage),
        )
