"""Each CUDA kernel equals its reference: by emulation everywhere, and on a device with ``-m gpu``.

What moves or packs data is compared bit for bit. Attention is held within ``BOUND`` of f64: its
sums are f32 of at most a few thousand terms of order one.
"""

import math

import pytest
import torch

from memkv_pp.cache import cuda_ops
from memkv_pp.cache.cuda_kernels import PARTIAL_BYTES, CudaKernels
from memkv_pp.cache.cuda_launch import (
    ATTEND,
    CODEC,
    COPY,
    CUDA_FORMATS,
    ROTATE,
    PackedSide,
    append_kernel,
    attend_kernel,
    exponents_kernel,
    gather_kernel,
    merge_kernel,
    rotate_kernel,
)
from memkv_pp.errors import ConfigError, FormatError, InternalError
from memkv_pp.formats import FORMATS, parse_format
from memkv_pp.packing import pack_group
from memkv_pp.packing_groups import exponent_byte
from memkv_pp.rotation import rotate, sign_tables
from memkv_pp.testing.emulated import EmulatedLauncher
from memkv_pp.testing.packed_sides import (
    POISON,
    attention,
    fill,
    packed_layer,
    packed_sequences,
    put,
    rows_of,
)

pytestmark = pytest.mark.slow  # compiling the kernels takes seconds

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUND = 1e-5
WITH_EXPONENT = [name for name, fmt in FORMATS.items() if fmt.exponent]
# K format, V format, the query's dtype, query vectors of a block: every format on each side.
ATTENDED = [
    ("q8_0", "q5_1", F32, 8),
    ("q8_0", "q5_1", F32, 4),
    ("q8_0", "q5_1", F32, 1),
    ("q4_0", "bf16", BF16, 2),
    ("f32", "f32", F32, 4),
    ("fp8", "f16", F16, 1),
    ("q5_1", "q4_1", F32, 2),
    ("f16", "q5_0", F32, 1),
    ("bf16", "q4_0", F32, 1),
    ("q4_1", "q8_0", F32, 1),
    ("q5_0", "fp8", F32, 1),
    ("q8_0", "fp8", F32, 2),
    ("q8_0", "fp8", F32, 4),
    ("turbo4", "turbo3e", F32, 4),
    ("q8_0", "turbo3e", F32, 1),
    ("turbo3", "turbo2", F32, 1),
    ("nvfp4e", "turbo8", BF16, 1),
    ("turbo8e", "nvfp4", F32, 1),
    ("turbo2e", "turbo4e", F32, 1),
]
NARROW = ("q8_0", "f16", "turbo4")
KERNELS = {
    CODEC: [
        make(parse_format(name), dtype)
        for make in (append_kernel, gather_kernel)
        for name in CUDA_FORMATS
        for dtype in ((F32, BF16, F16) if name in NARROW else (F32,))
    ]
    + [exponents_kernel(parse_format(name), F32) for name in WITH_EXPONENT]
    + [exponents_kernel(parse_format("turbo4e"), dtype) for dtype in (BF16, F16)],
    ATTEND: [
        attend_kernel(parse_format(k), parse_format(v), dtype, vectors)
        for k, v, dtype, vectors in ATTENDED
    ]
    + [merge_kernel(dtype) for dtype in (F32, F16, BF16)],
    ROTATE: [rotate_kernel(F32, size) for size in (64, 128, 256, 512)] + [rotate_kernel(BF16, 64)],
    COPY: ["copy_records", "copy_state"],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    return EmulatedLauncher(tmp_path_factory.mktemp("emulated"), KERNELS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def kernels(device, request):
    """The kernels of the device; emulated ones run in ascending order unless a test sets a seed."""
    if device == "cuda":
        kernels = cuda_ops.load()
        assert kernels is not None
        return kernels
    launcher = request.getfixturevalue("launcher")
    launcher.seed = 0
    return CudaKernels(launcher)


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def normal(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- append and gather ----


def size_held(name, size):
    """``size``, or what a rotated format has in its place."""
    return {32: 64, 96: 128}.get(size, size) if FORMATS[name].rotated else size


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "head_size"), [(1, 1, 32), (37, 3, 96), (9, 2, 256), (5, 2, 512)], ids=str
)
def test_append_writes_the_bytes_of_the_codec_and_no_others(
    name, num_rows, heads, head_size, kernels, device
):
    head_size = size_held(name, head_size)
    sizes = {"heads": heads, "key_size": head_size, "record_rows": 8, "device": device}
    ours, theirs = packed_layer(name, "f32", **sizes), packed_layer(name, "f32", **sizes)
    # Records whose first rows differ in size take exponents that differ.
    values = normal(num_rows, heads, head_size) * torch.logspace(-3, 3, num_rows)[:, None, None]
    records = [(7 - i // 8) if i % 5 != 1 else -1 for i in range(num_rows)]
    rows = [i % 8 for i in range(num_rows)]

    kernels.append(ours.key, values.to(device), ids(records, device), ids(rows, device))
    put(theirs.key, values, records, rows)

    assert torch.equal(ours.arena, theirs.arena)


@pytest.mark.parametrize(
    ("name", "size"),
    [("f32", 13), ("f16", 13), ("bf16", 13), ("fp8", 13), ("nvfp4", 48), ("nvfp4e", 80)],
)
def test_heads_of_every_width_that_a_format_holds_go_in_and_out(name, size, kernels, device):
    sizes = {"heads": 3, "key_size": size, "device": device}
    ours, theirs = packed_layer(name, "f32", **sizes), packed_layer(name, "f32", **sizes)
    values, at = normal(20, 3, size), list(range(20))
    records, rows = [i // 16 for i in at], [i % 16 for i in at]

    kernels.append(ours.key, values.to(device), ids(records, device), ids(rows, device))
    put(theirs.key, values, records, rows)

    assert torch.equal(ours.arena, theirs.arena)
    got = kernels.gather(ours.key, ids([1, 0], device), F32).cpu()
    assert torch.equal(got[:, :4], rows_of(theirs.key, [1], 4))
    assert torch.equal(got[:, 16:], rows_of(theirs.key, [0], 16))


HOSTILE = {
    "zeros": [0.0] * 32,
    "minus zeros": [-0.0] * 32,
    "constant": [3.7] * 32,
    "denormal": [1e-40 * (i - 7) for i in range(32)],
    "tiny": [1e-8 * (i - 16) for i in range(32)],
    "huge": [3e38 * (-1) ** i for i in range(32)],
    "beyond f16": [7e4 + i for i in range(32)],
    "an infinity": [1.0] * 31 + [-math.inf],
    "all infinite": [math.inf] * 32,
    "a NaN": [2.0] * 5 + [math.nan] + [1.0] * 26,
    "halves": [i / 2 for i in range(32)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_append_packs_hostile_rows_as_the_truth_does(name, kernels, device):
    size, count = size_held(name, 32), len(HOSTILE)
    layer = packed_layer(
        name, "f32", heads=1, key_size=size, record_rows=1, num_records=count, device=device
    )
    fmt, scale = layer.key.format, layer.key.scale
    rows = [group * (size // 32) for group in HOSTILE.values()]

    kernels.append(
        layer.key,
        torch.tensor(rows).view(count, 1, size).to(device),
        ids(range(count), device),
        ids([0] * count, device),
    )

    codes, scales = layer.key.codes[:, 0, 0].cpu(), layer.key.scales[:, 0, 0].cpu()
    exponents = layer.key.exponents[:, 0, 0].cpu()
    for at, (what, row) in enumerate(zip(HOSTILE, rows, strict=True)):
        packed = rotate(row) if fmt.rotated else row
        exponent = exponent_byte(packed) if fmt.exponent else 127
        parts = [
            pack_group(fmt, packed[i : i + fmt.group], scale=scale, exponent=exponent)
            for i in range(0, size, fmt.group)
        ]
        assert bytes(codes[at].tolist()) == b"".join(c for c, _ in parts), what
        assert bytes(scales[at].tolist()) == b"".join(s for _, s in parts), what
        assert exponents[at].tolist() == ([exponent] if fmt.exponent else []), what


@pytest.mark.parametrize("name", WITH_EXPONENT)
def test_later_rows_are_packed_by_the_exponent_that_the_first_row_set(name, kernels, device):
    sizes = {"key_size": 64, "device": device}
    ours, theirs = packed_layer(name, "f32", **sizes), packed_layer(name, "f32", **sizes)
    values = normal(16, 2, 64) * torch.logspace(-3, 0, 16)[:, None, None]
    for first, last in ((0, 1), (1, 16)):
        records, rows = [4] * (last - first), list(range(first, last))
        kernels.append(
            ours.key, values[first:last].to(device), ids(records, device), ids(rows, device)
        )
        put(theirs.key, values[first:last], records, rows)

    assert torch.equal(ours.arena, theirs.arena)
    assert not (ours.key.exponents[4] == 127).any()


@pytest.mark.parametrize("name", FORMATS)
def test_gather_unpacks_records_in_any_order_and_again_and_again(name, kernels, device):
    size = size_held(name, 96)
    layer = packed_layer(name, "f32", heads=3, key_size=size, record_rows=5, device=device)
    fill(layer.key, list(range(8)), 40, seed=1)
    records = [7, 6, 5, 2, 2, 2, 0]

    got = kernels.gather(layer.key, ids(records, device), F32).cpu()

    assert same_bytes(got, rows_of(layer.key, records, 35))


@pytest.mark.parametrize("name", [*NARROW, "turbo4e"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rows_of_narrow_types_go_in_and_out(name, dtype, kernels, device):
    sizes = {"key_size": 64, "device": device}
    ours, theirs = packed_layer(name, "f32", **sizes), packed_layer(name, "f32", **sizes)
    values = normal(16, 2, 64).to(dtype)

    kernels.append(ours.key, values.to(device), ids([3] * 16, device), ids(range(16), device))
    put(theirs.key, values, [3] * 16, range(16))
    got = kernels.gather(ours.key, ids([3], device), dtype).cpu()

    assert torch.equal(ours.arena, theirs.arena)
    assert same_bytes(got, rows_of(theirs.key, [3], 16).to(dtype))


def test_gather_leaves_the_rows_of_a_negative_record_alone(kernels, device):
    layer = packed_layer("q4_0", "f32", device=device)
    fill(layer.key, [0, 1], 32, seed=1)
    got = kernels.gather(layer.key, ids([1, -1, 0], device), F32).cpu()

    assert same_bytes(got[:, :16], rows_of(layer.key, [1], 16))
    assert same_bytes(got[:, 32:], rows_of(layer.key, [0], 16))


@pytest.fixture
def sparse(tmp_path):
    """9 GiB that take no memory and no disk until they are touched."""
    path = tmp_path / "arena"
    with path.open("wb") as file:
        file.truncate(9 << 30)
    return torch.from_file(str(path), shared=True, size=9 << 30, dtype=torch.uint8)


def test_records_beyond_two_to_the_31_are_found(sparse, launcher):
    launcher.seed = 0
    kernels = CudaKernels(launcher)
    near = packed_layer("q8_0", "turbo3e", record_rows=16, num_records=4)
    stride = (2 << 30) + 4096

    def spread(side: PackedSide):
        def part(part, near_part):
            offset = near_part.storage_offset() - near.record_bytes
            return sparse.as_strided(part.shape, (stride, *part.stride()[1:]), offset)

        return PackedSide(
            format=side.format,
            head_size=side.head_size,
            codes=part(side.codes, side.codes),
            scales=part(side.scales, side.scales),
            exponents=part(side.exponents, side.exponents),
        )

    far_key, far_value = spread(near.key), spread(near.value)
    values = normal(20, 2, 64)
    records, rows = [3] * 16 + [1] * 4, [i % 16 for i in range(20)]
    for far, side in ((far_key, near.key), (far_value, near.value)):
        kernels.append(far, values, ids(records, "cpu"), ids(rows, "cpu"))
        put(side, values, records, rows)
        for record, held in ((3, 16), (1, 4)):
            assert torch.equal(far.codes[record, :, :held], side.codes[record, :, :held])
            assert torch.equal(far.scales[record, :, :held], side.scales[record, :, :held])
        got = kernels.gather(far, ids([3, 1], "cpu"), F32)
        assert same_bytes(got[:, :20], rows_of(side, [3, 1], 20))

    query = normal(1, 2, 64)
    segments = ids([[0, 1, 20, 0]], "cpu")
    bounds = {"max_rows": 1, "max_length": 20, "scale": 0.125}
    table = ids([3, 1], "cpu")
    far_out, far_lse = kernels.attend(query, far_key, far_value, table, segments, **bounds)
    out, lse = kernels.attend(query, near.key, near.value, table, segments, **bounds)
    assert same_bytes(far_out, out)
    assert same_bytes(far_lse, lse)

    pages = stride // 4096
    kernels.copy_records(sparse, sparse, ids([2 * pages], "cpu"), ids([3 * pages], "cpu"), 4096)
    moved = sparse[2 * stride : 2 * stride + 4096]
    assert moved.any()
    assert torch.equal(moved, sparse[3 * stride : 3 * stride + 4096])


# ---- attend ----


def check_attention(
    kernels, layer, sequences, query_heads, dtype=F32, split_rows=64, sinks=None, **knobs
):
    """Run ``attend`` and hold it to the oracle; (out, lse) on the CPU."""
    size = layer.key.head_size
    query = normal(sequences.num_rows, query_heads, size, seed=9).to(dtype)
    out, lse = kernels.attend(
        query.to(layer.arena.device),
        layer.key,
        layer.value,
        sequences.records,
        sequences.segments,
        max_rows=sequences.max_rows,
        max_length=sequences.max_length,
        scale=size**-0.5,
        split_rows=split_rows,
        sinks_Q=None if sinks is None else sinks.to(layer.arena.device),
        **knobs,
    )
    out, lse = out.cpu(), lse.cpu()
    knobs.pop("partial_bytes", None)
    expected, expected_lse = attention(query, layer, sequences, size**-0.5, sinks_Q=sinks, **knobs)
    largest = max(float(expected.abs().max()), 1.0) if expected.numel() else 1.0
    bound = BOUND + {F32: 0.0, F16: 2**-11, BF16: 2**-8}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound * largest)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=BOUND * 10)
    return out, lse


@pytest.mark.parametrize(("key", "value", "dtype", "vectors"), ATTENDED)
def test_attention_of_each_pair_is_that_of_f64(key, value, dtype, vectors, kernels, device):
    size = size_held(value, 96)
    layer = packed_layer(key, value, value_size=size, num_records=16, device=device)
    sequences = packed_sequences(layer, [100, 1, 17], [1, 1, 1])
    check_attention(kernels, layer, sequences, 2 * vectors, dtype)


@pytest.mark.parametrize("window", [1, 3, 31, 32, 33, 50, 99, 100])
@pytest.mark.parametrize("split_rows", [32, 40, 512])
def test_a_window_keeps_the_last_keys_of_each_row(window, split_rows, kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, num_records=16, device=device)
    # 5 rows of 3 query heads are two blocks of eight query vectors.
    sequences = packed_sequences(layer, [100, 5, 33], [5, 5, 2])
    check_attention(kernels, layer, sequences, 3, split_rows=split_rows, window=window)


def test_what_a_window_hides_may_be_anything(kernels, device):
    layer = packed_layer("f32", "f32", heads=1, device=device)
    sequences = packed_sequences(layer, [40], [1])
    whole, lse = check_attention(kernels, layer, sequences, 4, window=7, split_rows=16)
    for position in range(33):
        record = sequences.tables[0][position // 16]
        for side in (layer.key, layer.value):
            side.codes[record, :, position % 16] = POISON
    query = normal(1, 4, 64, seed=9, device=device)
    poisoned, poisoned_lse = kernels.attend(
        query, layer.key, layer.value, sequences.records, sequences.segments,
        max_rows=1, max_length=40, scale=0.125, window=7, split_rows=16,
    )  # fmt: skip
    assert same_bytes(poisoned.cpu(), whole)
    assert same_bytes(poisoned_lse.cpu(), lse)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_cap_bends_the_scores(cap, kernels, device):
    layer = packed_layer("f32", "f32", device=device)
    sequences = packed_sequences(layer, [70, 9], [1, 1])
    check_attention(kernels, layer, sequences, 8, cap=cap)


def test_sinks_share_the_denominator_and_not_the_log_sum_exp(kernels, device):
    layer = packed_layer("f32", "f32", device=device)
    # The last sequence is empty: its row stays 0 in spite of the sinks.
    sequences = packed_sequences(layer, [70, 9, 0], [1, 1, 1])
    sinks = torch.tensor([0.0, 4.0, -3.0, 200.0, -math.inf, 1.0, 2.0, 3.0])
    out, lse = check_attention(kernels, layer, sequences, 8, split_rows=32, sinks=sinks)
    assert not out[0, 3].any()
    assert not out[2].any()
    assert lse[0].isfinite().all()


def test_window_cap_and_sinks_hold_together_on_packed_rows(kernels, device):
    layer = packed_layer("turbo4", "turbo3e", num_records=16, device=device)
    sequences = packed_sequences(layer, [90, 40], [1, 1])
    sinks = normal(8, seed=4)
    check_attention(kernels, layer, sequences, 8, window=37, cap=2.0, sinks=sinks, split_rows=32)


@pytest.mark.parametrize("partial_bytes", [1, 5000])
def test_rows_taken_a_few_at_a_time_have_the_same_bits(partial_bytes, kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, num_records=16, device=device)
    sequences = packed_sequences(layer, [70, 5, 33], [5, 5, 2])
    whole, parts = (
        check_attention(
            kernels, layer, sequences, 3, window=20, split_rows=32, partial_bytes=num_bytes
        )
        for num_bytes in (PARTIAL_BYTES, partial_bytes)
    )
    for ours, theirs in zip(parts, whole, strict=True):
        assert same_bytes(ours, theirs)


@pytest.mark.parametrize("record_rows", [1, 24, 16])
@pytest.mark.parametrize("split_rows", [32, 40, 512])
def test_any_record_and_split_size_gives_the_same_attention(
    record_rows, split_rows, kernels, device
):
    layer = packed_layer("f32", "f32", record_rows=record_rows, num_records=90, device=device)
    sequences = packed_sequences(layer, [67, 16], [1, 1])
    check_attention(kernels, layer, sequences, 8, split_rows=split_rows)


@pytest.mark.parametrize("size", [32, 512])
def test_the_smallest_and_the_largest_heads_are_attended(size, kernels, device):
    layer = packed_layer("f32", "f32", key_size=size, value_size=size, heads=1, device=device)
    check_attention(kernels, layer, packed_sequences(layer, [35], [1]), 4)


def test_several_new_rows_are_causal_among_themselves(kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, num_records=16, device=device)
    # 5 rows of 3 query heads are two blocks of eight query vectors.
    sequences = packed_sequences(layer, [70, 5, 33], [5, 5, 2])
    check_attention(kernels, layer, sequences, 3)


def test_two_hundred_sequences_of_which_one_is_empty(kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, num_records=400, device=device)
    lengths = [1 + i % 20 for i in range(200)]
    lengths[77] = 0
    sequences = packed_sequences(layer, lengths, [1] * 200)
    out, lse = check_attention(kernels, layer, sequences, 1)
    assert not out[77].any()
    assert lse[77] == -math.inf


def test_rows_of_no_sequence_come_out_as_zeros(kernels, device):
    layer = packed_layer("f32", "f32", device=device)
    query = normal(3, 8, 64, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    out, lse = kernels.attend(
        query, layer.key, layer.value, none, none.view(0, 4), max_rows=0, max_length=0, scale=1.0
    )
    assert not out.cpu().any()
    assert (lse.cpu() == -math.inf).all()


def test_repeated_records_count_as_often_as_they_come(kernels, device):
    layer = packed_layer("f32", "f32", heads=1, device=device)
    for side, seed in ((layer.key, 1), (layer.value, 2)):
        fill(side, [4], 16, seed=seed)
    query = normal(1, 4, 64, device=device)
    bounds = {"max_rows": 1, "scale": 0.125}
    once, lse = kernels.attend(
        query, layer.key, layer.value, ids([4], device), ids([[0, 1, 16, 0]], device),
        max_length=16, **bounds,
    )  # fmt: skip
    thrice, thrice_lse = kernels.attend(
        query, layer.key, layer.value, ids([4, 4, 4], device), ids([[0, 1, 48, 0]], device),
        max_length=48, **bounds,
    )  # fmt: skip
    torch.testing.assert_close(once, thrice, rtol=0, atol=BOUND)
    torch.testing.assert_close(lse + math.log(3), thrice_lse, rtol=0, atol=BOUND)


def test_a_sequence_has_the_same_bits_alone_and_in_company(kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, num_records=32, device=device)
    sequences = packed_sequences(layer, [200, 150, 3], [1, 1, 1])
    query = normal(3, 4, 64, device=device)
    sides = query, layer.key, layer.value, sequences.records
    both, _ = kernels.attend(
        *sides, sequences.segments, max_rows=1, max_length=200, scale=0.125, split_rows=64
    )
    alone, _ = kernels.attend(
        *sides, sequences.segments[2:], max_rows=1, max_length=3, scale=0.125, split_rows=64
    )
    assert same_bytes(both[2].cpu(), alone[2].cpu())


def test_rows_have_the_same_bits_together_and_one_by_one(kernels, device):
    layer = packed_layer("q8_0", "q5_1", heads=1, device=device)
    sequences = packed_sequences(layer, [70], [5])
    query = normal(5, 3, 64, device=device)
    knobs = {"scale": 0.125, "window": 37, "cap": 3.0, "split_rows": 32, "max_length": 70}
    sides = layer.key, layer.value, sequences.records
    together, lse = kernels.attend(query, *sides, sequences.segments, max_rows=5, **knobs)
    for t in range(5):
        segments = ids([[0, 1, 66 + t, 0]], device)
        alone, alone_lse = kernels.attend(query[t : t + 1], *sides, segments, max_rows=1, **knobs)
        assert same_bytes(alone[0].cpu(), together[t].cpu())
        assert same_bytes(alone_lse[0].cpu(), lse[t].cpu())


def test_a_row_that_is_hidden_may_hold_anything(kernels, device):
    layer = packed_layer("f32", "f32", heads=1, device=device)
    sequences = packed_sequences(layer, [9], [2])
    record = sequences.tables[0][0]
    layer.key.codes[record, :, 8] = POISON
    layer.value.codes[record, :, 8] = POISON
    query = normal(2, 2, 64, device=device)
    out, _ = kernels.attend(
        query, layer.key, layer.value, sequences.records, sequences.segments,
        max_rows=2, max_length=9, scale=0.125,
    )  # fmt: skip
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


# ---- rotate, copy, roll ----


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_rotation_has_the_bits_of_the_truth_and_comes_back(size, kernels, device):
    first, second = (torch.tensor(s, dtype=F32, device=device) for s in sign_tables(size))
    values = normal(7, size)
    got = kernels.rotate(values.to(device), first, second)
    truth = torch.tensor([rotate(row) for row in values.tolist()])
    assert same_bytes(got.cpu(), truth)
    back = kernels.rotate(got, second, first).cpu()
    torch.testing.assert_close(back, values, rtol=0, atol=BOUND)


def test_rotation_of_narrow_rows_rounds_once(kernels, device):
    first, second = (torch.tensor(s, dtype=F32, device=device) for s in sign_tables(64))
    values = normal(3, 2, 64).to(BF16)
    got = kernels.rotate(values.to(device), first, second).cpu()
    wide = [rotate(row) for row in values.float().view(6, 64).tolist()]
    assert same_bytes(got.view(6, 64), torch.tensor(wide).to(BF16))


def bytes_of(count, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).to(device)


def test_records_are_copied_and_negative_ids_are_skipped(kernels, device):
    size = 16 * 133
    source, target = bytes_of(6 * size, device), torch.zeros(6 * size, dtype=torch.uint8).to(device)
    # A record of slack on either side catches what a negative id would touch.
    inner = slice(size, 5 * size)
    kernels.copy_records(
        target[inner], source[inner], ids([3, 0, -1, 2], device), ids([0, 2, 1, -1], device), size
    )
    got, given = target.view(6, size).cpu(), source.view(6, size).cpu()
    assert torch.equal(got[[4, 1]], given[[1, 3]])
    assert not got[[0, 2, 3, 5]].any()


def test_a_state_is_copied_alone_out_of_its_slot(kernels, device):
    slot, offset, count = 4 * 800, 4 * 37, 701
    source = bytes_of(4 * slot, device)
    target = torch.zeros(4 * slot, dtype=torch.uint8, device=device)
    kernels.copy_state(
        target, source, ids([2, -1], device), ids([1, 0], device),
        slot_bytes=slot, offset=offset, num_elements=count,
    )  # fmt: skip
    expected = torch.zeros(4, slot, dtype=torch.uint8)
    held = slice(offset, offset + 4 * count)
    expected[2, held] = source.view(4, slot).cpu()[1, held]
    assert torch.equal(target.view(4, slot).cpu(), expected)


# ---- order, errors, operators ----


def test_the_order_of_threads_changes_no_bit(launcher):
    results = []
    for seed in (0, 1, 7):
        launcher.seed = seed
        kernels = CudaKernels(launcher)
        layer = packed_layer("q8_0", "q5_1", heads=1, num_records=16)
        sequences = packed_sequences(layer, [70, 33], [1, 1])
        values = normal(4, 1, 64, seed=5)
        kernels.append(layer.key, values, ids([15] * 4, "cpu"), ids(range(4), "cpu"))
        gathered = kernels.gather(layer.key, ids([15, 0], "cpu"), F32)
        out, lse = check_attention(kernels, layer, sequences, 5)
        results.append((layer.arena, gathered[:, :4], out, lse))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bytes(a, b)


def test_tensors_that_do_not_fit_are_refused_before_a_launch(kernels, device):
    layer = packed_layer("q8_0", "f32", device=device)
    values, one = normal(1, 2, 64, device=device), ids([0], device)
    with pytest.raises(InternalError, match="rows of 32, a side of 64"):
        kernels.append(layer.key, values[..., :32], one, one)
    with pytest.raises(InternalError, match=r"int64 \[1\]"):
        kernels.append(layer.key, values, one.int(), one)
    with pytest.raises(InternalError, match="not laid"):
        kernels.gather(
            PackedSide(
                format=layer.key.format,
                head_size=64,
                codes=layer.key.codes.contiguous(),
                scales=layer.key.scales,
                exponents=layer.key.exponents,
            ),
            one,
            F32,
        )
    with pytest.raises(InternalError, match="multiples of 16"):
        kernels.copy_records(layer.arena, layer.arena[8:], one, one, 1024)
    with pytest.raises(InternalError, match="segments are no int64"):
        kernels.attend(
            values, layer.key, layer.value, one, one, max_rows=1, max_length=1, scale=1.0
        )
    with pytest.raises(ConfigError, match="float64"):
        kernels.append(layer.key, values.double(), one, one)
    with pytest.raises(InternalError, match="a window of -1"):
        kernels.attend(
            values, layer.key, layer.value, one, ids([[0, 1, 1, 0]], device),
            max_rows=1, max_length=1, scale=1.0, window=-1,
        )  # fmt: skip
    with pytest.raises(InternalError, match="sinks are no f32"):
        kernels.attend(
            values, layer.key, layer.value, one, ids([[0, 1, 1, 0]], device),
            max_rows=1, max_length=1, scale=1.0, sinks_Q=torch.zeros(3, device=device),
        )  # fmt: skip
    with pytest.raises(InternalError, match="exponents do not fit"):
        kernels.gather(
            PackedSide(
                format=layer.key.format,
                head_size=64,
                codes=layer.key.codes,
                scales=layer.key.scales,
                exponents=layer.key.codes,
            ),
            one,
            F32,
        )
    with pytest.raises(FormatError, match="96 elements cannot be rotated"):
        kernels.rotate(normal(1, 96), one, one)
    wide = packed_layer("f32", "f32", key_size=576, device=device)
    with pytest.raises(ConfigError, match="576 is beyond 512"):
        kernels.attend(
            normal(1, 2, 576), wide.key, wide.value, one, ids([[0, 1, 1, 0]], device),
            max_rows=1, max_length=1, scale=1.0,
        )  # fmt: skip


def operator_arguments(device):
    """Arguments for every operator."""
    layer = packed_layer("q8_0", "fp8", value_size=96, device=device)
    key = layer.key.codes, layer.key.scales, layer.key.exponents, "q8_0", 1.0
    value = layer.value.codes, layer.value.scales, layer.value.exponents, "fp8", 0.25
    knobs = 0.125, 7, 2.0, normal(8, device=device), 512
    sequences = packed_sequences(layer, [20, 3], [1, 1])
    signs = torch.ones(64, device=device)
    rows = normal(2, 2, 64, device=device)
    units = bytes_of(4 * 1024, device), bytes_of(4 * 1024, device)
    pairs = ids([0, -1], device), ids([2, 1], device)
    where = sequences.records, sequences.segments
    return {
        "append": (*key, rows, ids([5, -1], device), ids([3, 2], device)),
        "gather": (*key, 64, ids([1, 0], device), BF16),
        "attend": (normal(2, 8, 64, device=device), *key, *value, 96, *where, 1, 20, *knobs),
        "rotate": (rows, signs, signs),
        "copy_records": (*units, *pairs, 1024),
        "copy_state": (*units, *pairs, 1024, 64, 100),
    }


@pytest.mark.parametrize(
    "name", ["append", "gather", "attend", "rotate", "copy_records", "copy_state"]
)
def test_operators_say_what_they_change_and_return(name, kernels, device):
    with cuda_ops.serving(device, kernels):
        torch.library.opcheck(
            getattr(torch.ops.memkv, name).default,
            operator_arguments(device)[name],
            test_utils=("test_schema", "test_faketensor"),
        )


def test_the_attention_operator_hands_every_argument_on(kernels, device):
    layer = packed_layer("q8_0", "fp8", value_size=96, device=device)
    sequences = packed_sequences(layer, [20, 3], [1, 1])
    query, sinks = normal(2, 4, 64), normal(4, seed=3)
    key, value = layer.key, layer.value
    with cuda_ops.serving(device, kernels):
        out, lse = torch.ops.memkv.attend(
            query.to(device),
            *(key.codes, key.scales, key.exponents, "q8_0", key.scale),
            *(value.codes, value.scales, value.exponents, "fp8", value.scale, 96),
            *(sequences.records, sequences.segments, 1, 20, 0.125, 7, 1.5, sinks.to(device), 32),
        )
    expected, expected_lse = attention(
        query, layer, sequences, 0.125, window=7, cap=1.5, sinks_Q=sinks
    )
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=BOUND * 10)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=0, atol=BOUND * 10)


@pytest.mark.gpu
def test_operators_run_on_the_current_stream():
    layer = packed_layer("q8_0", "f32", device="cuda")
    values = normal(16, 2, 64)
    stream = torch.cuda.Stream()
    assert cuda_ops.load() is not None
    with torch.cuda.stream(stream):
        side = layer.key.codes, layer.key.scales, layer.key.exponents, "q8_0", 1.0
        where = ids([2] * 16, "cuda"), ids(range(16), "cuda")
        torch.ops.memkv.append(*side, values.to("cuda"), *where)
        rows = torch.ops.memkv.gather(*side, 64, ids([2], "cuda"), F32)
    stream.synchronize()
    assert same_bytes(rows.cpu(), rows_of(layer.key, [2], 16))


def test_the_ids_of_formats_are_those_of_the_header():
    from memkv_pp.cache.host_build import kernel_sources

    header = (kernel_sources() / "codec" / "blocks.h").read_text(encoding="utf-8")
    for index, name in enumerate(CUDA_FORMATS):
        assert f" {name.upper()} = {index}" in header
