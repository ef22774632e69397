"""The CUDA scan and convolution: by emulation everywhere, and on a device with ``-m gpu``.

States of a convolution, and its sums, are compared bit for bit with the reference, the scan within
``BOUND`` of f64.
"""

import mmap
from contextlib import nullcontext

import pytest
import torch

from memkv_pp.cache import cuda_ops, cuda_recurrent
from memkv_pp.cache.cuda_kernels import CudaKernels
from memkv_pp.cache.cuda_recurrent import SCAN, CudaRecurrent, conv_kernel, scan_kernel
from memkv_pp.cache.recurrent_ops import (
    conv_states,
    matrix_states,
    short_conv,
    span_table,
)
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.testing.emulated import EmulatedLauncher
from memkv_pp.testing.recurrent_rows import delta_rows, exact_scan, state_slots

pytestmark = pytest.mark.slow  # compiling the kernels takes seconds

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUND = 2e-6
ROUNDING = {F32: BOUND, BF16: 2.0**-8, F16: 2.0**-11}
SIZES = [(1, 1, 1, 1), (1, 2, 20, 40), (2, 4, 128, 64), (3, 3, 256, 8), (1, 1, 40, 33)]
SPANS = [(14, 6, 2, 3), (0, 13, 0, 1), (13, 0, 2, 5), (20, 2, -1, 4), (22, 1, 0, -1)]
KERNELS = {
    SCAN: sorted({scan_kernel(F32, sizes[2]) for sizes in SIZES})
    + [scan_kernel(dtype, 20) for dtype in (F16, BF16)]
    + [conv_kernel(dtype) for dtype in (F32, F16, BF16)],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return EmulatedLauncher(tmp_path_factory.mktemp("scan"), KERNELS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def kernels(device, request):
    if device == "cuda":
        loaded = cuda_ops.load()
        assert loaded is not None
        return CudaRecurrent(loaded.launcher)
    launcher = request.getfixturevalue("launcher")
    launcher.seed = 0
    return CudaRecurrent(launcher)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(num_slots, offset, view, *shape, filled, device):
    elements = torch.Size(shape).numel()
    slots = state_slots(num_slots, offset + 4 * elements + 32, device=device)
    states = view(slots, offset, *shape)
    states[filled] = normal(len(filled), *shape).to(device)
    return slots, states


@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((sizes, F32) for sizes in SIZES), (SIZES[1], F16), (SIZES[1], BF16)]
)
def test_a_scan_equals_f64_within_its_bound(kernels, device, sizes, dtype):
    _, heads, key_size, value_size = sizes
    elements, offset = heads * key_size * value_size, 64
    slots, states = poisoned(
        6, offset, matrix_states, heads, key_size, value_size, filled=[0, 2], device=device
    )
    before, rows = states.clone(), delta_rows(23, *sizes, dtype=dtype)
    table = span_table(SPANS)
    exact, exact_states = exact_scan(states, table, rows)
    arguments = rows.to(device).arguments()
    out = kernels.scan_delta(states, table.spans.to(device), *arguments)
    assert out.dtype is dtype
    bound = ROUNDING[dtype]
    torch.testing.assert_close(out.double().cpu(), exact, rtol=bound, atol=bound)
    torch.testing.assert_close(states.double().cpu(), exact_states, rtol=0, atol=BOUND)
    assert torch.equal(states[[0, 2, 5]], before[[0, 2, 2]])
    assert not out[13].any()
    beyond = torch.cat([slots[:, :offset], slots[:, offset + 4 * elements :]], 1)
    assert (beyond == 0xFF).all()


def test_rows_in_several_calls_or_in_company_give_the_bits_of_one(kernels, device):
    rows, first = delta_rows(7, 1, 2, 20, 40).to(device), normal(3, 2, 20, 40).to(device)
    whole, parts, crowd = first.clone(), first.clone(), first.clone()

    def spans(*entries):
        return span_table(entries).spans.to(device)

    out = kernels.scan_delta(whole, spans((0, 7, 0, 1)), *rows.arguments())
    got = [
        kernels.scan_delta(
            parts, spans((0, end - begin, 1 if begin else 0, 1)), *rows.part(begin, end).arguments()
        )
        for begin, end in ((0, 1), (1, 3), (3, 7))
    ]
    assert torch.equal(torch.cat(got), out)
    assert torch.equal(parts, whole)
    beside = kernels.scan_delta(crowd, spans((5, 2, -1, 2), (0, 5, 0, 1)), *rows.arguments())
    assert torch.equal(beside[:5], out[:5])


