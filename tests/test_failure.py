"""A stage that dies or stops during generation: a typed error in time, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memkv_pp.config import Backend
from memkv_pp.errors import StageLost
from memkv_pp.formats import parse_pair
from memkv_pp.kv_policy import layer_formats
from memkv_pp.model.metadata import open_geometry
from memkv_pp.serve.build import Knobs, build_config
from memkv_pp.serve.session import Pipeline
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Request

DEADLINE_S = 10.0
NEW_TOKENS = 1500
CLI = Path(sys.executable).parent / "memkv-pp"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition, timeout_s):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited too long"
        await asyncio.sleep(0.02)


def requests(count):
    return [
        Request(request=index, prompt=tuple(range(1, 9 + index)), max_new=NEW_TOKENS)
        for index in range(count)
    ]


def config_of(tiny, num_requests, **knobs):
    geometry = open_geometry(tiny)
    return build_config(
        Knobs(
            model=str(tiny),
            geometry=geometry,
            formats=layer_formats(geometry, kv=parse_pair("q8_0:q5_1")),
            options=CacheOptions(),
            rows=(8 + NEW_TOKENS + num_requests,) * num_requests,
            stages=3,
            backend=Backend.RAY,
            **knobs,
        )
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "stage"),
    [
        pytest.param(signal.SIGKILL, 0, id="killed-0"),
        pytest.param(signal.SIGKILL, 2, id="killed-2", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 0, id="stopped-0", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 2, id="stopped-2"),
    ],
)
def test_losing_a_stage_is_a_typed_error_within_the_deadline_and_leaves_nothing(
    ray_cluster, tiny, blow, stage
):
    import ray

    async def scenario():
        async with Pipeline(config_of(tiny, 4)) as pipeline:
            completions = [pipeline.driver.submit(request) for request in requests(4)]
            await pipeline.start()
            pids = pipeline.stages.pids()
            await until(lambda: all(c.tokens for c in completions), 60)
            os.kill(pids[stage], blow)
            struck = time.monotonic()
            await pipeline.driver.wait(completions)
            noticed_s = time.monotonic() - struck
            pipeline.coordinator.check()
            held = pipeline.coordinator.ledger.statistics().held_bytes
            if blow == signal.SIGKILL:
                with pytest.raises(StageLost, match="does not say what it holds"):
                    await pipeline.stages.statistics()
        return completions, pids, noticed_s, held

    completions, pids, noticed_s, held = asyncio.run(scenario())
    assert noticed_s < DEADLINE_S
    for completion in completions:
        assert completion.finish_reason == "error"
        assert isinstance(completion.error, StageLost)
        assert f"stage {stage}" in str(completion.error)
        assert 0 < len(completion.tokens) < NEW_TOKENS
    assert held == (0, 0, 0)
    asyncio.run(until(lambda: not any(alive(pid) for pid in pids), 10))
    asyncio.run(until(lambda: ray.available_resources().get("CPU") == 16, 20))


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_driver_leaves_no_process_of_its_stages(tiny, tmp_path):
    words = [CLI, "generate", tiny, "--prompt", "the", "--stages", "2", "--backend", "ray"]
    driver = subprocess.Popen(
        [*map(str, words), "--max-new", str(NEW_TOKENS), "--kv", "f32"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen: set[int] = set()

        def stages_run():
            for child in psutil.Process(driver.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "StageActor" in " ".join(child.cmdline()):
                        seen.add(child.pid)
            return len(seen) == 2

        asyncio.run(until(stages_run, 90))
    finally:
        driver.kill()
        driver.wait()
    asyncio.run(until(lambda: not any(alive(pid) for pid in seen), 30))


def test_a_model_that_cannot_be_loaded_fails_every_request_with_its_own_error(tiny, run_pipeline):
    from memkv_pp.errors import ModelError

    broken = tiny.parent / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny / "config.json").read_bytes())
    report = run_pipeline(broken, [[1, 2, 3], [4, 5]], stages=2)
    assert report.stages == ()
    for completion in report.completions:
        assert isinstance(completion.error, ModelError)
