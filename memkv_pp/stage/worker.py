"""The loop of a stage: the same on every backend, over any control channel and any link."""

from typing import TYPE_CHECKING

from memkv_pp.stage.link import HIDDEN, Expected, Receiver, Sender
from memkv_pp.wire import Plan, StageLost, StageReady

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memkv_pp.stage.control import Control
    from memkv_pp.stage.runtime import StageRuntime


class StageWorker:
    """Loads a stage and applies plans until it is told to close, or something breaks.

    ``load`` builds the runtime, on the thread that runs it. ``upstream`` is None on the first stage, ``downstream`` on the last.
    """

    def __init__(
        self,
        load: "Callable[[], StageRuntime]",
        stage: int,
        control: "Control",
        upstream: Receiver | None,
        downstream: Sender | None,
    ) -> None:
        self._load = load
        self._stage = stage
        self._control = control
        self._upstream = upstream
        self._downstream = downstream

    def run(self) -> None:
        """Announce the stage, then loop. A failure is reported to the coordinator and ends the loop."""
        try:
            runtime = self._load()
            self._control.send(StageReady(self._stage, runtime.allocated_bytes))
            while (plan := self._control.receive()) is not None:
                self._step(runtime, plan)
        except Exception as error:  # noqa: BLE001 - whatever breaks a stage must reach the coordinator
            message = f"stage {self._stage}: {error}"
            self._control.send(StageLost(self._stage, message, type(error).__name__))

    def _step(self, runtime: "StageRuntime", plan: Plan) -> None:
        runtime.check_next(plan)
        hidden: torch.Tensor | None = None
        if plan.rows and self._upstream is not None:
            size, dtype = runtime.hidden_shape
            expected: Expected = {HIDDEN: ((plan.num_rows, size), dtype)}
            hidden = self._upstream.receive(plan.number, expected)[HIDDEN]
        out, done = runtime.apply(plan, hidden)
        if out is not None and self._downstream is not None:
            self._downstream.send(plan.number, {HIDDEN: out})
        self._control.send(done)