def test_a_commit_scans_the_first_rows_again_without_queries(kernels, device):
    rows, states = delta_rows(5, 1, 2, 20, 40).to(device), normal(2, 2, 20, 40).to(device)
    window = span_table([(0, 5, 0, 1)])
    kernels.scan_delta(states, window.spans.to(device), *rows.arguments())
    committed, alone = states.clone(), states.clone()
    out = kernels.scan_delta(
        committed, window.first_rows([3]).spans.to(device), *rows.without_queries().arguments()
    )
    assert out.shape == (0, 2, 40)
    table = span_table([(0, 3, 0, 1)])
    kernels.scan_delta(alone, table.spans.to(device), *rows.part(0, 3).arguments())
    assert torch.equal(committed, alone)


def test_rows_may_be_parts_of_wider_rows(kernels, device):
    mixed, states = (normal(6, 2 * 20 + 2 * 40) * 0.3).to(device), normal(2, 2, 20, 40).to(device)
    parts = mixed[:, :20], mixed[:, 20:40], mixed[:, 40:]
    query, key, value = (x.unflatten(1, (n, -1)) for x, n in zip(parts, (1, 1, 2), strict=True))
    gate, beta = delta_rows(6, 1, 2, 1, 1).to(device).arguments()[3:]
    other, spans = states.clone(), span_table([(0, 6, 0, 1)]).spans.to(device)
    out = kernels.scan_delta(states, spans, query, key, value, gate, beta)
    dense = (x.contiguous() for x in (query, key, value, gate, beta))
    assert torch.equal(kernels.scan_delta(other, spans, *dense), out)
    assert torch.equal(other, states)


def test_states_may_lie_beyond_two_gib(launcher, tmp_path):
    kernels, stride = CudaRecurrent(launcher), 5 * 2**29 + 256
    with (tmp_path / "sparse").open("wb+") as file:
        file.truncate(3 * stride)
        arena = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    slots = arena.as_strided((3, 4 * (2 * 20 * 40 + 130 * 3)), (stride, 1), 128)
    far, near = matrix_states(slots, 0, 2, 20, 40), normal(3, 2, 20, 40)
    far_conv, near_conv = conv_states(slots, 4 * 2 * 20 * 40, 130, 3), normal(3, 130, 3)
    far[:], far_conv[:] = near, near_conv
    rows, values, spans = delta_rows(3, 1, 2, 20, 40), normal(3, 130), span_table([(0, 3, 1, 2)])
    outputs = [kernels.scan_delta(x, spans.spans, *rows.arguments()) for x in (far, near)]
    assert torch.equal(*outputs)
    for states in (far_conv, near_conv):
        kernels.roll_conv(states, spans.spans, values)
    assert torch.equal(far, near)
    assert torch.equal(far_conv, near_conv)


