"""How fast the CUDA kernels move bytes, as a share of a device-to-device copy in the same run."""

from statistics import median

import pytest
import torch

from memkv_pp.cache import cuda_ops
from memkv_pp.cache.rotation import sign_rows
from memkv_pp.formats import FORMATS
from memkv_pp.testing.packed_sides import packed_layer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

RECORDS, ROWS, HEADS, SIZE = 4096, 16, 8, 128
ELEMENTS = RECORDS * ROWS * HEADS * SIZE


def gigabytes_per_second(call, num_bytes):
    """The median of five timed runs after one to warm up."""
    call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return num_bytes / median(times) / 1e9


def moved_bytes(fmt, elements):
    """Bytes of ``elements`` as bf16 and as ``fmt``: what is read and written."""
    return elements * 2 + elements // fmt.group * fmt.group_bytes


@pytest.fixture(scope="module")
def kernels():
    kernels = cuda_ops.load()
    assert kernels is not None
    return kernels


@pytest.fixture(scope="module")
def copy_rate():
    source = torch.zeros(ELEMENTS * 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return gigabytes_per_second(lambda: target.copy_(source), 2 * source.numel())


@pytest.fixture(scope="module")
def table(request, copy_rate):
    """Rows of (kernel, format, GB/s), written below the tests' results."""
    rows = []
    yield rows
    lines = [
        f"{kernel:8}{name:14}{rate:8.1f} GB/s {rate / copy_rate:6.2f} of the copy"
        for kernel, name, rate in rows
    ]
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        out = plugins.get_plugin("terminalreporter")
        out.write_line(f"\ndevice-to-device copy {copy_rate:8.1f} GB/s")
        for line in lines:
            out.write_line(line)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_packed_and_unpacked_at_no_less_than_a_fiftieth_of_a_copy(
    name, kernels, table, copy_rate
):
    layer = packed_layer(
        name, "f32", heads=HEADS, key_size=SIZE, value_size=1, num_records=RECORDS, device="cuda"
    )
    values = torch.randn(RECORDS * ROWS, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    at = torch.arange(RECORDS * ROWS, device="cuda")
    num_bytes = moved_bytes(layer.key.format, ELEMENTS)
    for kernel, call in (
        ("append", lambda: kernels.append(layer.key, values, at // ROWS, at % ROWS)),
        ("gather", lambda: kernels.gather(layer.key, at[:RECORDS], torch.bfloat16)),
    ):
        rate = gigabytes_per_second(call, num_bytes)
        table.append((kernel, name, rate))
        assert rate > 0.02 * copy_rate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bf16", "bf16"), ("q8_0", "q5_1"), ("q4_0", "q4_0"), ("nvfp4", "nvfp4")),
        *(("turbo8", "turbo4"), ("turbo4", "turbo4"), ("turbo4e", "turbo3e"), ("turbo3", "turbo2")),
    ],
)
def test_packed_attention_reads_at_no_less_than_a_fiftieth_of_a_copy(
    key, value, kernels, table, copy_rate
):
    layer = packed_layer(
        key, value, heads=HEADS, key_size=SIZE, value_size=SIZE, num_records=RECORDS, device="cuda"
    )
    for side in (layer.key, layer.value):
        side.codes.zero_()
        side.scales.zero_()
        side.exponents.fill_(127)
    length = RECORDS * ROWS // 32
    query = torch.randn(32, 4 * HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    segments = torch.tensor([[i, 1, length, i * length // ROWS] for i in range(32)], device="cuda")
    records = torch.arange(RECORDS, device="cuda")
    num_bytes = sum(
        ELEMENTS // side.format.group * side.format.group_bytes for side in (layer.key, layer.value)
    )
    rate = gigabytes_per_second(
        lambda: kernels.attend(
            query, layer.key, layer.value, records, segments,
            max_rows=1, max_length=length, scale=0.1,
        ),
        num_bytes,
    )  # fmt: skip
    table.append(("attend", f"{key}:{value}", rate))
    assert rate > 0.02 * copy_rate


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_rows_are_rotated_at_no_less_than_a_fiftieth_of_a_copy(size, kernels, table, copy_rate):
    values = torch.randn(ELEMENTS // size, size, dtype=torch.bfloat16, device="cuda")
    first, second = sign_rows(size, values.device)
    rate = gigabytes_per_second(lambda: kernels.rotate(values, first, second), 4 * ELEMENTS)
    table.append(("rotate", str(size), rate))
    assert rate > 0.02 * copy_rate
