"""The local backend: a thread per stage in this process, queues between them."""

import asyncio
import os
import threading
from functools import partial

from memkv_pp.admission.ports import QueuePort, StageEvent
from memkv_pp.config import PipelineConfig
from memkv_pp.stage.control import QueueControl
from memkv_pp.stage.link import QueueLink
from memkv_pp.stage.runtime import StageRuntime, StageStatistics
from memkv_pp.stage.worker import StageWorker
from memkv_pp.wire import Plan


class _LocalPort(QueuePort):
    def __init__(self, controls: list[QueueControl]) -> None:
        super().__init__()
        self._controls = controls

    def send(self, plan: Plan) -> None:
        for control in self._controls:
            control.plans.put(plan)


class LocalStages:
    """Runs the stages of ``config`` on threads of this process."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._runtimes: dict[int, StageRuntime] = {}
        self._controls: list[QueueControl] = []
        self._links: list[QueueLink] = []
        self._threads: list[threading.Thread] = []
        self._port: _LocalPort | None = None

    async def open(self) -> _LocalPort:
        """Start the threads."""
        stages = self._config.num_stages
        port = self._port = _LocalPort(self._controls)
        answer = partial(_put, port)
        self._controls += [QueueControl(answer) for _ in range(stages)]
        self._links += [QueueLink() for _ in range(stages - 1)]
        for stage in range(stages):
            worker = StageWorker(
                partial(self._load, stage),
                stage,
                self._controls[stage],
                self._links[stage - 1] if stage else None,
                self._links[stage] if stage < stages - 1 else None,
            )
            thread = threading.Thread(target=worker.run, name=f"stage-{stage}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return port

    def pids(self) -> tuple[int, ...]:
        """This process, for every stage."""
        return (os.getpid(),) * self._config.num_stages

    async def statistics(self) -> tuple[StageStatistics, ...]:
        """Every stage's own account."""
        for runtime in self._runtimes.values():
            runtime.check()
        return tuple(self._runtimes[stage].statistics() for stage in sorted(self._runtimes))

    async def close(self) -> None:
        """End the threads and free the caches."""
        if self._port is not None:
            self._port.close()
        for control in self._controls:
            control.plans.put(None)
        for link in self._links:
            link.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for runtime in self._runtimes.values():
            runtime.close()
        self._runtimes.clear()
        self._threads.clear()

    def _load(self, stage: int) -> StageRuntime:
        self._runtimes[stage] = StageRuntime(self._config, stage)
        return self._runtimes[stage]


def _put(port: QueuePort, event: StageEvent) -> None:
    port.put(event)
