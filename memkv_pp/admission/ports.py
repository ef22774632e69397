"""How the coordinator's driver reaches the stages: the port, and the control star over pyzmq."""

import asyncio
from typing import Any, Protocol

import zmq
import zmq.asyncio

from memkv_pp.clock import Clock
from memkv_pp.wire import (
    Plan,
    StageLost,
    StageReady,
    StepDone,
    Tick,
    decode_event,
    encode_plan,
)

StageEvent = StageReady | StepDone | StageLost | Tick

_TICK_AFTER_S = 0.5


class StagePort(Protocol):
    """All stages of a pipeline, as the driver sees them.

    Plans reach every stage in the order they were sent. Answers of one stage come in that order;
    answers of different stages may interleave. A stage that is lost is reported once.
    """

    def send(self, plan: Plan) -> None:
        """Send ``plan`` to every stage; does not wait."""
        ...

    async def receive(self) -> StageEvent:
        """Wait for the next event of any stage, or a Tick when none came for a while."""
        ...


class QueuePort:
    """Stages in this process: ``put`` is called from their threads."""

    def __init__(self, tick_every_s: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[StageEvent] = asyncio.Queue()
        self._tick_every_s = tick_every_s
        self._ticker = self._loop.call_later(tick_every_s, self._tick)

    def put(self, event: StageEvent) -> None:
        """Hand an event over from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def receive(self) -> StageEvent:
        """Wait for the next event; one in every ``tick_every_s`` is a Tick."""
        return await self._events.get()

    def close(self) -> None:
        """Tick no more; may be called twice."""
        self._ticker.cancel()

    def _tick(self) -> None:
        self._events.put_nowait(Tick())
        self._ticker = self._loop.call_later(self._tick_every_s, self._tick)


class ZmqPort:
    """The coordinator's end of the control star: a ROUTER that stages connect to.

    A stage is lost when neither an answer nor a heartbeat came for ``heartbeat_timeout_s`` after
    its first message, or when ``report_lost`` is called.
    """

    def __init__(
        self,
        bind: str,
        num_stages: int,
        clock: Clock,
        *,
        heartbeat_timeout_s: float,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
        self._socket.bind(bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._num_stages = num_stages
        self._clock = clock
        self._timeout_s = heartbeat_timeout_s
        self._last_seen: dict[int, float] = {}
        self._lost: set[int] = set()
        self._reports: list[StageLost] = []
        self._looked_at = clock.now()
        shadow: Any = zmq.Socket.shadow  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._sync = shadow(self._socket)

    def send(self, plan: Plan) -> None:
        """Send ``plan`` to every stage that is not lost."""
        self._broadcast(encode_plan(plan))

    def close_stages(self) -> None:
        """Tell every stage to end its loop."""
        self._broadcast(b"")

    def report_lost(self, stage: int, message: str) -> None:
        """Say from outside that a stage is gone."""
        self._reports.append(StageLost(stage, message))

    async def receive(self) -> StageEvent:
        """Wait for the next event; a Tick after half a second without one, heartbeats or not."""
        until = self._clock.now() + _TICK_AFTER_S
        while True:
            if self._reports:
                event = self._reports.pop(0)
            else:
                frames = self._take()
                if frames is None:
                    self._look_for_silence()
                    left_ms = round(1000 * (until - self._clock.now()))
                    if not self._reports and (left_ms <= 0 or not await self._socket.poll(left_ms)):
                        return Tick()
                    continue
                event = self._understand(*frames)
            if isinstance(event, StageLost):
                if event.stage in self._lost:
                    continue
                self._lost.add(event.stage)
            if event is not None:
                return event

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self._context.destroy(linger=200)

    def _take(self) -> tuple[bytes, bytes] | None:
        """The next message's sender and body, if one is there."""
        try:
            identity, body = self._sync.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return identity, body

    def _understand(self, identity: bytes, body: bytes) -> StageReady | StepDone | StageLost | None:
        """An answer; None for a heartbeat."""
        self._last_seen[int(identity.rpartition(b"-")[2])] = self._clock.now()
        return decode_event(body) if body else None

    def _look_for_silence(self) -> None:
        """About once a second, when every message was taken: whoever was not heard is lost."""
        now = self._clock.now()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._reports.extend(
            StageLost(stage, f"stage {stage} has been silent for over {self._timeout_s:g} s")
            for stage, seen in self._last_seen.items()
            if stage not in self._lost and now - seen > self._timeout_s
        )

    def _broadcast(self, message: bytes) -> None:
        for stage in range(self._num_stages):
            if stage in self._lost:
                continue
            try:
                self._sync.send_multipart([b"stage-%d" % stage, message], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._reports.append(StageLost(stage, f"stage {stage} cannot be reached: {error}"))
