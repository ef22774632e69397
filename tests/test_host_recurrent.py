"""The host scan and convolution: against f64 and their references, and against themselves."""

import mmap

import pytest
import torch

from memkv_pp.cache import host_build, host_kernels, host_recurrent
from memkv_pp.cache.host_recurrent import HostRecurrent
from memkv_pp.cache.recurrent_ops import (
    SpanTable,
    conv_states,
    matrix_states,
    roll_conv,
    short_conv,
    span_table,
)
from memkv_pp.errors import InternalError
from memkv_pp.testing.recurrent_rows import delta_rows, exact_scan, state_slots

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Errors of f32 sums of up to 128 terms, fed back through a few dozen rows, by numbers near 1.
BOUND = 2e-6
# Half a unit in the last place of an output of up to 2, and F32's own.
ROUNDING = {F32: BOUND, BF16: 2.0**-8, F16: 2.0**-11}
SIZES = [(1, 1, 1, 1), (1, 2, 20, 40), (2, 4, 128, 128), (1, 1, 7, 129), (3, 3, 512, 16)]


@pytest.fixture(scope="module")
def kernel():
    if host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    loaded = host_recurrent.loaded()
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def new_tensors_hold_nan():
    """What a kernel leaves unwritten shows; torch takes one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(num_slots, offset, view, *shape, filled):
    """Slots of poison, 32 bytes beyond their state, and the states, of which ``filled`` are normal."""
    elements = torch.Size(shape).numel()
    slots = state_slots(num_slots, offset + 4 * elements + 32)
    states = view(slots, offset, *shape)
    states[filled] = normal(len(filled), *shape)
    return slots, states


def around(slots, offset, elements):
    return torch.cat([slots[:, :offset], slots[:, offset + 4 * elements :]], 1)


# ---- the gated delta rule ----


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_scan_equals_f64_within_its_bound(kernel, sizes, dtype):
    key_heads, heads, key_size, value_size = sizes
    elements = heads * key_size * value_size
    slots, states = poisoned(6, 64, matrix_states, heads, key_size, value_size, filled=[0, 2])
    before = states.clone()
    rows = delta_rows(23, key_heads, heads, key_size, value_size, dtype=dtype)
    # Backwards, without row 13, one of no rows, one from zeros, one that drops its state.
    table = span_table(
        [(14, 6, 2, 3), (0, 13, 0, 1), (13, 0, 2, 5), (20, 2, -1, 4), (22, 1, 0, -1)]
    )
    exact, exact_states = exact_scan(states, table, rows)
    out = kernel.scan_delta(states, table, *rows.arguments(), threads=2)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    torch.testing.assert_close(states.double(), exact_states, rtol=0, atol=BOUND)
    assert torch.equal(states[[0, 2, 5]], before[[0, 2, 2]])
    assert not out[13].any()
    assert (around(slots, 64, elements) == 0xFF).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sizes", [(1, 2, 20, 40), (1, 1, 128, 128)])
def test_rows_in_several_calls_give_the_bits_of_one(kernel, sizes, dtype):
    rows = delta_rows(7, *sizes, dtype=dtype)
    first = normal(2, *sizes[1:])
    whole, parts = first.clone(), first.clone()
    out = kernel.scan_delta(whole, span_table([(0, 7, 0, 1)]), *rows.arguments(), threads=1)
    got = []
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 7)):
        table = span_table([(0, end - begin, 1 if begin else 0, 1)])
        part = rows.part(begin, end).arguments()
        got.append(kernel.scan_delta(parts, table, *part, threads=1))
    assert torch.equal(torch.cat(got), out)
    assert torch.equal(parts, whole)


def test_neither_company_nor_threads_nor_place_change_a_bit(kernel):
    rows, states = delta_rows(40, 1, 2, 24, 72), normal(8, 2, 24, 72)
    alone, crowd = states.clone(), states.clone()
    part = rows.part(11, 20).arguments()
    out = kernel.scan_delta(alone, span_table([(0, 9, 2, 3)]), *part, threads=1)
    table = span_table([(20, 20, 4, 5), (11, 9, 2, 3), (0, 11, -1, 7)])
    both = kernel.scan_delta(crowd, table, *rows.arguments(), threads=3)
    assert torch.equal(both[11:20], out)
    assert torch.equal(crowd[3], alone[3])


def test_a_commit_gives_the_state_after_its_rows_alone(kernel):
    rows, states = delta_rows(5, 1, 2, 16, 24), normal(2, 2, 16, 24)
    window = span_table([(0, 5, 0, 1)])
    kernel.scan_delta(states, window, *rows.arguments(), threads=2)
    for count in range(6):
        committed, alone = states.clone(), states.clone()
        again = rows.without_queries().arguments()
        out = kernel.scan_delta(committed, window.first_rows([count]), *again, threads=2)
        assert out.shape == (0, 2, 24)
        part = rows.part(0, count).arguments()
        kernel.scan_delta(alone, span_table([(0, count, 0, 1)]), *part, threads=2)
        assert torch.equal(committed, alone)


def test_a_span_may_write_the_slot_that_it_reads(kernel):
    for value_size in (40, 64):
        rows, states = delta_rows(3, 1, 1, 16, value_size), normal(2, 1, 16, value_size)
        same = states.clone()
        kernel.scan_delta(states, span_table([(0, 3, 0, 1)]), *rows.arguments(), threads=1)
        kernel.scan_delta(same, span_table([(0, 3, 0, 0)]), *rows.arguments(), threads=1)
        assert torch.equal(same[0], states[1])


def test_rows_may_be_parts_of_wider_rows(kernel):
    mixed, states = normal(6, 2 * 16 + 2 * 24) * 0.3, normal(2, 2, 16, 24)
    query, key, value = (x.unflatten(1, (n, -1)) for x, n in (
        (mixed[:, :16], 1), (mixed[:, 16:32], 1), (mixed[:, 32:], 2)
    ))  # fmt: skip
    gate, beta = (x.T for x in delta_rows(6, 1, 2, 1, 1).arguments()[3:])
    other, table = states.clone(), span_table([(0, 6, 0, 1)])
    gate, beta = gate.contiguous().T, beta.contiguous().T
    out = kernel.scan_delta(states, table, query, key, value, gate, beta, threads=1)
    dense = (x.contiguous() for x in (query, key, value, gate, beta))
    assert torch.equal(kernel.scan_delta(other, table, *dense, threads=1), out)
    assert torch.equal(other, states)


def test_two_hundred_spans_of_which_one_is_empty(kernel):
    lengths = [1 + i % 3 if i != 77 else 0 for i in range(200)]
    rows, states = delta_rows(sum(lengths), 1, 1, 8, 16), normal(400, 1, 8, 16)
    entries = [(sum(lengths[:i]), n, i, 200 + i) for i, n in enumerate(lengths)]
    exact, exact_states = exact_scan(states, span_table(entries), rows)
    out = kernel.scan_delta(states, span_table(entries), *rows.arguments(), threads=2)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=BOUND)
    torch.testing.assert_close(states.double(), exact_states, rtol=0, atol=BOUND)


def test_states_may_lie_beyond_two_gib(kernel, tmp_path):
    stride = 5 * 2**29 + 256
    with (tmp_path / "sparse").open("wb+") as file:
        file.truncate(3 * stride)
        arena = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    slots = arena.as_strided((3, 2 * 16 * 16 * 4), (stride, 1), 128)
    far, near = matrix_states(slots, 0, 2, 16, 16), normal(3, 2, 16, 16)
    far[:] = near
    rows, table = delta_rows(3, 1, 2, 16, 16), span_table([(0, 3, 1, 2)])
    out = kernel.scan_delta(near, table, *rows.arguments(), threads=2)
    assert torch.equal(kernel.scan_delta(far, table, *rows.arguments(), threads=2), out)
    assert torch.equal(far, near)


# ---- the short convolution ----

SPANS = [(14, 6, 2, 3), (0, 13, 0, 1), (13, 0, 2, 5), (20, 2, -1, 4), (22, 1, 0, -1)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("channels", "taps"), [(1, 3), (300, 3), (256, 1), (17, 8), (40, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_has_the_bits_of_its_reference(kernel, channels, taps, dtype, bias):
    slots, states = poisoned(6, 32, conv_states, channels, taps, filled=[0, 2])
    other = slots.clone()
    values, weight = normal(23, channels).to(dtype), normal(channels, taps + 1, seed=1)
    bias_C, table = (normal(channels, seed=2) if bias else None), span_table(SPANS)
    out = kernel.short_conv(states, table, values, weight, bias_C, threads=2)
    theirs = conv_states(other, 32, channels, taps)
    assert torch.equal(out, short_conv(theirs, table, values, weight, bias_C))
    assert torch.equal(slots, other)
    gated = kernel.short_conv(states, table, values, weight, bias_C, silu=True, threads=2)
    wanted = torch.nn.functional.silu(out.double())
    bound = 1e-6 if dtype is F32 else 2 * ROUNDING[dtype]
    torch.testing.assert_close(gated.double(), wanted, rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("taps", [1, 3, 8])
def test_a_roll_has_the_bits_of_its_reference(kernel, taps, dtype):
    slots, states = poisoned(6, 32, conv_states, 300, taps, filled=[0, 2])
    other, values, table = slots.clone(), normal(23, 300).to(dtype), span_table(SPANS)
    kernel.roll_conv(states, table, values, threads=2)
    roll_conv(conv_states(other, 32, 300, taps), table, values)
    assert torch.equal(slots, other)


@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_in_several_calls_gives_the_bits_of_one(kernel, silu):
    values, weight, first = normal(20, 70), normal(70, 4), normal(2, 70, 3)
    whole, parts = first.clone(), first.clone()
    table = span_table([(0, 20, 0, 1)])
    out = kernel.short_conv(whole, table, values, weight, silu=silu, threads=1)
    got = []
    for begin, end in ((0, 1), (1, 3), (3, 20)):
        table = span_table([(0, end - begin, 1 if begin else 0, 1)])
        part = values[begin:end]
        got.append(kernel.short_conv(parts, table, part, weight, silu=silu, threads=2))
    assert torch.equal(torch.cat(got), out)
    assert torch.equal(parts, whole)


def test_silu_holds_at_its_ends(kernel):
    at = torch.tensor([[-torch.inf, -200.0, -88.0, -1e-6, 0.0, 30.0, 200.0, torch.inf, torch.nan]])
    table, states = span_table([(0, 1, -1, -1)]), torch.zeros(1, 9, 0)
    out = kernel.short_conv(states, table, at, torch.ones(9, 1), silu=True, threads=1)
    wanted = torch.nn.functional.silu(at.double()).float()
    # Minus infinity by zero is NaN there as here.
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-35, equal_nan=True)


# ---- refusals, vector paths ----


def test_what_is_not_served_is_refused_and_nothing_written(kernel):
    states, rows = normal(2, 1, 8, 8), delta_rows(3, 1, 1, 8, 8)
    before = states.clone()
    for entry in ((0, 3, 0, 2), (0, 3, 2, 1), (1, 3, 0, 1), (-1, 2, 0, 1)):
        with pytest.raises(InternalError, match="does not lie in 3 rows and 2 slots"):
            kernel.scan_delta(
                states, SpanTable(torch.tensor([entry])), *rows.arguments(), threads=1
            )
        with pytest.raises(InternalError, match="does not lie in 3 rows and 2 slots"):
            kernel.roll_conv(
                states[:, 0], SpanTable(torch.tensor([entry])), normal(3, 8), threads=1
            )
    table = span_table([(0, 3, 0, 1)])
    wide = delta_rows(3, 1, 1, 513, 8)
    with pytest.raises(InternalError, match=r"states \[2, 1, 513, 8\] is not served"):
        kernel.scan_delta(normal(2, 1, 513, 8), table, *wide.arguments(), threads=1)
    double = delta_rows(3, 1, 1, 8, 8, dtype=torch.float64)
    with pytest.raises(InternalError, match=r"float64 on cpu .* is not served"):
        kernel.scan_delta(states, table, *double.arguments(), threads=1)
    with pytest.raises(InternalError, match=r"states \[2, 8, 9\] is not served"):
        kernel.roll_conv(normal(2, 8, 9), table, normal(3, 8), threads=1)
    assert torch.equal(states, before)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-mavx2", "-mfma", "-mf16c")])
def test_every_vector_path_is_right(kernel, flags, tmp_path):
    if flags and not {"avx2", "fma", "f16c"} <= cpu_flags():
        pytest.skip("this CPU has no AVX2")
    toolchain = host_build.find_toolchain(None, flags)
    source = host_build.kernel_sources() / "host" / "scan_host.cpp"
    library = host_build.build(source, toolchain, tmp_path / "cache")
    other = HostRecurrent(host_kernels.open_library(library))
    for sizes in SIZES:
        test_a_scan_equals_f64_within_its_bound(other, sizes, F16)
    test_rows_in_several_calls_give_the_bits_of_one(other, (1, 2, 20, 40), BF16)
    test_a_convolution_has_the_bits_of_its_reference(other, 300, 3, BF16, True)
    test_silu_holds_at_its_ends(other)


def cpu_flags():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return set(next((line for line in file if line.startswith("flags")), "").split())
