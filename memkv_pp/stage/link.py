"""Hidden states from stage to stage. Every message names the plan and the tensors it carries.

A link has one direction: stage s sends, stage s + 1 receives. Receiving checks that the message is
of the plan that was asked for.
"""

import json
import math
import queue
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import zmq

from memkv_pp.errors import InternalError, StageLost

Tensors = Mapping[str, torch.Tensor]
Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

HIDDEN = "hidden"

CLOSE_POLL_MS = 100

_DTYPES = {str(d)[6:]: d for d in (torch.float32, torch.float16, torch.bfloat16)}

# torch ships no type stubs for stores and process groups
_DIST: Any = dist


class Sender(Protocol):
    """The upstream end."""

    def send(self, plan: int, tensors: Tensors) -> None:
        """Hand over the tensors of ``plan``; the sender gives them away and changes them no more."""
        ...

    def close(self) -> None:
        """Let go of the connection; may be called twice."""
        ...


class Receiver(Protocol):
    """The downstream end."""

    def receive(self, plan: int, expected: Expected) -> dict[str, torch.Tensor]:
        """Wait for the tensors of ``plan``: exactly the names, shapes and dtypes of ``expected``.

        InternalError when another plan or another tensor comes; StageLost when the link is gone.
        """
        ...

    def close(self) -> None:
        """Let go of the connection; a blocked ``receive`` raises StageLost."""
        ...


def _check(plan: int, found_plan: int, found: Expected, expected: Expected) -> None:
    if found_plan != plan:
        raise InternalError(f"hidden states of plan {found_plan} came for plan {plan}")
    if dict(found) != dict(expected):
        raise InternalError(f"plan {plan}: the boundary brought {found}, expected {expected}")


def _read_head(data: bytes) -> tuple[int, Expected]:
    try:
        head = json.loads(data)
        found = {
            str(name): (tuple(map(int, shape)), _DTYPES[dtype])
            for name, dtype, shape in head["tensors"]
        }
        return int(head["plan"]), found
    except (ValueError, TypeError, KeyError) as error:
        raise InternalError(f"a boundary message has no readable head: {data[:64]!r}") from error


