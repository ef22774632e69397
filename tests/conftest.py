"""Fixtures and hypothesis profiles: ``pytest --hypothesis-profile=deep`` searches longer."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None, database=None)
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile("ci")

MODELS = Path(__file__).parent.parent / ".models"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path} is absent: run `make model`")
    return path


_CPU_FLAGS = {"avx512": None, "avx2": ("-march=x86-64-v3",), "portable": ("-DMEMKV_PORTABLE",)}


@pytest.fixture(scope="session", params=_CPU_FLAGS)
def host_codec(request):
    """The host codec of each vector path that this machine's CPU has."""
    from memkv_pp import config
    from memkv_pp.cache import host_build, host_kernels
    from memkv_pp.cache.host_codec import HostCodec

    native = host_build.find_toolchain(None)
    needed = {"avx512": "__AVX512BW__", "avx2": "__AVX2__"}.get(request.param, "")
    if needed not in native.cpu_features:
        pytest.skip(f"this CPU has no {request.param}")
    toolchain = host_build.find_toolchain(None, _CPU_FLAGS[request.param])
    source = host_build.kernel_sources() / "host" / "codec_host.cpp"
    library = host_build.build(source, toolchain, config.cache_directory())
    found = HostCodec(host_kernels.open_library(library))
    assert found.path == request.param
    return found


@pytest.fixture(scope="session")
def gemma3() -> Path:
    path = MODELS / "gemma-3-270m.Q4_K_M.gguf"
    if not path.exists():
        pytest.skip(f"{path} is absent: run `make model`")
    return path


@pytest.fixture(scope="session")
def run_pipeline():
    """Callable: serve prompts of token ids on a model with knobs; the session's Report."""
    from memkv_pp.formats import parse_pair
    from memkv_pp.kv_policy import layer_formats
    from memkv_pp.model.metadata import open_geometry
    from memkv_pp.serve.build import Knobs, build_config
    from memkv_pp.serve.session import generate
    from memkv_pp.sizing import CacheOptions
    from memkv_pp.wire import Request, Sampling

    def run(
        model,
        prompts,
        *,
        kv="f32:f32",
        max_new=8,
        options=None,
        temperature=0.0,
        end_ids=frozenset(),
        **knobs,
    ):
        geometry = open_geometry(model)
        said: dict[str, Any] = {"dtype": "f32"} | knobs
        config = build_config(
            Knobs(
                model=str(model),
                geometry=geometry,
                formats=layer_formats(geometry, kv=parse_pair(kv)),
                options=options or CacheOptions(),
                rows=tuple(len(prompt) + max_new - 1 for prompt in prompts),
                **said,
            )
        )
        requests = [
            Request(
                request=index,
                prompt=tuple(prompt),
                max_new=max_new,
                sampling=Sampling(temperature=temperature, seed=7, prompt_index=index),
                end_ids=end_ids,
            )
            for index, prompt in enumerate(prompts)
        ]
        return asyncio.run(generate(config, requests))

    return run


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray of this machine for one test module, with more CPUs than it has."""
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 1024**2,
    )
    yield
    ray.shutdown()
