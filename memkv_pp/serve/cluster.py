"""The Ray backend: an actor per stage in a placement group; the only place that knows the actors."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from memkv_pp.admission.ports import ZmqPort
from memkv_pp.clock import SystemClock
from memkv_pp.config import LinkKind, PipelineConfig, ray_address
from memkv_pp.errors import ConfigError, MemkvError, StageLost
from memkv_pp.stage.actor import Placement, Wiring, kill_process, remote_stage
from memkv_pp.stage.link import CurveKeys, host_rendezvous
from memkv_pp.stage.runtime import StageStatistics

_OBJECT_STORE_BYTES = 100 * 1024**2
_CLOSE_TIMEOUT_S = 5.0


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """Turn what Ray raises into StageLost; our own errors, raised in an actor, stay themselves."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MemkvError):
            raise error.cause from error
        raise StageLost(f"{what}: {_first_line(error)}") from error
    except RayError as error:
        raise StageLost(f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


class RayStages:
    """Runs the stages of ``config`` as Ray actors.

    Joins the cluster of this process or of RAY_ADDRESS; where there is neither, starts one on this
    machine and shuts it down at the end.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._owns_ray = False
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._placements: list[Placement] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._port: ZmqPort | None = None
        self._folder: str = ""
        self._store: Any = None

    async def open(self) -> ZmqPort:
        """Place the actors, wire them and set them going; StageLost if one dies before it runs."""
        with _typed("a stage did not start"):
            return await self._open()

    async def _open(self) -> ZmqPort:
        await asyncio.to_thread(self._start_ray)
        await asyncio.to_thread(self._place)
        here = ray.get_runtime_context().get_node_id()
        one_node = all(placement.node_id == here for placement in self._placements)
        keys = None if one_node else CurveKeys.generate()
        pair = None if keys is None else (keys.public, keys.secret)
        self._folder = tempfile.mkdtemp(prefix="memkv-pp-")
        host = ray.util.get_node_ip_address()
        self._port = ZmqPort(
            f"ipc://{self._folder}/control" if one_node else f"tcp://{host}:*",
            self._config.num_stages,
            SystemClock(),
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
            keys=pair,
        )
        store: tuple[str, int] | None = None
        if self._config.link is not LinkKind.ZMQ:
            self._store = host_rendezvous(host)
            store = (host, self._store.port)
        inbound = await asyncio.to_thread(self._listen, one_node, pair)
        for stage, actor in enumerate(self._actors):
            wiring = Wiring(
                control=self._port.endpoint,
                downstream=inbound.get(stage + 1, ""),
                store=store,
                keys=pair,
                beat_every_s=self._config.heartbeat_timeout_s / 10,
            )
            self._watchers.append(asyncio.create_task(self._watch(stage, actor.run.remote(wiring))))
        return self._port

    def pids(self) -> tuple[int, ...]:
        """The actors' processes, on whichever nodes they run."""
        return tuple(placement.pid for placement in self._placements)

    async def statistics(self) -> tuple[StageStatistics, ...]:
        """Every stage's own account; StageLost if one does not give it."""
        with _typed("a stage does not say what it holds"):
            found = await asyncio.to_thread(
                ray.get, [actor.statistics.remote() for actor in self._actors], timeout=30
            )
        self._check_devices(found)
        return tuple(found)

    async def close(self) -> None:
        """End the loops, then the actors, then what of them is left."""
        if self._port is not None:
            self._port.close_stages()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=_CLOSE_TIMEOUT_S)
            for watcher in self._watchers:
                watcher.cancel()
            self._watchers.clear()
        await asyncio.to_thread(self._kill_actors)
        if self._port is not None:
            self._port.close()
            self._port = None
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._owns_ray:
            self._owns_ray = False
            await asyncio.to_thread(ray.shutdown)

    def _start_ray(self) -> None:
        if ray.is_initialized():
            return
        address = ray_address()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            stages = self._config.num_stages
            ray.init(
                address="local",
                num_cpus=stages,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **quiet,
            )
        self._owns_ray = True

    def _place(self) -> None:
        config = self._config
        bundles = [self._bundle(stage) for stage in range(config.num_stages)]
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(config.start_timeout_s):
            raise ConfigError(
                f"--stages: Ray found no room for {bundles} within {config.start_timeout_s:g} s,"
                f" the cluster has {ray.cluster_resources()}",
                "use fewer stages, or add nodes",
            )
        for stage, bundle in enumerate(bundles):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=stage
            )
            self._actors.append(
                remote_stage(
                    config,
                    stage,
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    strategy=strategy,
                )
            )
        places = [actor.place.remote() for actor in self._actors]
        self._placements = ray.get(places, timeout=config.start_timeout_s)

    def _bundle(self, stage: int) -> dict[str, float]:
        cuda = self._config.devices[stage].startswith("cuda")
        bundle: dict[str, float] = {"GPU": 1} if cuda else {"CPU": 1}
        return bundle | (self._config.resources[stage] if self._config.resources else {})

    def _listen(self, one_node: bool, keys: tuple[bytes, bytes] | None) -> dict[int, str]:
        """The inbound endpoints of the stages after the first; empty unless the link is zmq."""
        if self._config.link is not LinkKind.ZMQ:
            return {}
        refs = {
            stage: self._actors[stage].listen.remote(
                f"ipc://{self._folder}/hidden-{stage}"
                if one_node
                else f"tcp://{self._placements[stage].node_ip}:*",
                keys,
            )
            for stage in range(1, self._config.num_stages)
        }
        return dict(zip(refs, ray.get(list(refs.values()), timeout=60), strict=True))

    async def _watch(self, stage: int, run: Any) -> None:
        """Report the stage lost if its actor dies while the pipeline is open."""
        try:
            await asyncio.wrap_future(run.future())
        except RayError as error:
            if self._port is not None:
                message = f"stage {stage}: its process is gone ({_first_line(error)})"
                self._port.report_lost(stage, message)

    def _check_devices(self, found: list[StageStatistics]) -> None:
        """StageLost if two stages were given one GPU."""
        uuids = [statistics.device_uuid for statistics in found if statistics.device_uuid]
        if len(set(uuids)) != len(uuids):
            raise StageLost(f"two stages run on one device: {uuids}")

    def _kill_actors(self) -> None:
        here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        for placement in self._placements:
            if placement.node_id == here:
                kill_process(placement.pid)
            else:
                strategy = NodeAffinitySchedulingStrategy(placement.node_id, soft=False)
                kill = ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=strategy)
                with contextlib.suppress(RayError):
                    ray.get(kill.remote(placement.pid), timeout=_CLOSE_TIMEOUT_S)
        self._actors.clear()
        self._placements.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
