"""The coordinator's end of the control star."""

import asyncio
import threading

import pytest
import zmq

from memkv_pp.admission.ports import ZmqPort
from memkv_pp.clock import SystemClock
from memkv_pp.wire import Tick


@pytest.mark.slow
def test_heartbeats_do_not_hold_the_tick_back(tmp_path):
    """A stage that beats but does not answer must still run into the deadline of its plan."""
    stop = threading.Event()

    def beat(endpoint):
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"heart-0")
        socket.connect(endpoint)
        while not stop.wait(0.05):
            socket.send(b"")
        context.destroy(linger=0)

    async def main():
        port = ZmqPort(f"ipc://{tmp_path}/control", 1, SystemClock(), heartbeat_timeout_s=60)
        thread = threading.Thread(target=beat, args=(port.endpoint,))
        thread.start()
        try:
            assert isinstance(await asyncio.wait_for(port.receive(), 5), Tick)
            assert isinstance(await asyncio.wait_for(port.receive(), 5), Tick)
        finally:
            stop.set()
            thread.join()
            port.close()

    asyncio.run(main())
