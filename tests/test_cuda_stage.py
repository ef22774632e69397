"""A stage's cache on the CUDA kernels: by emulation everywhere, and on a device with ``-m gpu``.

What a stage of a CUDA device runs is run here: operators, ``CudaAttention``, records of the arena.
Only what launches a kernel differs.
"""

import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch

from memkv_pp.cache import cuda_ops, ops
from memkv_pp.cache.cuda_attention import CudaAttention
from memkv_pp.cache.cuda_kernels import CudaKernels
from memkv_pp.cache.cuda_launch import (
    ATTEND,
    CODEC,
    ROTATE,
    append_kernel,
    attend_kernel,
    exponents_kernel,
    gather_kernel,
    merge_kernel,
    rotate_kernel,
)
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.errors import InternalError
from memkv_pp.fence import even
from memkv_pp.formats import FORMATS, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.kv_policy import layer_formats
from memkv_pp.model.metadata import open_geometry
from memkv_pp.serve.build import Knobs, build_config
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.stage.runtime import StageRuntime
from memkv_pp.testing.emulated import EmulatedLauncher
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Rows

pytestmark = pytest.mark.slow  # compiling the kernels takes seconds

F32 = torch.float32
PAIRS = ("q8_0:q5_1", "turbo4e:turbo3", "fp8:nvfp4e")
HEADS, KV_HEADS, SIZE = 8, 2, 64


def kernels_of(pair):
    """The kernels of a step's rows: up to 13 prompt rows, or one, of 4 query heads per KV head."""
    key, value = parse_pair(pair).k, parse_pair(pair).v
    packing = [make(fmt, F32) for fmt in (key, value) for make in (append_kernel, gather_kernel)]
    exponents = [exponents_kernel(fmt, F32) for fmt in (key, value) if fmt.exponent]
    attending = [attend_kernel(key, value, F32, vectors) for vectors in (4, 8)]
    return packing + exponents, attending


def launched_by(pair):
    """What a stage whose rows are attended in place launches, if one of the sides is rotated."""
    packing, attending = kernels_of(pair)
    append = [kernel for kernel in packing if not kernel.startswith("gather")]
    return {*append, *attending, merge_kernel(F32), rotate_kernel(F32, SIZE)}


KERNELS = {
    CODEC: [kernel for pair in PAIRS for kernel in kernels_of(pair)[0]],
    ATTEND: [kernel for pair in PAIRS for kernel in kernels_of(pair)[1]] + [merge_kernel(F32)],
    ROTATE: [rotate_kernel(F32, SIZE)],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny"),
        "llama",
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=SIZE,
        layers=2,
    )


class RecordingLauncher:
    """Launches as the emulation does and remembers every kernel's name."""

    def __init__(self, directory):
        self.launched = set()
        self._emulation = EmulatedLauncher(directory, KERNELS)

    def launch(self, source, kernel, *how):
        self.launched.add(kernel)
        self._emulation.launch(source, kernel, *how)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return RecordingLauncher(tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def emulated(launcher):
    return CudaKernels(launcher)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_kernels(request):
    """A context in which CUDA kernels serve a device's tensors; its value is the device."""
    if request.param == "cuda":
        assert cuda_ops.load() is not None
        return lambda: nullcontext("cuda")

    @contextmanager
    def on_emulation():
        with cuda_ops.serving("cpu", request.getfixturevalue("emulated")):
            yield "cpu"

    return on_emulation


def stage_cache(pair, attention, device="cpu"):
    layer = LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=HEADS,
        kv_heads=KV_HEADS,
        key_head_size=SIZE,
        value_head_size=SIZE,
    )
    model = ModelGeometry(name="made", family="made", layers=(layer, layer))
    (sizing,) = size_fence(model, (parse_pair(pair),) * 2, even(2, 1), CacheOptions())
    units = Footprint(16, 0, 0)
    cache = StageCache(
        TorchDevice(device), model, sizing, units, max_sequences=4, attention=attention
    )
    cache.arena.storage.fill_(0xFF)
    return cache


PREFILL, CHUNK, VERIFY, DECODE = (
    [(0, 0, 13)],
    [(0, 13, 8), (1, 0, 3)],
    [(1, 3, 4), (0, 21, 4)],
    [(0, 25, 1), (1, 7, 1)],
)