def _described(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class QueueLink:
    """Both ends within one process; tensors are handed over as they are."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, dict[str, torch.Tensor]] | None] = (
            queue.SimpleQueue()
        )

    def send(self, plan: int, tensors: Tensors) -> None:
        """Put the tensors into the queue."""
        self._queue.put((plan, dict(tensors)))

    def receive(self, plan: int, expected: Expected) -> dict[str, torch.Tensor]:
        """Take the next message."""
        item = self._queue.get()
        if item is None:
            self._queue.put(None)
            raise StageLost(f"the link was closed while plan {plan} was awaited")
        found_plan, tensors = item
        _check(plan, found_plan, _described(tensors), expected)
        return tensors

    def close(self) -> None:
        """Wake the receiver, now and whenever it comes again."""
        self._queue.put(None)


class ZmqSender:
    """The upstream end of a pyzmq pair: connects to the receiver's endpoint."""

    def __init__(self, endpoint: str, keys: "CurveKeys | None" = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            keys.secure_client(self._socket)
        self._socket.connect(endpoint)

    def send(self, plan: int, tensors: Tensors) -> None:
        """One frame of JSON that names the tensors, then one frame of bytes for each."""
        head = {
            "plan": plan,
            "tensors": [[n, str(t.dtype)[6:], list(t.shape)] for n, t in tensors.items()],
        }
        frames = [json.dumps(head).encode()]
        for tensor in tensors.values():
            data = tensor.detach().to("cpu").contiguous()
            frames.append(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        self._socket.send_multipart(frames)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class ZmqReceiver:
    """The downstream end: binds; ``endpoint`` is where the sender must connect."""

    def __init__(self, bind: str, keys: "CurveKeys | None" = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._receiving = threading.Lock()
        self._closing = threading.Event()
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if keys is not None:
            keys.secure_server(self._socket)
        self._socket.bind(bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, plan: int, expected: Expected) -> dict[str, torch.Tensor]:
        """Wait for the next message and rebuild its tensors."""
        frames = self._next_message(plan)
        found_plan, found = _read_head(frames[0].bytes)
        _check(plan, found_plan, found, expected)
        wanted = [math.prod(shape) * dtype.itemsize for shape, dtype in found.values()]
        if [len(frame) for frame in frames[1:]] != wanted:
            raise InternalError(
                f"plan {plan}: the boundary's frames have {[len(f) for f in frames[1:]]} bytes,"
                f" its head says {wanted}"
            )
        tensors: dict[str, torch.Tensor] = {}
        for (name, (shape, dtype)), frame in zip(found.items(), frames[1:], strict=True):
            flat = torch.frombuffer(bytearray(frame.buffer), dtype=torch.uint8)
            tensors[name] = flat.view(dtype).reshape(shape)
        return tensors

    def _next_message(self, plan: int) -> list[zmq.Frame]:
        with self._receiving:
            # A socket belongs to one thread at a time: `close` asks, and waits for the lock.
            while not self._closing.is_set():
                if self._socket.poll(CLOSE_POLL_MS):
                    return self._socket.recv_multipart(copy=False)
        raise StageLost(f"the link was closed while plan {plan} was awaited")

    def close(self) -> None:
        """Close the socket, once a blocked ``receive`` has let go of it."""
        self._closing.set()
        with self._receiving:
            self._context.destroy(linger=0)


class CurveKeys:
    """One CURVE key pair shared by the processes of a pipeline, for sockets between nodes."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        self.public = public
        self.secret = secret

    @classmethod
    def generate(cls) -> "CurveKeys":
        """A fresh pair."""
        return cls(*zmq.curve_keypair())

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only clients that know the server's public key and encrypt to it."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._own(socket)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Connect to a server that holds the secret key."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        self._own(socket)

    def _own(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def host_rendezvous(host: str) -> Any:
    """A TCPStore for the groups of a pipeline, on a free ``port``; it lives as long as the object."""
    return _DIST.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _gloo_group(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    group = _DIST.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=host)]
    options._timeout = timeout
    return group(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    return _DIST.ProcessGroupNCCL(store, rank, size, timeout)


class ProcessGroupLink:
    """Both directions of a stage over torch.distributed: gloo on CPUs, NCCL on GPUs.

    One communicator per generation, with a store prefix of its own. Tensors travel without a
    header: shapes and dtypes come from the plan on both sides. A gloo send waits for the peer's
    receive, so sends are posted and awaited before the next one. ``host`` is this stage's own
    address (gloo), by default the rendezvous'; ``device`` is where tensors travel from and to.
    """

    def __init__(
        self,
        kind: str,
        stage: int,
        num_stages: int,
        *,
        store_host: str,
        store_port: int,
        host: str | None = None,
        generation: int = 0,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = _DIST.PrefixStore(
            f"generation-{generation}",
            _DIST.TCPStore(store_host, store_port, is_master=False, timeout=timeout),
        )
        self._stage = stage
        self._device = device or torch.device("cpu")
        make = _nccl_group if kind == "nccl" else _gloo_group
        self._group = make(store, stage, num_stages, host or store_host, timeout)
        self._posted: list[tuple[dist.Work, list[torch.Tensor]]] = []

    def send(self, plan: int, tensors: Tensors) -> None:
        """Post the sends to the next stage, once the ones before are through."""
        self._finish_sends(plan)
        for name in sorted(tensors):
            data = [tensors[name].to(self._device).contiguous()]
            try:
                self._posted.append((self._group.send(data, self._stage + 1, 0), data))
            except RuntimeError as error:
                raise self._lost(plan, error) from error

    def receive(self, plan: int, expected: Expected) -> dict[str, torch.Tensor]:
        """Receive each expected tensor from the stage before."""
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(expected):
            shape, dtype = expected[name]
            tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
            try:
                self._group.recv([tensors[name]], self._stage - 1, 0).wait()
            except RuntimeError as error:
                raise StageLost(
                    f"stage {self._stage - 1} sent nothing for plan {plan}: {error}",
                    stage=self._stage - 1,
                ) from error
        return tensors

    def _finish_sends(self, plan: int) -> None:
        for work, _ in self._posted:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(plan, error) from error
        self._posted.clear()

    def _lost(self, plan: int, error: RuntimeError) -> StageLost:
        receiver = self._stage + 1
        return StageLost(
            f"stage {receiver} takes no hidden states, at plan {plan}: {error}", stage=receiver
        )

    def close(self) -> None:
        """Abandon the communicator; it ends with the process."""
        self._posted.clear()
