"""The Ray actor of a stage: Ray, and nothing else."""

import os
import signal
from dataclasses import dataclass
from typing import Any

import ray
import torch

from memkv_pp.config import LinkKind, PipelineConfig
from memkv_pp.stage.control import ZmqControl
from memkv_pp.stage.link import CurveKeys, ProcessGroupLink, ZmqReceiver, ZmqSender
from memkv_pp.stage.runtime import StageRuntime, StageStatistics
from memkv_pp.stage.worker import StageWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where Ray put a stage."""

    node_id: str
    node_ip: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """How a stage reaches the others.

    ``control``: the coordinator's endpoint. ``downstream``: the next stage's endpoint, with zmq.
    ``store``: host and port of the rendezvous, with gloo and nccl. ``keys``: CURVE, between nodes.
    """

    control: str
    downstream: str = ""
    store: tuple[str, int] | None = None
    keys: tuple[bytes, bytes] | None = None
    beat_every_s: float = 0.5


class StageActor:
    """One stage in a process of its own. Two threads: ``run`` holds one until the stage ends."""

    def __init__(self, config: PipelineConfig, stage: int) -> None:
        self._config = config
        self._stage = stage
        self._receiver: ZmqReceiver | None = None
        self._runtime: StageRuntime | None = None

    def place(self) -> Placement:
        """Where this process runs."""
        context = ray.get_runtime_context()
        return Placement(
            node_id=context.get_node_id(), node_ip=ray.util.get_node_ip_address(), pid=os.getpid()
        )

    def listen(self, bind: str, keys: tuple[bytes, bytes] | None) -> str:
        """Bind the inbound end of the zmq link; the endpoint the stage before connects to."""
        self._receiver = ZmqReceiver(bind, CurveKeys(*keys) if keys else None)
        return self._receiver.endpoint

    def run(self, wiring: Wiring) -> None:
        """Load the stage, then work until the coordinator closes it."""
        config, stage = self._config, self._stage
        keys = CurveKeys(*wiring.keys) if wiring.keys else None
        control = ZmqControl(wiring.control, stage, beat_every_s=wiring.beat_every_s, keys=keys)
        upstream: Any = self._receiver
        downstream: Any = ZmqSender(wiring.downstream, keys) if wiring.downstream else None
        if config.link is not LinkKind.ZMQ and config.num_stages > 1:
            assert wiring.store is not None
            upstream = downstream = ProcessGroupLink(
                config.link.value,
                stage,
                config.num_stages,
                store_host=wiring.store[0],
                store_port=wiring.store[1],
                host=ray.util.get_node_ip_address(),
                device=torch.device(
                    config.devices[stage] if config.link is LinkKind.NCCL else "cpu"
                ),
                timeout_s=config.plan_deadline_s,
            )
        last = stage == config.num_stages - 1

        def load() -> StageRuntime:
            self._runtime = StageRuntime(config, stage)
            return self._runtime

        worker = StageWorker(
            load, stage, control, upstream if stage else None, None if last else downstream
        )
        try:
            worker.run()
        finally:
            control.close()

    def statistics(self) -> StageStatistics:
        """What the stage says of itself, after its own check."""
        assert self._runtime is not None
        self._runtime.check()
        return self._runtime.statistics()


def remote_stage(
    config: PipelineConfig, stage: int, *, num_cpus: float, num_gpus: float, strategy: Any
) -> Any:
    """Start the actor of ``stage``; its handle."""
    make = ray.remote(StageActor).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        scheduling_strategy=strategy,
        max_concurrency=2,
        max_restarts=0,
        name=None,
    )
    return make.remote(config, stage)


def kill_process(pid: int) -> None:
    """SIGKILL ``pid`` on this node, which also ends a stopped process; nothing if it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
