"""The compiled codecs of groups of sixteen: nvfp4 and the turbo formats, with and without ``e``."""

import ctypes
import math
import mmap
import shutil
from functools import cache

import pytest
import torch

from memkv_pp.cache import host_build, host_kernels, ops
from memkv_pp.cache.codec import decode
from memkv_pp.cache.host_codec import FORMAT_IDS, TYPE_IDS, HostCodec
from memkv_pp.errors import FormatError, InternalError
from memkv_pp.formats import FORMATS, ROTATED_SIZES, parse_format
from memkv_pp.packing import pack_group, unpack_group
from memkv_pp.packing_groups import TURBO_BOUNDARIES, TURBO_LEVELS, exponent_byte
from memkv_pp.rotation import rotate, rotation_norm, sign_tables
from memkv_pp.testing.packed_sides import packed_layer, put, rows_of

NAMES = tuple(name for name, fmt in FORMATS.items() if fmt.group == 16)
BASES = tuple(name for name in NAMES if not parse_format(name).exponent)
INF = math.inf

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, host_build.COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """``groups.h`` alone, as a library: one group, one head rotated, one exponent."""
    source = tmp_path_factory.mktemp("groups") / "kernels" / "host" / "groups.cpp"
    source.parent.mkdir(parents=True)
    headers = host_build.kernel_sources() / "codec"
    calls = "\n".join(
        f"case {FORMAT_IDS[name]}: Block<{FORMAT_IDS[name]}>::DO; break;" for name in BASES
    )
    source.write_text(f"""#include "{headers}/blocks.h"
#include "{headers}/groups.h"
using namespace memkv;
extern "C" void encode(int format, const float* x, uint8_t* codes, uint8_t* scales, int exponent) {{
  const float factor = reciprocal_power(exponent);
  switch (format) {{ {calls.replace("DO", "encode(x, codes, scales, factor)")} }}
}}
extern "C" void decode(int format, const uint8_t* codes, const uint8_t* scales, float* x, int exponent) {{
  switch (format) {{ {calls.replace("DO", "decode(codes, scales, x, power(exponent))")} }}
}}
extern "C" void rotate(float* x, int size, const float* first, const float* second, float norm) {{
  rotate_head(x, size, first, second, norm);
}}
extern "C" int exponent(float largest) {{ return exponent_byte(largest); }}
""")
    directory = tmp_path_factory.mktemp("cache") / "kernels"
    library = ctypes.CDLL(str(host_build.build(source, host_build.find_toolchain(None), directory)))
    library.exponent.argtypes = (ctypes.c_float,)
    library.rotate.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float),
    )
    return library


def adversarial_rows():
    """[rows, 64] f32: ordinary rows of many magnitudes, then the odd ones."""
    generator = torch.Generator().manual_seed(8)
    powers = 10.0 ** torch.arange(-44, 39, 4, dtype=torch.float64)
    random = torch.randn(len(powers), 64, generator=generator, dtype=torch.float64)
    odd = [torch.arange(-32, 32) * step for step in (0.5, 1e-41, 3e-39, 1e-7, 2e36)]
    odd += [torch.full((64,), value) for value in (0.0, -0.0, 0.7, 3e38, -INF, math.nan)]
    patterns = [[3.0, -3.0], [-0.0, 1.0], [3e38, -3e38], [INF, 1.0], [1e-12, -2e-13]]
    # On the boundaries of codes, the next numbers on either side, and E2M1's.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    for name, top in (("turbo4", 2.7326), ("turbo3", 2.152), ("turbo2", 1.5104), ("nvfp4", 6.0)):
        edges = torch.tensor([x for x in TURBO_BOUNDARIES.get(name, ties) if x > 0])
        found = [edges, edges.nextafter(torch.zeros(())), edges.nextafter(torch.tensor(9.0))]
        for some in (*found, *(-x for x in found)):
            top = TURBO_LEVELS[name][-1] if name in TURBO_LEVELS else top
            patterns.append([top, *some.tolist(), *[0.0] * (15 - len(some))])
    odd += [torch.tensor((pattern * 32)[:64]) for pattern in patterns]
    odd.append(torch.linspace(-4, 4, 64).index_fill(0, torch.tensor([47]), math.nan))
    # Rotated, one whose sums of squares of turbo4 tell the order of summation.
    odd.append(torch.tensor([
        944, 330, -741, 599, 231, -900, -251, -138, 816, 524, -149, -743, -537, 91, -425, 340, -240,
        191, -490, 141, 821, 928, 119, 981, 585, -399, 751, -958, 748, 116, -516, -726, -928, -18,
        361, 563, -366, -575, 105, -121, 332, -541, 341, -139, 305, 814, 990, -340, 326, -385, -396,
        -230, 47, -651, 423, -246, -786, 160, 825, -868, 644, -383, 340, -690,
    ]))  # fmt: skip
    return torch.cat([(random * powers[:, None]).float(), torch.stack([o.float() for o in odd])])


