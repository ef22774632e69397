"""Attention over packed rows in place, against an f64 oracle over the rows as they were packed."""

import mmap
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from memkv_pp.cache import host_attention, host_build, host_kernels
from memkv_pp.cache.attention import segment_table
from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.host_attention import HostAttention
from memkv_pp.cache.host_codec import BASE_FORMATS
from memkv_pp.cache.kv import StageCache
from memkv_pp.cache.ops import SideView
from memkv_pp.cache.packing_groups import exponent_bytes
from memkv_pp.errors import InternalError
from memkv_pp.fence import even
from memkv_pp.formats import ROTATED_SIZES, parse_format, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.units import ceil_div
from memkv_pp.wire import Rows

NAMES = (*BASE_FORMATS, "nvfp4e", "turbo3e")
# Errors of f32 sums over a few thousand keys; the output is as large as V's rows, about 4.
F32_BOUND = 1e-5
BF16_ROUNDING = 2.0**-8


@pytest.fixture(scope="module")
def kernel():
    if host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    loaded = host_attention.loaded()
    assert loaded is not None
    return loaded


@dataclass
class Case:
    """Sides over poisoned records, queries, and what the records hold: per sequence [H, L, D]."""

    k: SideView
    v: SideView
    query: torch.Tensor
    entries: list
    keys: list
    values: list
    scale: float

    def run(self, kernel, entries=None, query=None, threads=2, **options):
        table = segment_table(self.entries if entries is None else entries, self.k.codes.shape[2])
        query = self.query if query is None else query
        return kernel.attend(self.k, self.v, query, table, self.scale, threads=threads, **options)


def empty_side(name, records, heads, rows, size, poison):
    fmt = parse_format(name)
    codes = torch.full((records, heads, rows, fmt.code_row_bytes(size)), poison, dtype=torch.uint8)
    scales = torch.full(
        (records, heads, rows, fmt.scale_row_bytes(size)), poison, dtype=torch.uint8
    )
    shape = records, heads, 1, int(fmt.exponent)
    return SideView(fmt, size, codes, scales, torch.full(shape, poison, dtype=torch.uint8))


