"""A coordinator over fake stages, one event at a time: a driver without time, threads or tasks."""

from collections.abc import Callable, Iterable, Sequence

from memkv_pp.admission.coordinator import Coordinator
from memkv_pp.testing.fakes import FakeStages, first_stage
from memkv_pp.wire import (
    Admit,
    Command,
    Emit,
    Event,
    Plan,
    Refuse,
    Release,
    SendPlan,
    Wait,
)

LogEntry = tuple[float, Event, tuple[Command, ...]]


class SteppedPipeline:
    """Carries the coordinator's commands out on ``stages``, and keeps a log that can be replayed.

    After every event the books of the coordinator, its ledger and every stage are checked
    (InternalError), and so are the rules that clients rely on (AssertionError): one ending per
    request and no token after it, one release per request and only after its ending, plans
    numbered without gaps, at most ``waves`` of them unanswered.

    ``log``: (now, event, commands). ``tokens`` and ``endings``: what each client was told;
    ``released``: requests of which nothing is left, in order. ``plans``: those sent.
    """

    def __init__(self, coordinator: Coordinator, stages: FakeStages) -> None:
        self.coordinator = coordinator
        self.stages = stages
        self.log: list[LogEntry] = []
        self.tokens: dict[int, list[int]] = {}
        self.endings: dict[int, Emit | Refuse] = {}
        self.released: list[int] = []
        self.plans: list[Plan] = []

    def handle(self, event: Event, now: float = 0.0) -> tuple[Command, ...]:
        """Let the coordinator take ``event``, and carry its commands out."""
        commands = self.coordinator.handle(event, now)
        self.log.append((now, event, commands))
        for command in commands:
            self._carry_out(command)
        self.coordinator.check()
        self.stages.check()
        return commands

    def answer(self, stage: int, now: float = 0.0) -> tuple[Command, ...]:
        """Let ``stage`` say its next word."""
        return self.handle(self.stages.answer(stage), now)

    def start(self) -> None:
        """Let every stage announce itself."""
        for stage in range(len(self.stages.stages)):
            self.answer(stage)

    def drain(self, choose: Callable[[Sequence[int]], int] = first_stage, now: float = 0.0) -> None:
        """Let stages answer until none has anything to say; ``choose`` picks who goes on."""
        while answerable := self.stages.answerable():
            self.answer(choose(answerable), now)

    def reason(self, request: int) -> str:
        """How the request ended: a finish reason, or "refused: " and why; "" while it runs."""
        ending = self.endings.get(request)
        if isinstance(ending, Refuse):
            return f"refused: {ending.reason}"
        return ending.finish_reason if ending else ""

    def _carry_out(self, command: Command) -> None:
        match command:
            case SendPlan():
                self._send(command.plan)
            case Emit():
                self._emit(command)
            case Refuse():
                self._end(command)
            case Release():
                _require(
                    command.request in self.endings and command.request not in self.released,
                    f"{command}: released before its ending, or twice",
                )
                self.released.append(command.request)
            case Admit() | Wait():
                _require(
                    command.request not in self.endings, f"{command} came after the request's end"
                )

    def _send(self, plan: Plan) -> None:
        _require(plan.number == len(self.plans), f"plan {plan.number} came as {len(self.plans)}")
        _require(bool(plan.rows or plan.closed), f"plan {plan.number} says nothing")
        self.plans.append(plan)
        self.stages.send(plan)

    def _emit(self, emit: Emit) -> None:
        if emit.token is None:
            self._end(emit)
            return
        _require(emit.request not in self.endings, f"{emit} came after the request's end")
        self.tokens.setdefault(emit.request, []).append(emit.token)

    def _end(self, ending: Emit | Refuse) -> None:
        _require(ending.request not in self.endings, f"{ending} is a second ending")
        self.endings[ending.request] = ending


def replay(coordinator: Coordinator, log: Iterable[LogEntry]) -> None:
    """Feed the events of ``log`` to a fresh coordinator; AssertionError unless it says the same."""
    for number, (now, event, commands) in enumerate(log):
        found = coordinator.handle(event, now)
        _require(found == commands, f"event {number}, {event}: {found} instead of {commands}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