def assert_same(found, expected):
    """Bit for bit, but one NaN is as good as another."""
    assert torch.equal(found.isnan(), expected.isnan())
    bits = [
        t.nan_to_num(nan=0.0, posinf=INF, neginf=-INF).view(torch.uint8) for t in (found, expected)
    ]
    assert torch.equal(*bits)


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def write(codec, side, values, records, rows):
    """``put`` by the compiled codec."""
    exponents = side.exponents if side.format.exponent else None
    place = (torch.tensor(column, dtype=torch.int64) for column in (records, rows))
    codec.append(side.format, side.codes, side.scales, *place, values, exponents=exponents)


@pytest.mark.parametrize("name", BASES)
def test_the_block_codec_has_the_bytes_of_the_truth(groups, name):
    fmt = parse_format(name + "e")
    for index, row in enumerate(adversarial_rows()):
        for first in range(0, 64, 16):
            group = row[first : first + 16].contiguous()
            exponent = (127, 127, 120, 1, 252)[(index + first // 16) % 5]
            codes = (ctypes.c_uint8 * fmt.code_bytes)()
            scales = (ctypes.c_uint8 * fmt.scale_bytes)()
            out = torch.empty(16)
            groups.encode(FORMAT_IDS[name], pointer(group), codes, scales, exponent)
            expected = pack_group(fmt, group.tolist(), exponent=exponent)
            assert (bytes(codes), bytes(scales)) == expected, (group, exponent)
            groups.decode(FORMAT_IDS[name], codes, scales, pointer(out), exponent)
            assert_same(out, torch.tensor(unpack_group(fmt, *expected, exponent=exponent)))


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_a_head_is_rotated_to_the_bits_of_the_truth(groups, size):
    row = torch.randn(size, generator=torch.Generator().manual_seed(2))
    signs = [torch.tensor(x, dtype=torch.float32) for x in sign_tables(size)]
    expected = torch.tensor(rotate(row.tolist()))
    groups.rotate(pointer(row), size, *map(pointer, signs), rotation_norm(size))
    assert torch.equal(row, expected)


def test_exponents_are_those_of_the_truth(groups):
    for largest in (0.0, 1e-45, 1e-38, 2**-125, 0.002, 1.0, 7.99, 3.4e38, INF, math.nan):
        assert groups.exponent(largest) == exponent_byte([0.0, largest])


@cache
def truth_of(name, dtype):
    """(exponents, codes, scales) of the odd rows, all rows' bytes end to end."""
    fmt = parse_format(name)
    rows = adversarial_rows().to(dtype).float().tolist()
    if fmt.rotated:
        rows = [rotate(row) for row in rows]
    exponents = bytes(exponent_byte(row) if fmt.exponent else 127 for row in rows)
    packed = [
        pack_group(fmt, row[i : i + 16], exponent=exponent)
        for row, exponent in zip(rows, exponents, strict=True)
        for i in range(0, 64, 16)
    ]
    return exponents, b"".join(codes for codes, _ in packed), b"".join(s for _, s in packed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPE_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_bytes_of_the_truth(host_codec, name, dtype):
    fmt, rows = parse_format(name), adversarial_rows().to(dtype)
    # Each row is the first of a record.
    side = packed_layer(name, "f32", heads=1, record_rows=1, num_records=len(rows)).key
    write(host_codec, side, rows[:, None], range(len(rows)), [0] * len(rows))
    exponents, codes, scales = truth_of(name, dtype)
    if fmt.exponent:
        assert bytes(side.exponents.flatten().tolist()) == exponents
    assert bytes(side.codes.flatten().tolist()) == codes
    assert bytes(side.scales.flatten().tolist()) == scales


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_come_back_as_torch_has_them(host_codec, name):
    fmt, generator = parse_format(name), torch.Generator().manual_seed(5)
    for size in (64, 512) if fmt.rotated else (16, 80, 512):
        layer = packed_layer(name, "f32", heads=2, key_size=size, record_rows=3, num_records=40)
        layer.arena.copy_(torch.randint(0, 256, layer.arena.shape, generator=generator))
        side, which = layer.key, torch.tensor([5, 0, 39, 5])
        exponents = side.exponents if fmt.exponent else None
        for dtype in TYPE_IDS:
            memory = torch.full((2 * 12 * size + 64,), -7.0, dtype=dtype)
            found = memory[:-64].view(2, 12, size)
            parts = fmt, size, side.codes, side.scales, which, dtype
            host_codec.gather(*parts, exponents=exponents, out=found)
            assert memory[-64:].eq(-7.0).all()
            codes, scales, bytes_ = (
                part[which].transpose(0, 1) for part in (side.codes, side.scales, side.exponents)
            )
            expected = decode(
                *(fmt, codes, scales, size, dtype),
                exponents=bytes_[..., 0] if fmt.exponent else None,
            )
            assert_same(found, expected.flatten(1, 2))


CALLS = {
    "one first row": [([2], [0])],
    "later rows take the exponents that are stored": [
        ([2, 4], [0, 0]),
        ([4, 2, 2], [3, 1, 2]),
    ],
    "the first row of a record comes after others": [([1, 3, 1, 3, 1], [3, 1, 1, 0, 0])],
    "a first row again changes them for the rows that follow": [
        ([0, 0], [0, 1]),
        ([0, 0], [2, 0]),
    ],
    "rows of a record without a first row": [([4], [2])],
    "negative records": [([-1, 2, -1, 0, -7], [0, 1, 2, 0, 0])],
    "no rows": [([], [])],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 64) for name in NAMES),
        *(("turbo3e", size) for size in (128, 256, 512)),
        *(("nvfp4e", size) for size in (16, 48, 80, 528)),
    ],
)
def test_an_arena_holds_the_bytes_that_torch_puts_there_and_no_others(
    host_codec, name, size, calls
):
    ours, theirs = (
        packed_layer(name, "f32", heads=3, key_size=size, record_rows=4, num_records=5)
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(9)
    for factor, (records, rows) in zip((0.002, 30.0), calls, strict=False):
        # K of a fused projection: tokens and heads lie apart, heads before tokens.
        fused = torch.randn(4, len(records) + 1, size + 3, generator=generator) * factor
        values = fused[1:, 1:, :size].transpose(0, 1)
        write(host_codec, ours.key, values, records, rows)
        put(theirs.key, values, records, rows)
    assert torch.equal(ours.arena, theirs.arena)


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_rows_are_rotated_in_the_order_of_the_truth(host_codec, size):
    generator = torch.Generator().manual_seed(7)
    wanted = torch.randn(4, size, generator=generator)
    wanted[:, 16:] *= 1e-7
    rows = torch.tensor([rotate(row, inverse=True) for row in wanted.tolist()])
    # Rotated, all groups but the first are no larger than the errors of roundings.
    expected = torch.tensor([rotate(row) for row in rows.tolist()])
    assert 0 < expected[:, 16:].abs().max() < 1e-5
    layer = packed_layer("turbo8", "f32", heads=1, key_size=size, record_rows=4, num_records=1)
    write(host_codec, layer.key, rows[:, None], [0] * 4, range(4))
    packed = [
        pack_group(layer.key.format, row[i : i + 16])
        for row in expected.tolist()
        for i in range(0, size, 16)
    ]
    assert bytes(layer.key.codes.flatten().tolist()) == b"".join(codes for codes, _ in packed)
    assert bytes(layer.key.scales.flatten().tolist()) == b"".join(scales for _, scales in packed)


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_gaps_between_them_are_gathered_row_by_row(host_codec, name):
    layer = packed_layer(name, "f32", heads=1, record_rows=3, num_records=2)
    side, generator = layer.key, torch.Generator().manual_seed(3)
    write(
        host_codec,
        side,
        torch.randn(6, 1, 64, generator=generator),
        [0] * 3 + [1] * 3,
        [0, 1, 2] * 2,
    )
    codes, scales = (
        torch.nn.functional.pad(part, (0, 5))[..., : part.shape[-1]]
        for part in (side.codes, side.scales)
    )
    exponents = side.exponents if side.format.exponent else None
    which = torch.tensor([1, 0])
    found = host_codec.gather(
        side.format, 64, codes, scales, which, torch.float32, exponents=exponents
    )
    assert torch.equal(found, rows_of(side, (1, 0), 6))


@pytest.mark.parametrize("name", ["turbo3e", "nvfp4"])
def test_records_beyond_two_gibibytes_are_found(host_codec, name):
    fmt, far = parse_format(name), (1 << 30) + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    arena = torch.frombuffer(mmap.mmap(-1, 4 * far, flags=flags), dtype=torch.uint8)
    near = packed_layer(name, "f32", heads=1, record_rows=2, num_records=4).key
    codes, scales, exponents = (
        arena.as_strided((4, *part.shape[1:]), (far, *part.stride()[1:]), place << 20)
        for place, part in enumerate((near.codes, near.scales, near.exponents))
    )
    rows = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(4))
    records, places = [3, 2, 3, 0], [0, 0, 1, 0]
    put(near, rows, records, places)
    held = exponents if fmt.exponent else None
    place = torch.tensor(records), torch.tensor(places)
    host_codec.append(fmt, codes, scales, *place, rows, exponents=held)
    which = torch.tensor([3, 2])
    found = host_codec.gather(fmt, 64, codes, scales, which, torch.float32, exponents=held)
    assert torch.equal(found[:, :3], rows_of(near, (3, 2), 3))


