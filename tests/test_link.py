"""Links carry tensors bit for bit, in order, and say so when the other end is gone."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import zmq

from memkv_pp.errors import InternalError, StageLost
from memkv_pp.stage.link import (
    HIDDEN,
    CurveKeys,
    ProcessGroupLink,
    QueueLink,
    ZmqReceiver,
    ZmqSender,
    host_rendezvous,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAIT_S = 20
ONE = {HIDDEN: ((1,), torch.float32)}


def every_bit_pattern(dtype):
    """Rows of 16 with NaN, infinities and denormals among them, as a tensor that is not contiguous."""
    bits = torch.arange(-(2**15), 2**15, 64, dtype=torch.int16)
    rows = bits.view(dtype) if dtype.itemsize == 2 else (bits.int() * 65537).view(dtype)
    return rows.reshape(16, -1).t()


def bits_of(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def expected_of(tensors):
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def receive_in_thread(receiver, plan, expected):
    """A future of the message; a receiver that hangs fails the test and does not outlive it."""
    future = Future()

    def receive():
        try:
            future.set_result(receiver.receive(plan, expected))
        except (InternalError, StageLost) as error:
            future.set_exception(error)

    threading.Thread(target=receive, daemon=True).start()
    return future


class Queue:
    def __enter__(self):
        link = QueueLink()
        return link, link

    def __exit__(self, *_):
        pass


class Zmq:
    """A pyzmq pair over ``bind``, with keys or without."""

    def __init__(self, bind, keys=None):
        self.bind, self.keys = bind, keys

    def __enter__(self):
        self.receiver = ZmqReceiver(self.bind, self.keys)
        self.sender = ZmqSender(self.receiver.endpoint, self.keys)
        return self.sender, self.receiver

    def __exit__(self, *_):
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["queue", "ipc", "tcp", "tcp with keys"])
def link(request, tmp_path):
    kinds = {
        "queue": Queue,
        "ipc": lambda: Zmq(f"ipc://{tmp_path}/link"),
        "tcp": lambda: Zmq("tcp://127.0.0.1:*"),
        "tcp with keys": lambda: Zmq("tcp://127.0.0.1:*", CurveKeys.generate()),
    }
    with kinds[request.param]() as ends:
        yield ends


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_arrive_bit_for_bit_and_in_order(link, dtype):
    sender, receiver = link
    hidden = every_bit_pattern(dtype)
    for plan in range(3):
        sender.send(plan, {HIDDEN: hidden[plan:], "tap": hidden[:1]})
    for plan in range(3):
        sent = {HIDDEN: hidden[plan:], "tap": hidden[:1]}
        found = receive_in_thread(receiver, plan, expected_of(sent)).result(WAIT_S)
        assert list(found) == [HIDDEN, "tap"]
        for name, tensor in sent.items():
            assert found[name].dtype is dtype
            assert torch.equal(bits_of(found[name]), bits_of(tensor))


@pytest.mark.parametrize(
    ("plan", "name", "shape", "dtype", "message"),
    [
        pytest.param(6, HIDDEN, (2, 4), torch.float32, "plan 5 came for plan 6", id="plan"),
        pytest.param(5, "tap", (2, 4), torch.float32, "plan 5: the boundary", id="name"),
        pytest.param(5, HIDDEN, (4, 2), torch.float32, "plan 5: the boundary", id="shape"),
        pytest.param(5, HIDDEN, (2, 4), torch.float16, "plan 5: the boundary", id="dtype"),
    ],
)
def test_what_was_not_expected_is_refused(link, plan, name, shape, dtype, message):
    sender, receiver = link
    sender.send(5, {HIDDEN: torch.ones(2, 4)})
    with pytest.raises(InternalError, match=message):
        receive_in_thread(receiver, plan, {name: (shape, dtype)}).result(WAIT_S)


def test_closing_a_blocked_receiver_raises_stage_lost(link):
    _, receiver = link
    future = receive_in_thread(receiver, 0, {})
    receiver.close()
    with pytest.raises(StageLost, match="closed while plan 0 was awaited"):
        future.result(WAIT_S)
    with pytest.raises(StageLost, match="closed while plan 1 was awaited"):
        receive_in_thread(receiver, 1, {}).result(WAIT_S)
    receiver.close()


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"no json"], id="no json"),
        pytest.param([b"[]"], id="no object"),
        pytest.param([b'{"plan": 0, "tensors": [["hidden", "load", [1]]]}'], id="no dtype"),
        pytest.param([b"\xff\xfe"], id="no text"),
        pytest.param([b'{"plan": 0, "tensors": [["hidden", "float32", [1]]]}'], id="no frame"),
        pytest.param(
            [b'{"plan": 0, "tensors": [["hidden", "float32", [1]]]}', b"abc"], id="short frame"
        ),
    ],
)
def test_a_damaged_message_is_refused(tmp_path, frames):
    receiver = ZmqReceiver(f"ipc://{tmp_path}/link")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(receiver.endpoint)
        socket.send_multipart(frames)
        with pytest.raises(InternalError, match="boundary"):
            receive_in_thread(receiver, 0, ONE).result(WAIT_S)
    receiver.close()


@pytest.mark.parametrize("keys", ["none", "other"])
def test_a_sender_without_the_right_keys_is_not_heard(keys):
    right = CurveKeys.generate()
    receiver = ZmqReceiver("tcp://127.0.0.1:*", right)
    stranger = ZmqSender(receiver.endpoint, None if keys == "none" else CurveKeys.generate())
    stranger.send(0, {HIDDEN: torch.zeros(1)})
    friend = ZmqSender(receiver.endpoint, right)
    friend.send(1, {HIDDEN: torch.ones(1)})
    found = receive_in_thread(receiver, 1, ONE).result(WAIT_S)
    assert found[HIDDEN].tolist() == [1.0]
    assert receiver._socket.poll(200) == 0
    for end in (stranger, friend, receiver):
        end.close()


def test_generated_keys_differ():
    assert CurveKeys.generate().secret != CurveKeys.generate().secret


def pair_over_gloo(timeout_s, num_stages=2):
    """The rendezvous, which must live on, and a link per stage, built at the same time."""
    store = host_rendezvous("127.0.0.1")

    def make(stage):
        return ProcessGroupLink(
            "gloo",
            stage,
            num_stages,
            store_host="127.0.0.1",
            store_port=store.port,
            timeout_s=timeout_s,
        )

    with ThreadPoolExecutor(num_stages) as pool:
        return store, list(pool.map(make, range(num_stages)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_gloo_carries_tensors_bit_for_bit_and_in_order(dtype):
    _store, (first, second, third) = pair_over_gloo(WAIT_S, num_stages=3)
    hidden = every_bit_pattern(dtype)
    messages = [{HIDDEN: hidden[plan:], "tap": hidden[:1]} for plan in range(3)]

    def forward():
        for plan, sent in enumerate(messages):
            second.send(plan, second.receive(plan, expected_of(sent)))

    middle = threading.Thread(target=forward)
    middle.start()

    def start():
        for plan, sent in enumerate(messages):
            first.send(plan, sent)

    begin = threading.Thread(target=start)
    begin.start()
    for plan, sent in enumerate(messages):
        found = third.receive(plan, expected_of(sent))
        for name, tensor in sent.items():
            assert torch.equal(bits_of(found[name]), bits_of(tensor))
    begin.join()
    middle.join()
    for link in (first, second, third):
        link.close()
        link.close()


@pytest.mark.slow
def test_over_gloo_a_silent_sender_is_lost_within_the_timeout():
    _store, (_first, second) = pair_over_gloo(1.0)
    with pytest.raises(StageLost, match="stage 0 sent nothing for plan 4") as lost:
        receive_in_thread(second, 4, ONE).result(WAIT_S)
    assert lost.value.stage == 0


@pytest.mark.slow
def test_over_gloo_a_receiver_that_takes_nothing_is_lost_within_the_timeout():
    _store, (first, _second) = pair_over_gloo(1.0)
    first.send(0, {HIDDEN: torch.ones(1)})
    with pytest.raises(StageLost, match="stage 1 takes no hidden states") as lost:
        first.send(1, {HIDDEN: torch.ones(1)})
    assert lost.value.stage == 1


@pytest.mark.slow
def test_over_gloo_a_dead_peer_is_lost_and_its_loss_is_typed_from_then_on():
    for dead, live in ((0, 1), (1, 0)):
        _store, links = pair_over_gloo(5.0)
        link = links[live]
        links.clear()
        for plan in (0, 1, 2):
            calls = (
                lambda plan=plan, link=link: link.send(plan, {HIDDEN: torch.ones(1)}),
                lambda plan=plan, link=link: receive_in_thread(link, plan, ONE).result(WAIT_S),
            )
            with pytest.raises(StageLost, match=f"stage {dead} ") as lost:
                calls[live]()
            assert lost.value.stage == dead
