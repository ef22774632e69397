"""The stage's end of the control star: plans come in, answers and heartbeats go out."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from memkv_pp.stage.link import CurveKeys
from memkv_pp.wire import Plan, StageLost, StageReady, StepDone, decode_plan, encode_event


class Control(Protocol):
    """How a stage talks to its coordinator."""

    def receive(self) -> Plan | None:
        """Wait for the next plan; None means: close."""
        ...

    def send(self, event: StageReady | StepDone | StageLost) -> None:
        """Answer."""
        ...

    def close(self) -> None:
        """Let go of the connection; may be called twice."""
        ...


class QueueControl:
    """Within one process: a queue of plans, and a callback that takes answers."""

    def __init__(self, answer: Callable[[StageReady | StepDone | StageLost], None]) -> None:
        self.plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._answer = answer

    def receive(self) -> Plan | None:
        """Wait for the next plan."""
        return self.plans.get()

    def send(self, event: StageReady | StepDone | StageLost) -> None:
        """Hand the answer over."""
        self._answer(event)

    def close(self) -> None:
        """Nothing to let go of."""


class ZmqControl:
    """A DEALER socket to the coordinator's ROUTER, and a second one that only beats.

    Heartbeats come from a thread of this process: a process that is stopped, or dead, falls
    silent; one that computes does not.
    """

    def __init__(
        self, endpoint: str, stage: int, *, beat_every_s: float, keys: CurveKeys | None = None
    ) -> None:
        self._context = zmq.Context()
        self._endpoint = endpoint
        self._keys = keys
        self._socket = self._connect(b"stage-%d" % stage)
        self._stopped = threading.Event()
        self._beat = threading.Thread(
            target=self._beats, args=(stage, beat_every_s), name=f"heartbeat-{stage}", daemon=True
        )
        self._beat.start()

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 1000)
        if self._keys is not None:
            self._keys.secure_client(socket)
        socket.connect(self._endpoint)
        return socket

    def _beats(self, stage: int, every_s: float) -> None:
        socket = self._connect(b"heart-%d" % stage)
        while not self._stopped.wait(every_s):
            socket.send(b"")
        socket.close(linger=0)

    def receive(self) -> Plan | None:
        """Wait for the next plan; an empty message closes."""
        message = self._socket.recv()
        return decode_plan(message) if message else None

    def send(self, event: StageReady | StepDone | StageLost) -> None:
        """Send the answer."""
        self._socket.send(encode_event(event))

    def close(self) -> None:
        """Stop beating and close the sockets."""
        self._stopped.set()
        self._beat.join()
        self._context.destroy(linger=1000)