def walk(cache, *, padded=0):
    """Prefill, a chunk beside another prompt, verification, decode: the outputs of both layers."""
    generator = torch.Generator().manual_seed(8)
    where = cache.arena.storage.device
    outputs = []
    for sequence in (0, 1):
        cache.open(sequence)
    for entries in (PREFILL, CHUNK, VERIFY, DECODE):
        batch = cache.extend([Rows(*entry, False) for entry in entries])
        count = len(batch.positions)
        if padded:
            batch = cache.part(batch, 0, count, padded)
        for layer in (0, 1):
            query, key, value = (
                torch.randn(count, heads, SIZE, generator=generator)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            rows = (0, 0, 0, 0, 0, max(padded - count, 0))
            query, key, value = (
                torch.nn.functional.pad(part, rows).to(where) for part in (query, key, value)
            )
            out = cache.layers.attend(
                layer, batch, query, key, value, SIZE**-0.5, fixed=bool(padded)
            )
            assert not out[count:].any()
            outputs.append(out[:count].cpu())
    cache.check()
    return outputs


@pytest.mark.parametrize("pair", PAIRS)
def test_a_stage_cache_on_cuda_kernels_equals_the_torch_path(pair, on_kernels):
    with on_kernels() as device:
        cache = stage_cache(pair, CudaAttention(), device)
        found = walk(cache)
    torch_path = stage_cache(pair, None)
    expected = walk(torch_path)
    assert cache.layers.rows_unpacked == 0 < torch_path.layers.rows_unpacked
    assert torch.equal(cache.arena.storage.cpu(), torch_path.arena.storage)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_padded_rows_come_out_as_zeros_and_change_no_bit(on_kernels):
    with on_kernels() as device:
        plain = walk(stage_cache("q8_0:q5_1", CudaAttention(), device))
        padded = walk(stage_cache("q8_0:q5_1", CudaAttention(), device), padded=16)
    for ours, theirs in zip(padded, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_are_gathered_by_the_kernels_too(pair, on_kernels):
    with on_kernels() as device:
        cache = stage_cache(pair, None, device)
        found = walk(cache)
        expected = walk(stage_cache(pair, CudaAttention(), device))
    assert cache.layers.rows_unpacked > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_pipeline_draws_the_same_tokens_on_cuda_kernels(
    on_kernels, run_pipeline, model, launcher
):
    prompts = [[5, 90, 7, 31, 8, 77, 12, 100], [60, 61, 62]]
    said = {"kv": "turbo4e:turbo3", "max_new": 5}
    expected = run_pipeline(model, prompts, **said).completions
    launcher.launched.clear()
    with on_kernels() as device:
        found = run_pipeline(model, prompts, devices=(device,), **said).completions
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    if device == "cpu":
        assert launcher.launched == launched_by("turbo4e:turbo3")


def test_a_stage_has_run_all_its_kernels_before_its_first_plan(emulated, launcher, model):
    geometry = open_geometry(str(model))
    knobs = Knobs(
        model=str(model),
        geometry=geometry,
        formats=layer_formats(geometry, kv=parse_pair("turbo4e:turbo3")),
        options=CacheOptions(),
        rows=(8,),
        dtype="f32",
    )
    launcher.launched.clear()
    with cuda_ops.serving("cpu", emulated):
        stage = StageRuntime(build_config(knobs), 0)
    assert launcher.launched == launched_by("turbo4e:turbo3")
    stage.check()
    assert stage.statistics().used_bytes == 0
    stage.close()


def test_every_format_is_served_where_kernels_are_loaded(emulated):
    views = []
    for fmt in FORMATS.values():
        cache = stage_cache(f"{fmt.name}:{fmt.name}", None)
        assert cache.arena.sizing.full is not None
        views.append(ops.layer_view(cache.arena, cache.arena.sizing.full.layers[0]).k)
    attention = CudaAttention()
    assert not any(attention.serves(view) for view in views)
    with cuda_ops.serving("cpu", emulated):
        assert all(attention.serves(view) for view in views)


def test_without_cupy_one_warning_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda_ops, "_tried", False)
    monkeypatch.setattr(cuda_ops, "_serving", {})
    with pytest.warns(RuntimeWarning, match=r"need CuPy.*memkv-pp\[gpu\].*torch code serves"):
        assert cuda_ops.load() is None
    assert cuda_ops.load() is None
    assert cuda_ops.loaded(torch.device("cuda")) is None


def test_an_operator_without_kernels_says_so():
    values = torch.zeros(1, 64)
    with pytest.raises(InternalError, match=r"tensors on cpu before load\(\)"):
        torch.ops.memkv.rotate(values, values[0], values[0])
