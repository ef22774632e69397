"""The coordinator: pure ``handle(event, now) -> commands``; no I/O, no clock, no Ray.

It admits by charging bytes on every stage, forms plans, compares digests, and releases tokens.
A plan forms when fewer than ``waves`` are in flight: on arrival, or when the oldest is done on
every stage. A decoding sequence is in one plan at a time; prefill chunks of one sequence may be in
consecutive ones. The same events give the same commands.
"""

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from memkv_pp.admission.expected import ExpectedUse
from memkv_pp.admission.ledger import Ledger
from memkv_pp.admission.policy import Policy, ReservePolicy
from memkv_pp.admission.refusal import refusal_of
from memkv_pp.admission.sequence import FlyingPlan, LiveSequence
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.sizing import Footprint, check_equal_bytes
from memkv_pp.units import ceil_div
from memkv_pp.wire import (
    NO_TOKEN,
    Admit,
    Arrived,
    Cancelled,
    Command,
    Emit,
    Event,
    Opened,
    Plan,
    Refuse,
    Release,
    Request,
    Rows,
    SendPlan,
    StageLost,
    StageReady,
    StepDone,
    Tick,
    Wait,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """``waves``: plans in flight. ``prefill_chunk``: most prompt rows of one plan.

    ``context_tokens``: most rows of a sequence (0: no limit but the pools). ``vocabulary_size``:
    token ids are below it (0: not checked). ``max_sequences``: admitted at once (0: no limit).
    ``plan_deadline_s``: a plan that a stage has not answered for so long means the stage is lost.
    """

    waves: int
    prefill_chunk: int = 512
    context_tokens: int = 0
    vocabulary_size: int = 0
    max_sequences: int = 0
    plan_deadline_s: float = 300.0

    def __post_init__(self) -> None:
        for knob, value in (("--waves", self.waves), ("--prefill-chunk", self.prefill_chunk)):
            if value < 1:
                raise ConfigError(f"{knob}: {value} is below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStatistics:
    """A snapshot of counts."""

    waiting: int
    live: int
    in_flight: int
    plans_sent: int
    tokens_emitted: int
    refused: int


class Coordinator:
    """Owns the ledger and every request's state. Feed it events, carry its commands out."""

    def __init__(
        self, ledger: Ledger, config: CoordinatorConfig, policy: Policy | None = None
    ) -> None:
        self.ledger = ledger
        self.config = config
        self._policy = policy or ReservePolicy()
        self._waiting: dict[int, Request] = {}
        self._live: dict[int, LiveSequence] = {}
        self._prompts: deque[int] = deque()
        self._decoding: deque[int] = deque()
        self._closing: list[int] = []
        self._flying: deque[FlyingPlan] = deque()
        self._stages_ready: set[int] = set()
        self._expected = ExpectedUse(ledger)
        self._suspects: set[int] = set()
        self._lost: StageLost | None = None
        self._plans_sent = 0
        self._tokens_emitted = 0
        self._refused = 0

    @property
    def lost(self) -> StageLost | None:
        """The stage whose loss ended the pipeline, if one did."""
        return self._lost

    def handle(self, event: Event, now: float) -> tuple[Command, ...]:
        """Take one event; the commands it leads to, in the order they must be carried out."""
        commands: list[Command] = []
        match event:
            case Arrived():
                self._arrived(event.request, commands)
            case StageReady():
                self._stage_ready(event)
            case StepDone():
                self._step_done(event, now, commands)
            case StageLost():
                self._stage_lost(event, commands)
            case Cancelled():
                self._cancelled(event.request, commands)
            case Tick():
                self._look_at_deadline(now, commands)
            case _:
                assert_never(event)
        self._form_plans(now, commands)
        return tuple(commands)

    def statistics(self) -> CoordinatorStatistics:
        """A snapshot of counts."""
        return CoordinatorStatistics(
            waiting=len(self._waiting),
            live=len(self._live),
            in_flight=len(self._flying),
            plans_sent=self._plans_sent,
            tokens_emitted=self._tokens_emitted,
            refused=self._refused,
        )

    def check(self) -> None:
        """Raise InternalError unless ledger, live sequences and expected use agree."""
        self.ledger.check()
        holders = [*self._live, *self._closing]
        if len(set(holders)) != len(holders):
            raise InternalError(f"a sequence is both live and closing: {sorted(holders)}")
        charged = self.ledger.statistics().requests
        if charged != len(holders):
            raise InternalError(
                f"charged requests {charged} != live {len(self._live)} + closing"
                f" {len(self._closing)}"
            )
        for stage, used in enumerate(self._expected.used):
            held = Footprint()
            for request in holders:
                held = held.plus(self.ledger.charged(request)[stage])
            if not used.within(held):
                raise InternalError(f"stage {stage}: used {used} > held {held} by live requests")
        if len(self._flying) > self.config.waves:
            raise InternalError(f"{len(self._flying)} plans in flight > {self.config.waves} waves")
        if not holders and any(used != Footprint() for used in self._expected.used):
            raise InternalError(f"no request is left, but the stages use {self._expected.used}")

    def _arrived(self, request: Request, commands: list[Command]) -> None:
        if self._knows(request.request):
            raise InternalError(f"request {request.request} arrived twice")
        refusal = self._refusal(request)
        if refusal is not None:
            self._refused += 1
            commands.append(refusal)
            return
        self._waiting[request.request] = request
        self._admit_waiting(commands)
        if request.request in self._waiting:
            short = self.ledger.short_now(self._policy.rows(request))
            commands.append(Wait(request.request, short))

    def _knows(self, request: int) -> bool:
        """Whether it has not been released: plans in flight may still name it."""
        return (
            request in self._live
            or request in self._waiting
            or request in self._closing
            or any(request in flying.plan.closed for flying in self._flying)
        )

    def _refusal(self, request: Request) -> Refuse | None:
        """Why the request can never be served, or None."""
        if self._lost is not None:
            hint = "start the pipeline again"
            return Refuse(request.request, "stage_lost", self._lost.message, hint)
        return refusal_of(
            request,
            self._policy.rows(request),
            self.ledger,
            context_tokens=self.config.context_tokens,
            vocabulary_size=self.config.vocabulary_size,
        )

    def _admit_waiting(self, commands: list[Command]) -> None:
        admitted: list[int] = []
        most = self.config.max_sequences
        for request in self._policy.candidates(self._waiting.values()):
            if most and len(self._live) + len(self._closing) >= most:
                break
            if self.ledger.charge(request.request, self._policy.rows(request)):
                break
            admitted.append(request.request)
            self._live[request.request] = LiveSequence(request)
            self._prompts.append(request.request)
            commands.append(Admit(request.request))
        for request_id in admitted:
            del self._waiting[request_id]

    def _stage_ready(self, event: StageReady) -> None:
        sized = self.ledger.promised_bytes(event.stage)
        check_equal_bytes(event.stage, sized=sized, allocated=event.allocated_bytes, promised=sized)
        self._stages_ready.add(event.stage)

    def _step_done(self, done: StepDone, now: float, commands: list[Command]) -> None:
        if self._lost is not None:
            return
        flying = next((f for f in self._flying if f.plan.number == done.plan), None)
        if flying is None or done.stage not in flying.waiting_for:
            raise InternalError(
                f"stage {done.stage} answered plan {done.plan}, which is not in flight"
            )
        wrong = flying.accept(done, check_bytes=not self._suspects)
        if wrong:
            lost = StageLost(done.stage, f"stage {done.stage} {wrong}", "DigestMismatch")
            self._stage_lost(lost, commands)
            return
        self._suspects.update(flying.mismatches)
        while self._flying and not self._flying[0].waiting_for:
            self._complete(self._flying.popleft(), commands)
            self._form_plans(now, commands)

    def _complete(self, flying: FlyingPlan, commands: list[Command]) -> None:
        tokens = iter(flying.tokens)
        for rows in flying.plan.rows:
            token = next(tokens, None) if rows.sample else None
            sequence = self._live.get(rows.sequence)
            if sequence is None:
                continue
            if rows.sequence in flying.mismatches:
                error = ("DigestMismatch", flying.mismatches[rows.sequence])
                self._finish(rows.sequence, "error", commands, error)
            elif rows.sample:
                assert token is not None
                self._drawn(sequence, token, commands)
        self._suspects.difference_update(flying.plan.closed)
        commands.extend(Release(request) for request in flying.plan.closed)

    def _drawn(self, sequence: LiveSequence, token: int, commands: list[Command]) -> None:
        request = sequence.request
        if token == NO_TOKEN:
            message = f"the logits after row {sequence.rows_planned - 1} are NaN"
            self._finish(request.request, "error", commands, ("NoTokenError", message))
            return
        if token in request.end_ids:
            self._finish(request.request, "stop", commands)
            return
        sequence.num_drawn += 1
        self._tokens_emitted += 1
        commands.append(Emit(request.request, token))
        if sequence.num_drawn == request.max_new:
            self._finish(request.request, "length", commands)
        else:
            sequence.next_token = token
            self._decoding.append(request.request)

    def _finish(
        self,
        request: int,
        reason: str,
        commands: list[Command],
        error: tuple[str, str] | None = None,
    ) -> None:
        del self._live[request]
        for ready in (self._prompts, self._decoding):
            if request in ready:
                ready.remove(request)
        self._closing.append(request)
        commands.append(Emit(request, None, reason, error))

    def _cancelled(self, request: int, commands: list[Command]) -> None:
        if request in self._waiting:
            del self._waiting[request]
            commands.extend((Emit(request, None, "cancelled"), Release(request)))
            self._admit_waiting(commands)
        elif request in self._live:
            self._finish(request, "cancelled", commands)

    def _look_at_deadline(self, now: float, commands: list[Command]) -> None:
        if self._flying and now - self._flying[0].sent_at > self.config.plan_deadline_s:
            oldest = self._flying[0]
            stage = min(oldest.waiting_for)
            message = (
                f"stage {stage} has not answered plan {oldest.plan.number} within"
                f" {self.config.plan_deadline_s:g} s"
            )
            self._stage_lost(StageLost(stage, message), commands)

    def _stage_lost(self, lost: StageLost, commands: list[Command]) -> None:
        """Every request fails, nothing is held, no plan is in flight."""
        if self._lost is not None:
            return
        self._lost = lost
        error = (lost.kind, lost.message)
        failed = (*self._live, *self._waiting)
        commands.extend(Emit(request, None, "error", error) for request in failed)
        held = (*self._live, *self._closing)
        for request in held:
            self.ledger.release(request)
        flying = (request for f in self._flying for request in f.plan.closed)
        commands.extend(Release(request) for request in (*flying, *held, *self._waiting))
        self._expected.clear()
        for gone in (self._live, self._waiting, self._closing, self._flying):
            gone.clear()
        self._prompts.clear()
        self._decoding.clear()

    def _form_plans(self, now: float, commands: list[Command]) -> None:
        if self._lost is not None or len(self._stages_ready) < self.ledger.num_stages:
            return
        while len(self._flying) < self.config.waves and (
            self._prompts or self._decoding or self._closing
        ):
            closed = self._close_sequences(commands)
            self._admit_waiting(commands)
            opened, rows, tokens = self._pick_rows()
            if not (closed or rows):
                continue
            plan = Plan(self._plans_sent, closed, opened, rows, tokens)
            self._plans_sent += 1
            self._flying.append(
                FlyingPlan(
                    plan,
                    tuple(r.start + r.num_rows for r in rows),
                    self._expected.pool_bytes(),
                    self._expected.num_open,
                    now,
                    set(range(self.ledger.num_stages)),
                )
            )
            commands.append(SendPlan(plan))

    def _close_sequences(self, commands: list[Command]) -> tuple[int, ...]:
        """Give finished sequences' room back: stages close them first thing in the next plan."""
        closed = tuple(self._closing)
        self._closing.clear()
        on_stages: list[int] = []
        for request in closed:
            self.ledger.release(request)
            if self._expected.close(request):
                on_stages.append(request)
            else:
                commands.append(Release(request))
        return tuple(on_stages)

    def _pick_rows(self) -> tuple[tuple[Opened, ...], tuple[Rows, ...], tuple[int, ...]]:
        """At most an even share of the live sequences: those that decode, then prompts.

        Prompts share ``prefill_chunk`` rows, in order; the one that is cut goes on in the next plan.
        """
        most = max(1, ceil_div(len(self._live), self.config.waves))
        chosen = [(self._decoding.popleft(), 1) for _ in range(min(most, len(self._decoding)))]
        budget = self.config.prefill_chunk
        while self._prompts and budget and len(chosen) < most:
            count = min(self._live[self._prompts[0]].rows_ready, budget)
            budget -= count
            chosen.append((self._prompts[0], count))
            if count == self._live[self._prompts[0]].rows_ready:
                self._prompts.popleft()
        opened: list[Opened] = []
        rows: list[Rows] = []
        tokens: list[int] = []
        for request, count in chosen:
            sequence = self._live[request]
            start = sequence.rows_planned
            if start == 0:
                opened.append(Opened(request, sequence.request.sampling))
            tokens.extend(sequence.take(count))
            rows.append(Rows(request, start, count, sequence.samples))
            self._expected.extend(request, start + count)
        return tuple(opened), tuple(rows), tuple(tokens)