def write(side, records, rows_LHD):
    """Pack a sequence's rows into its records; the rows as they come back, f32 [H, L, D].

    Rows of a rotated format are taken to be rotated, as the query and the output are.
    """
    block = side.codes.shape[2]
    positions = torch.arange(len(rows_LHD))
    exponents = None
    if side.format.exponent:
        side.exponents[records, :, 0, 0] = exponent_bytes(rows_LHD[::block])
        exponents = side.exponents[records[positions // block], :, 0, 0]
    codes, scales = encode(side.format, rows_LHD, exponents=exponents)
    at = records[positions // block], slice(None), positions % block
    side.codes[at], side.scales[at] = codes, scales
    back = decode(*(side.format, codes, scales, side.head_size, torch.float32), exponents=exponents)
    return back.transpose(0, 1)


def make(
    sequences,
    *,
    pair="f32",
    heads=2,
    group=1,
    sizes=(64, 64),
    block=16,
    dtype=torch.float32,
    order="shuffled",
    poison=0xFF,
    seed=1,
):
    """``sequences``: (rows of the query, length) each."""
    generator = torch.Generator().manual_seed(seed)
    formats = parse_pair(pair)
    wanted = [ceil_div(length, block) for _, length in sequences]
    ids = list(range(sum(wanted) + 2))
    if order == "reversed":
        ids.reverse()
    else:
        random.Random(seed).shuffle(ids)
    k = empty_side(formats.k.name, len(ids), heads, block, sizes[0], poison)
    v = empty_side(formats.v.name, len(ids), heads, block, sizes[1], poison)
    entries, keys, values = [], [], []
    first = 0
    for (num_rows, length), count in zip(sequences, wanted, strict=True):
        records = torch.tensor(ids[:count], dtype=torch.int64)
        ids = ids[count:]
        keys.append(write(k, records, torch.randn(length, heads, sizes[0], generator=generator)))
        values.append(write(v, records, torch.randn(length, heads, sizes[1], generator=generator)))
        entries.append((first, num_rows, length, records))
        first += num_rows
    query = torch.randn(first, heads * group, sizes[0], generator=generator).to(dtype)
    return Case(k, v, query, entries, keys, values, sizes[0] ** -0.5)


def oracle(case, *, window=0, cap=0.0, sinks_Q=None):
    """(output, log-sum-exp) in f64, one row and head at a time."""
    num_rows, query_heads, _ = case.query.shape
    out = torch.zeros(num_rows, query_heads, case.v.head_size, dtype=torch.float64)
    log_sum = torch.full((num_rows, query_heads), float("-inf"), dtype=torch.float64)
    for (first, rows, length, _), key, value in zip(
        case.entries, case.keys, case.values, strict=True
    ):
        for t in range(rows):
            end = length - rows + t + 1
            seen = slice(max(0, end - window) if window else 0, end)
            for head in range(query_heads):
                kv_head = head // (query_heads // len(key))
                scores = key[kv_head, seen].double() @ case.query[first + t, head].double()
                scores = scores * case.scale
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                sink = scores[:0] if sinks_Q is None else sinks_Q[head, None].double()
                weights = torch.softmax(torch.cat([scores, sink]), 0)[: len(scores)]
                out[first + t, head] = weights @ value[kv_head, seen].double()
                log_sum[first + t, head] = torch.logsumexp(scores, 0)
    return out, log_sum


def assert_close(found, expected):
    rounding = BF16_ROUNDING if found.dtype is torch.bfloat16 else 2.0**-20
    assert not found.isnan().any()
    error = (found.double() - expected).abs()
    assert (error <= F32_BOUND + rounding * expected.abs()).all(), error.max()


def sizes_of(name):
    """Head sizes that the kernel reads of a format."""
    fmt = parse_format(name)
    if fmt.rotated:
        return ROTATED_SIZES
    return (64, 128, 96, 256, 512) if fmt.group == 32 else (80, 64, 128, 96, 256, 512, 112, 16)


def pairwise():
    """Every format on each side twice, with sizes, groups, blocks and dtypes that wander."""
    cases = []
    for shift in (0, 5):
        for i, k in enumerate(NAMES):
            v = NAMES[(i + shift) % len(NAMES)]
            at = i + shift
            size = sizes_of(k)[at % len(sizes_of(k))], sizes_of(v)[(at + shift) % len(sizes_of(v))]
            group, block = (1, 2, 3, 4, 8, 16)[at % 6], (16, 1, 24)[at % 3]
            dtype = (torch.float32, torch.bfloat16)[i % 2]
            cases.append((f"{k}:{v}", group, size, block, dtype))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "group", "sizes", "block", "dtype"), pairwise())
def test_attention_is_the_causal_softmax_of_the_packed_rows(
    kernel, pair, group, sizes, block, dtype
):
    # One row at a full record, one of a partial one, a first prefill, a chunk after history.
    sequences = [(1, 48), (1, 37), (9, 9), (6, 75), (1, 1)]
    case = make(sequences, pair=pair, group=group, sizes=sizes, block=block, dtype=dtype)
    log_sum = torch.full(case.query.shape[:2], 7.0)
    expected, expected_sum = oracle(case)
    found = case.run(kernel, log_sum_exp_TQ=log_sum)
    assert found.dtype is dtype
    assert_close(found, expected)
    assert (log_sum.double() - expected_sum).abs().max() < F32_BOUND


@pytest.mark.parametrize("name", NAMES)
def test_every_float_is_the_codecs(kernel, name):
    fmt = parse_format(name)
    generator = torch.Generator().manual_seed(3)
    for size in set(sizes_of(name)) & {16, 64, 80, 96, 512}:
        v = empty_side(name, 40, 1, 1, size, 0)
        for part in (v.codes, v.scales, v.exponents):
            if part.numel():
                part.copy_(torch.randint(0, 256, part.shape, generator=generator))
        k = empty_side("f32", 40, 1, 1, size, 0)
        # A single key has the weight 1.
        entries = [(i, 1, 1, torch.tensor([i])) for i in range(40)]
        query = torch.zeros(40, 1, size)
        found = kernel.attend(k, v, query, segment_table(entries, 1), 1.0, threads=1)
        exponents = v.exponents[:, 0, :, 0] if fmt.exponent else None
        expected = decode(
            *(fmt, v.codes[:, 0], v.scales[:, 0], size, torch.float32), exponents=exponents
        )
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_fp8_scales_are_applied_to_their_side(kernel):
    case = make([(1, 20)], pair="fp8:fp8")
    plain, _ = oracle(case)
    case.v.fp8.fix(2.0)
    assert_close(case.run(kernel), 2 * plain)
    case.keys[0] = case.keys[0] * 4
    case.k.fp8.fix(4.0)
    case.v.fp8.fix(1.0)
    assert_close(case.run(kernel), oracle(case)[0])


@pytest.mark.slow
def test_two_hundred_ragged_sequences_of_which_one_is_empty(kernel):
    dice = random.Random(4)
    sequences = [(dice.choice((1, 1, 1, 3)), dice.randint(3, 60)) for _ in range(200)]
    sequences[77] = (0, 0)
    case = make(sequences, pair="q8_0:q5_1", heads=1, group=2)
    assert_close(case.run(kernel), oracle(case)[0])


def test_a_step_without_rows_gives_no_rows(kernel):
    case = make([(0, 0)])
    assert case.run(kernel).shape == (0, 2, 64)
    assert case.run(kernel, entries=[]).shape == (0, 2, 64)


@pytest.mark.parametrize("pair", ["bf16:bf16", "q8_0:q5_1"])
def test_records_may_lie_in_reverse_and_be_shared(kernel, pair):
    case = make([(1, 100), (4, 70)], pair=pair, group=3, order="reversed")
    assert_close(case.run(kernel), oracle(case)[0])
    # A second sequence over the records of the first, shorter; its row has another query.
    (_, _, _, records), (_, _, _, other) = case.entries
    shared = [(0, 1, 100, records), (1, 1, 90, records), (2, 3, 70, other)]
    found = case.run(kernel, entries=shared)
    case.entries = shared
    case.keys.insert(1, case.keys[0][:, :90])
    case.values.insert(1, case.values[0][:, :90])
    assert_close(found, oracle(case)[0])


def test_records_may_lie_beyond_two_gigabytes(kernel, tmp_path):
    case = make([(1, 40)], pair="q8_0:q4_0", group=2)
    expected = case.run(kernel)
    stride = 5 * 2**29 + 256
    with (tmp_path / "sparse").open("wb+") as file:
        file.truncate(3 * stride)
        arena = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    at = 0

    def moved(part):
        nonlocal at
        view = arena.as_strided((3, *part.shape[1:]), (stride, *part.stride()[1:]), at)
        for place, record in enumerate(case.entries[0][3].tolist()):
            view[2 - place] = part[record]
        at += part[0].numel()
        return view

    for name in ("k", "v"):
        side = getattr(case, name)
        far = SideView(
            side.format, side.head_size, moved(side.codes), moved(side.scales), side.exponents
        )
        setattr(case, name, far)
    found = case.run(kernel, entries=[(0, 1, 40, torch.tensor([2, 1, 0]))])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("window", "cap"), [(1, 0.0), (7, 0.0), (16, 0.0), (50, 2.0), (1000, 0.0), (0, 0.3), (0, 30.0)]
)
def test_a_window_and_a_cap_are_applied(kernel, window, cap):
    sequences = [(1, 90), (40, 40), (5, 130)]
    case = make(sequences, pair="f16:q8_0", group=2, sizes=(64, 128), heads=1)
    log_sum = torch.empty(case.query.shape[:2])
    expected, expected_sum = oracle(case, window=window, cap=cap)
    found = case.run(kernel, window=window, cap=cap, log_sum_exp_TQ=log_sum)
    assert_close(found, expected)
    assert (log_sum.double() - expected_sum).abs().max() < F32_BOUND


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (20, 0.0), (0, 2.0)])
def test_sinks_take_weight_from_the_keys_and_stay_out_of_the_log_sum_exp(kernel, rows, window, cap):
    case = make([(rows, 90), (1, 1)], pair="f16:q8_0", group=2)
    sinks = torch.tensor([-50.0, 0.5, 4.0, 90.0])
    log_sum = torch.empty(case.query.shape[:2])
    expected, expected_sum = oracle(case, window=window, cap=cap, sinks_Q=sinks)
    found = case.run(kernel, window=window, cap=cap, sinks_Q=sinks, log_sum_exp_TQ=log_sum)
    assert_close(found, expected)
    assert (log_sum.double() - expected_sum).abs().max() < F32_BOUND
    without = case.run(kernel, window=window, cap=cap)
    nothing = torch.full((4,), float("-inf"))
    assert torch.equal(case.run(kernel, window=window, cap=cap, sinks_Q=nothing), without)
    assert not torch.equal(found, without)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [17, 64, 200])
