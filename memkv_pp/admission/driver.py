"""The live driver: feeds the coordinator events, carries its commands out. It decides nothing."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from memkv_pp import errors
from memkv_pp.admission.coordinator import Coordinator
from memkv_pp.admission.ports import StagePort
from memkv_pp.clock import Clock
from memkv_pp.errors import CapacityError, ConfigError, MemkvError, StageError
from memkv_pp.wire import (
    Arrived,
    Cancelled,
    Emit,
    Event,
    Refuse,
    Release,
    Request,
    SendPlan,
    StageLost,
    StageReady,
    StepDone,
)


def _error_classes(root: type[MemkvError]) -> dict[str, type[MemkvError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _error_classes(child)
    return found


_ERRORS = _error_classes(MemkvError)


def _refused_as(refuse: Refuse) -> MemkvError:
    """The error that tells a caller of a refusal: what it lacks, what is lost, or what to mend."""
    if refuse.reason in ("capacity", "context"):
        return CapacityError(refuse.message, refuse.hint, refuse.stages)
    if refuse.reason == "stage_lost":
        return errors.StageLost(refuse.message, refuse.hint)
    return ConfigError(refuse.message, refuse.hint)


@dataclass(slots=True)
class Completion:
    """What became of a request: its tokens so far, and why it ended ("" while it runs).

    ``finish_reason``: "stop", "length", "cancelled", "refused" or "error", with ``error`` typed.
    ``released`` is set once nothing of it is left on any stage.
    """

    request: Request
    tokens: list[int] = field(default_factory=list[int])
    finish_reason: str = ""
    error: MemkvError | None = None
    first_token_s: float | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Driver:
    """Runs one coordinator over one port, on the running asyncio loop.

    Requests submitted before ``start`` are seen by the coordinator before any stage is ready, so
    how they share plans does not depend on timing. ``compute_ns``: time in the layers per stage;
    ``handling_s``: time spent deciding and sending; ``all_ready``: every stage has loaded, or
    one was lost.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock) -> None:
        self._coordinator = coordinator
        self._port: StagePort | None = None
        self._clock = clock
        self._completions: dict[int, Completion] = {}
        self._pump: asyncio.Task[None] | None = None
        self.all_ready = asyncio.Event()
        self._num_ready = 0
        self.compute_ns = [0] * coordinator.ledger.num_stages
        self.handling_s = 0.0

    def submit(self, request: Request) -> Completion:
        """Hand ``request`` to the coordinator; the completion fills as tokens are released."""
        completion = Completion(request)
        self._completions[request.request] = completion
        self._handle(Arrived(request))
        return completion

    def cancel(self, request: int) -> None:
        """Stop ``request``; takes effect in the next plan."""
        self._handle(Cancelled(request))

    def start(self, port: StagePort) -> None:
        """Begin to take the events of the stages behind ``port``."""
        self._port = port
        self._pump = asyncio.create_task(self._run(port))

    async def wait_ready(self) -> None:
        """Until every stage has loaded, or one is lost; raises what the driver itself died of."""
        await self._or_pump(self.all_ready.wait())

    async def wait(self, completions: Sequence[Completion]) -> None:
        """Until each is finished and nothing of it is left on any stage.

        Raises what the driver itself died of, if it did.
        """
        await self._or_pump(self._all_done(completions))

    async def _or_pump(self, wanted: Coroutine[Any, Any, object]) -> None:
        assert self._pump is not None
        done = asyncio.ensure_future(wanted)
        await asyncio.wait({done, self._pump}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            self._pump.result()
        await done

    async def stop(self) -> None:
        """Take no more events. What the driver died of is for ``wait`` to raise."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait({self._pump})

    async def _all_done(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            await completion.finished.wait()
            await completion.released.wait()

    async def _run(self, port: StagePort) -> None:
        while True:
            event = await port.receive()
            self._handle(event)
            if isinstance(event, StepDone):
                self.compute_ns[event.stage] += event.compute_ns
            elif isinstance(event, StageReady):
                self._num_ready += 1
                if self._num_ready == len(self.compute_ns):
                    self.all_ready.set()
            elif isinstance(event, StageLost):
                self.all_ready.set()

    def _handle(self, event: Event) -> None:
        started = self._clock.now()
        self._carry_out(event)
        self.handling_s += self._clock.now() - started

    def _carry_out(self, event: Event) -> None:
        for command in self._coordinator.handle(event, self._clock.now()):
            match command:
                case SendPlan():
                    assert self._port is not None
                    self._port.send(command.plan)
                case Emit():
                    self._emit(command)
                case Refuse():
                    self._refuse(command)
                case Release():
                    self._completions.pop(command.request).released.set()
                case _:
                    pass

    def _emit(self, emit: Emit) -> None:
        completion = self._completions[emit.request]
        if emit.token is not None:
            completion.tokens.append(emit.token)
            if completion.first_token_s is None:
                completion.first_token_s = self._clock.now()
            return
        completion.finish_reason = emit.finish_reason
        if emit.error is not None:
            name, message = emit.error
            completion.error = _ERRORS.get(name, StageError)(message)
        completion.finished.set()

    def _refuse(self, refuse: Refuse) -> None:
        completion = self._completions.pop(refuse.request)
        completion.finish_reason = "refused"
        completion.error = _refused_as(refuse)
        completion.finished.set()
        completion.released.set()