def test_two_hundred_spans_of_which_one_is_empty(kernels, device):
    lengths = [1 + i % 2 if i != 77 else 0 for i in range(200)]
    rows, states = delta_rows(sum(lengths), 1, 1, 20, 8), normal(400, 1, 20, 8)
    table = span_table([(sum(lengths[:i]), n, i, 200 + i) for i, n in enumerate(lengths)])
    exact, exact_states = exact_scan(states, table, rows)
    states = states.to(device)
    out = kernels.scan_delta(states, table.spans.to(device), *rows.to(device).arguments())
    torch.testing.assert_close(out.double().cpu(), exact, rtol=0, atol=BOUND)
    torch.testing.assert_close(states.double().cpu(), exact_states, rtol=0, atol=BOUND)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("channels", "taps"), [(1, 3), (130, 3), (128, 1), (17, 8), (40, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_has_the_bits_of_its_reference(
    kernels, device, channels, taps, dtype, bias, monkeypatch
):
    # Tiles of rows that the spans fill once, twice and in part.
    monkeypatch.setattr(cuda_recurrent, "_CONV_ROWS", 4)
    slots, states = poisoned(6, 32, conv_states, channels, taps, filled=[0, 2], device=device)
    theirs, table = slots.cpu().clone(), span_table(SPANS)
    values, weight = normal(23, channels).to(dtype), normal(channels, taps + 1, seed=1)
    bias_C = normal(channels, seed=2) if bias else None
    wanted = short_conv(conv_states(theirs, 32, channels, taps), table, values, weight, bias_C)
    ours = values.to(device), weight.to(device), None if bias_C is None else bias_C.to(device)
    spans, rolled = table.spans.to(device), slots.clone()
    out = kernels.short_conv(states, spans, *ours, max_rows=13)
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(slots.cpu(), theirs)
    kernels.roll_conv(conv_states(rolled, 32, channels, taps), spans, ours[0])
    assert torch.equal(rolled.cpu(), theirs)
    gated = kernels.short_conv(states, spans, *ours, silu=True, max_rows=13)
    exact = torch.nn.functional.silu(wanted.double())
    bound = 2 * max(ROUNDING[dtype], 2.0**-20)
    torch.testing.assert_close(gated.double().cpu(), exact, rtol=bound, atol=bound)


def test_a_convolution_may_write_the_slot_that_it_reads(kernels, device, monkeypatch):
    monkeypatch.setattr(cuda_recurrent, "_CONV_ROWS", 4)
    for count in (1, 2, 9):
        values, weight = normal(count, 130).to(device), normal(130, 4).to(device)
        apart, same = (normal(2, 130, 3).to(device) for _ in range(2))
        spans, in_place = (span_table([(0, count, 0, to)]).spans.to(device) for to in (1, 0))
        wanted = kernels.short_conv(apart, spans, values, weight, max_rows=count)
        assert torch.equal(
            kernels.short_conv(same, in_place, values, weight, max_rows=count), wanted
        )
        assert torch.equal(same[0], apart[1])


def test_the_order_of_threads_changes_no_bit(launcher):
    kernels, rows, found = CudaRecurrent(launcher), delta_rows(23, 1, 2, 20, 40), []
    values, weight, spans = normal(23, 130), normal(130, 4), span_table(SPANS).spans
    for seed in (0, 1, 7):
        launcher.seed = seed
        states, conv = normal(6, 2, 20, 40), normal(6, 130, 3)
        out = kernels.scan_delta(states, spans, *rows.arguments())
        convolved = kernels.short_conv(conv, spans, values, weight, silu=True, max_rows=13)
        found.append(torch.cat([x.flatten() for x in (states, conv, out, convolved)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_does_not_fit_is_refused_before_a_launch(kernels, device):
    rows, states = delta_rows(3, 1, 1, 8, 8).to(device), normal(2, 1, 8, 8).to(device)
    spans = span_table([(0, 3, 0, 1)]).spans.to(device)
    with pytest.raises(InternalError, match="spans are no int64"):
        kernels.scan_delta(states, spans[:, :2], *rows.arguments())
    query, key, value, *rest = rows.arguments()
    with pytest.raises(InternalError, match="keys and values differ in dtype"):
        kernels.scan_delta(states, spans, query, key, value.bfloat16(), *rest)
    wide = delta_rows(3, 1, 1, 257, 8).to(device)
    with pytest.raises(ConfigError, match="257 are beyond 256"):
        kernels.scan_delta(normal(2, 1, 257, 8).to(device), spans, *wide.arguments())
    with pytest.raises(ConfigError, match="float64"):
        kernels.roll_conv(states[:, 0], spans, normal(3, 8).double().to(device))


@pytest.mark.parametrize("name", ["scan_delta", "commit", "short_conv", "roll_states"])
def test_operators_say_what_they_change_and_return(name, launcher, device):
    rows, spans = delta_rows(5, 1, 2, 20, 40).to(device), span_table([(0, 5, 0, 1)])
    matrix, conv = normal(2, 2, 20, 40).to(device), normal(2, 130, 3).to(device)
    where, values = spans.spans.to(device), normal(5, 130).to(device)
    weight = normal(130, 4).to(device)
    arguments = {
        "scan_delta": (matrix, where, *rows.arguments()),
        "commit": (matrix, where, *rows.without_queries().arguments()),
        "short_conv": (conv, where, values, weight, weight[:, 0].clone(), True, 5),
        "roll_states": (conv, where, values),
    }
    operator = "scan_delta" if name == "commit" else name
    with nullcontext() if device == "cuda" else cuda_ops.serving("cpu", CudaKernels(launcher)):
        torch.library.opcheck(
            getattr(torch.ops.memkv, operator).default,
            arguments[name],
            test_utils=("test_schema", "test_faketensor"),
        )