def test_what_does_not_fit_is_refused_and_nothing_is_written(host_codec):
    layer = packed_layer("turbo4e", "f32", heads=2, record_rows=4, num_records=3)
    side, before = layer.key, layer.arena.clone()
    values = torch.ones(1, 2, 64)
    for record, row in ((3, 0), (0, 4)):
        with pytest.raises(InternalError, match=r"outside \[0, 3\) or \[0, 4\)"):
            write(host_codec, side, values, [record], [row])
    place = torch.tensor([0]), torch.tensor([0])
    with pytest.raises(InternalError, match=r"3 records and 2 heads are one byte each, got"):
        host_codec.append(
            *(side.format, side.codes, side.scales), *place, values, exponents=side.exponents[:, :1]
        )
    with pytest.raises(FormatError, match="a head of 96 elements cannot be rotated"):
        host_codec.append(
            side.format,
            *(torch.empty(3, 2, 4, width, dtype=torch.uint8) for width in (48, 6)),
            *place,
            torch.ones(1, 2, 96),
        )
    assert torch.equal(layer.arena, before)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_uses_the_kernels_once_they_are_loaded(name):
    if host_kernels.load() is None:
        pytest.skip(host_kernels.status().found)
    key = packed_layer(name, "f32", record_rows=4, num_records=3).key
    expected = packed_layer(name, "f32", record_rows=4, num_records=3).key
    side = ops.SideView(key.format, key.head_size, key.codes, key.scales, key.exponents)
    assert HostCodec.covers(side.format, side.codes, torch.float32)
    values = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(5)) * 0.01
    ops.append(side, torch.tensor([2, 2]), torch.tensor([1, 0]), values)
    put(expected, values, [2, 2], [1, 0])
    for ours, theirs in ((key.codes, expected.codes), (key.scales, expected.scales)):
        assert torch.equal(ours, theirs)
    assert torch.equal(key.exponents, expected.exponents)
    found = ops.gather(side, torch.tensor([2]), torch.float32)
    assert torch.equal(found[:, :2], rows_of(expected, (2,), 2))
    with pytest.raises(InternalError, match="append: a record"):
        ops.append(side, torch.tensor([3]), torch.tensor([0]), values[:1])
