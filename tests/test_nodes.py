"""Stages on two Ray nodes: control and hidden states over TCP, with CURVE keys."""

import asyncio
import logging
import os
import signal
import time

import psutil
import pytest

from memkv_pp.config import Backend, LinkKind
from memkv_pp.errors import StageLost
from memkv_pp.formats import parse_pair
from memkv_pp.kv_policy import layer_formats
from memkv_pp.model.metadata import open_geometry
from memkv_pp.serve.build import Knobs, build_config
from memkv_pp.serve.session import Pipeline
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Request

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS = ([1, 2, 3, 4, 5], [9, 8, 7])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def two_nodes():
    import ray
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 80 * 1024**2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **size})
    cluster.add_node(num_cpus=2, object_store_memory=80 * 1024**2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize(
    "link", [LinkKind.ZMQ, pytest.param(LinkKind.GLOO, marks=pytest.mark.full)]
)
def test_stages_on_two_nodes_give_the_tokens_of_one_process(two_nodes, tiny, run_pipeline, link):
    knobs = {"max_new": 12, "waves": 2, "kv": "q8_0:q5_1"}
    here = run_pipeline(tiny, PROMPTS, stages=3, **knobs)
    there = run_pipeline(tiny, PROMPTS, stages=3, backend=Backend.RAY, link=link, **knobs)
    assert [c.tokens for c in there.completions] == [c.tokens for c in here.completions]
    assert len({stage.pid for stage in there.stages}) == 3


def test_a_stage_that_stops_on_another_node_is_lost_in_time_and_its_process_ends(two_nodes, tiny):
    geometry = open_geometry(tiny)
    config = build_config(
        Knobs(
            model=str(tiny),
            geometry=geometry,
            formats=layer_formats(geometry, kv=parse_pair("f16")),
            options=CacheOptions(),
            rows=(1500,),
            stages=3,
            backend=Backend.RAY,
        )
    )

    async def scenario():
        import ray

        async with Pipeline(config) as pipeline:
            completion = pipeline.driver.submit(Request(request=0, prompt=(1, 2, 3), max_new=1400))
            await pipeline.start()
            stages = pipeline.stages
            here = ray.get_runtime_context().get_node_id()
            places = stages._placements  # pyright: ignore[reportAttributeAccessIssue]
            away = next(index for index, place in enumerate(places) if place.node_id != here)
            while not completion.tokens:
                await asyncio.sleep(0.02)
            os.kill(places[away].pid, signal.SIGSTOP)
            struck = time.monotonic()
            await pipeline.driver.wait([completion])
            return completion, away, time.monotonic() - struck, stages.pids()

    completion, away, noticed_s, pids = asyncio.run(scenario())
    assert noticed_s < 10
    assert isinstance(completion.error, StageLost)
    assert f"stage {away}" in str(completion.error)
    give_up = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < give_up, "a stage's process is left"
        time.sleep(0.1)