@pytest.mark.parametrize(
    ("pair", "sizes", "window"),
    [("q8_0:q5_1", (64, 64), 0), ("bf16:q4_0", (80, 128), 33), ("turbo4:nvfp4", (128, 96), 150)],
)
def test_prefill_of_many_rows_is_the_causal_softmax(kernel, rows, pair, sizes, window):
    case = make([(rows, rows), (rows, rows + 71)], pair=pair, group=2, heads=1, sizes=sizes)
    expected, _ = oracle(case, window=window)
    assert_close(case.run(kernel, window=window), expected)


def test_records_below_the_window_need_not_be_there(kernel):
    case = make([(3, 100)], pair="q8_0:q5_1")
    expected = case.run(kernel, window=20)
    first, num_rows, length, records = case.entries[0]
    records = records.clone()
    records[: (length - num_rows + 1 - 20) // 16] = -1
    found = case.run(kernel, entries=[(first, num_rows, length, records)], window=20)
    assert torch.equal(found, expected)


def test_two_halves_merge_into_the_whole_by_log_sum_exp(kernel):
    case = make([(1, 2100)], pair="q8_0:q5_1", group=4)
    records = case.entries[0][3]
    parts = [(0, 1, 1104, records[:69]), (0, 1, 996, records[69:])]
    sums = [torch.empty(case.query.shape[:2]) for _ in range(3)]
    halves = [
        case.run(kernel, entries=[part], log_sum_exp_TQ=total)
        for part, total in zip(parts, sums, strict=False)
    ]
    whole = case.run(kernel, log_sum_exp_TQ=sums[2])
    shares = torch.softmax(torch.stack(sums[:2]).double(), 0)
    merged = (torch.stack(halves).double() * shares[..., None]).sum(0)
    assert_close(whole, merged)
    assert (torch.logaddexp(sums[0], sums[1]) - sums[2]).abs().max() < F32_BOUND


def test_rows_of_no_segment_are_zeros(kernel):
    case = make([(2, 20)])
    query = torch.nn.functional.pad(case.query, (0, 0, 0, 0, 1, 3))
    first, num_rows, length, records = case.entries[0]
    found = case.run(kernel, entries=[(first + 1, num_rows, length, records)], query=query)
    assert torch.equal(found[1:3], case.run(kernel))
    assert torch.equal(found[[0, 3, 4, 5]], torch.zeros(4, 2, 64))


def test_a_query_may_be_a_strided_view(kernel):
    case = make([(3, 20), (1, 5)], group=2)
    expected = case.run(kernel)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(case.run(kernel, query=strided), expected)
    assert torch.equal(
        case.run(kernel, query=case.query.repeat_interleave(2, dim=2)[..., ::2]), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pair", "group", "sizes", "length", "window"),
    [
        ("q8_0:q5_1", 3, (64, 64), 2500, 0),
        ("f32:bf16", 1, (80, 112), 130, 0),
        ("q4_0:q4_0", 8, (512, 64), 90, 0),
        ("turbo4:nvfp4e", 4, (128, 128), 1300, 0),
        ("q8_0:q5_1", 2, (128, 64), 1200, 70),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(kernel, pair, group, sizes, length, window, dtype):
    chunk = 90
    case = make([(chunk, length)], pair=pair, group=group, sizes=sizes, dtype=dtype)
    records = case.entries[0][3]
    options = {"window": window, "sinks_Q": torch.linspace(-2, 2, 2 * group)}
    together = case.run(kernel, threads=1, **options)
    # Decode: each row alone, as the last of its length; some of them in the split form.
    for row in (0, 1, 15, 16, 63, 64, 88, 89):
        for threads in (1, 2, 3):
            alone = [(0, 1, length - chunk + row + 1, records)]
            found = case.run(kernel, alone, case.query[row : row + 1], threads=threads, **options)
            assert torch.equal(found[0], together[row]), (row, threads)
    # Verification of a few rows, after and before others, and odd chunks.
    for first, last in ((0, 5), (5, 22), (22, 89), (40, 44)):
        entries = [(3, last - first, length - chunk + last, records), (1, 1, 7, records)]
        query = torch.cat([torch.ones_like(case.query[:3]), case.query[first:last]])
        found = case.run(kernel, entries, query, threads=2, **options)
        assert torch.equal(found[3:], together[first:last])
    assert torch.equal(case.run(kernel, threads=3, **options), together)


@pytest.mark.parametrize("block", [1, 24, 160])
def test_the_size_of_a_record_changes_no_bit(kernel, block):
    def outputs(rows):
        case = make([(1, 150), (9, 60)], pair="q5_0:q4_1", group=3, block=rows)
        return case.run(kernel)

    assert torch.equal(outputs(block), outputs(16))


def test_many_rows_of_large_heads_read_runs_of_a_long_record(kernel):
    def outputs(rows):
        case = make([(20, 150)], pair="q8_0:q5_1", heads=1, sizes=(512, 512), block=rows)
        return case.run(kernel)

    assert torch.equal(outputs(160), outputs(16))


@pytest.mark.parametrize("pair", ["f32:f32", "q8_0:q5_1", "fp8:bf16"])
@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
def test_rows_that_were_never_written_do_not_change_a_bit(kernel, pair, poison):
    def outputs(byte):
        return make([(1, 21), (1, 33), (4, 10)], pair=pair, poison=byte).run(kernel)

    found = outputs(poison)
    assert not found.isnan().any()
    assert torch.equal(found, outputs(0x55))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_later_row_that_is_not_finite_leaves_earlier_rows_as_they_are(kernel, bad):
    case = make([(20, 40)], group=2)
    expected = case.run(kernel)
    record, row = int(case.entries[0][3][2]), 1  # position 33
    for side in (case.k, case.v):
        side.codes.view(torch.float32)[record, :, row] = bad
    found = case.run(kernel)
    assert torch.equal(found[:13], expected[:13])
    assert found[13:].isnan().any(-1).all()


def test_a_query_of_large_scores_does_not_overflow(kernel):
    case = make([(1, 70)], pair="f32")
    case.query *= 1000
    assert_close(case.run(kernel), oracle(case)[0])


def test_calls_of_many_threads_do_not_disturb_each_other(kernel):
    case = make([(1, 1500), (30, 60)], pair="q8_0:q5_1", group=4, sizes=(128, 128))
    expected = case.run(kernel, threads=1)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: case.run(kernel, threads=3), range(24)):
            assert torch.equal(found, expected)


def test_what_the_kernel_cannot_serve_is_refused(kernel):
    case = make([(1, 20)])
    records = case.entries[0][3]
    wrong = {
        "a record outside": {"entries": [(0, 1, 20, records + 100)]},
        "a negative record": {"entries": [(0, 1, 20, records * 0 - 1)]},
        "too few records": {"entries": [(0, 1, 20, records[:1])]},
        "rows past the query": {"entries": [(1, 1, 20, records)]},
        "more rows than its length": {"entries": [(0, 1, 0, records)]},
        "another head size": {"query": torch.zeros(1, 2, 32)},
        "heads that do not divide": {"query": torch.zeros(1, 3, 64)},
        "another dtype": {"query": torch.zeros(1, 2, 64, dtype=torch.float64)},
        "a log-sum-exp of another shape": {"log_sum_exp_TQ": torch.zeros(1, 3)},
        "sinks of another shape": {"sinks_Q": torch.zeros(3)},
        "sinks of another dtype": {"sinks_Q": torch.zeros(2, dtype=torch.bfloat16)},
    }
    for options in wrong.values():
        with pytest.raises(InternalError, match=r"attention over f32:f32 rows .* cannot serve"):
            case.run(kernel, **options)


def test_only_formats_in_whole_vectors_on_the_cpu_are_served(kernel):
    def side(name, size):
        return empty_side(name, 1, 1, 1, size, 0)

    assert all(kernel.serves(side(name, 64)) for name in NAMES)
    assert not kernel.serves(side("f32", 72))
    assert not kernel.serves(side("f32", 592))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-mavx2", "-mfma", "-mf16c")])
def test_every_vector_path_gives_the_same_answer(kernel, flags, tmp_path):
    if flags and "avx2" not in cpu_flags():
        pytest.skip("this CPU has no AVX2")
    toolchain = host_build.find_toolchain(None, flags)
    source = host_build.kernel_sources() / "host" / "attend_host.cpp"
    library = host_build.build(source, toolchain, tmp_path / "cache")
    other = HostAttention(host_kernels.open_library(library))
    for name in NAMES:
        test_every_float_is_the_codecs(other, name)
    for pair, group, sizes in (("q8_0:q5_1", 3, (64, 96)), ("f16:q4_0", 5, (128, 512))):
        case = make([(1, 130), (20, 60), (1, 1)], pair=pair, group=group, sizes=sizes)
        for window, cap in ((0, 0.0), (9, 0.0), (0, 1.0)):
            expected, _ = oracle(case, window=window, cap=cap)
            assert_close(case.run(other, window=window, cap=cap), expected)
    case = make([(1, 1100)], pair="q8_0:q5_1")
    assert_close(case.run(other), case.run(kernel).double())


def cpu_flags():
    try:
        with open("/proc/cpuinfo") as file:
            return file.read()
    except OSError:
        return ""


def stage_cache(kernel, pair, block=16, value_size=64):
    layer = LayerGeometry(
        kind=LayerKind.FULL, query_heads=6, kv_heads=2, key_head_size=64, value_head_size=64
    )
    second = replace(layer, value_head_size=value_size)
    model = ModelGeometry(name="made", family="made", layers=(layer, second))
    formats = (parse_pair("bf16:bf16"), parse_pair(pair))
    options = CacheOptions(block_tokens=block)
    (sizing,) = size_fence(model, formats, even(2, 1), options)
    units = Footprint(64, 0, 0)
    cache = StageCache(TorchDevice(), model, sizing, units, max_sequences=4, attention=kernel)
    cache.arena.storage.fill_(0xFF)
    return cache


def walk(cache, dtype=torch.float32, fixed=False, value_size=64, **options):
    """Prefill, a chunk after history beside a first chunk, decode: outputs of both layers."""
    generator = torch.Generator().manual_seed(8)
    outputs = []
    for sequence in (0, 1):
        cache.open(sequence)
    for entries in ([(0, 0, 15)], [(0, 15, 6), (1, 0, 13)], [(1, 13, 1), (0, 21, 1)]):
        batch = cache.extend([Rows(*entry, False) for entry in entries])
        count = len(batch.positions)
        for layer in (0, 1):
            shapes = (6, 64), (2, 64), (2, value_size if layer else 64)
            query, key, value = (
                torch.randn(count, *shape, generator=generator).to(dtype) for shape in shapes
            )
            outputs.append(
                cache.layers.attend(layer, batch, query, key, value, 0.125, fixed=fixed, **options)
            )
    cache.check()
    return outputs


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("block", [16, 1, 24])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_stage_cache_attends_in_place_and_unpacks_no_row(kernel, fixed, block, dtype, bound):
    cache = stage_cache(kernel, "q8_0:q5_1", block)
    found = walk(cache, dtype, fixed)
    assert cache.layers.rows_unpacked == 0
    unpacking = stage_cache(None, "q8_0:q5_1", block)
    expected = walk(unpacking, dtype, fixed)
    assert unpacking.layers.rows_unpacked > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() < bound


@pytest.mark.parametrize("pair", ["turbo4:nvfp4", "turbo8e:turbo3e", "bf16:turbo2", "nvfp4e:f32"])
def test_a_stage_cache_attends_to_rotated_and_scaled_records_where_they_lie(kernel, pair):
    cache = stage_cache(kernel, pair)
    found, expected = walk(cache), walk(stage_cache(None, pair))
    assert cache.layers.rows_unpacked == 0
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_a_cap_and_sinks_reach_both_paths(kernel):
    options = {"cap": 0.5, "sinks": torch.linspace(-1, 3, 6)}
    found = walk(stage_cache(kernel, "q8_0:q5_1"), **options)
    plain = walk(stage_cache(kernel, "q8_0:q5_1"))
    for fixed in (False, True):
        expected = walk(stage_cache(None, "q8_0:q5_1"), fixed=fixed, **options)
        for ours, theirs, without in zip(found, expected, plain, strict=True):
            assert (ours - theirs).abs().max() < 1e-5
            assert (ours - without).abs().max() > 1e-2


def test_layers_the_kernel_does_not_serve_are_unpacked(kernel):
    cache = stage_cache(kernel, "bf16:f32", value_size=72)
    found = walk(cache, value_size=72)
    expected = walk(stage_cache(None, "bf16:f32", value_size=72), value_size=72)
    # Layer 1 alone: 15 rows, then 21 and 13, then 14 and 22, in records of 16.
    assert cache.layers.rows_unpacked == 16 + 32 + 16 + 16 + 32
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
