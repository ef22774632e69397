"""The compiled codecs have the bytes of the truth, on every vector path, wherever rows lie."""

import ctypes
import math
import mmap
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from memkv_pp.cache import host_build, host_kernels, ops
from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.host_codec import BASE_FORMATS, FORMAT_IDS, TYPE_IDS, HostCodec
from memkv_pp.errors import InternalError
from memkv_pp.formats import FORMATS, Family, parse_format
from memkv_pp.packing import fp8_reciprocal, pack_group, unpack_group

SOURCE = host_build.kernel_sources() / "host" / "codec_host.cpp"
# Groups of sixteen are tested in test_host_groups.py.
NAMES = tuple(name for name in FORMAT_IDS if parse_format(name).group != 16)
GGML_NAMES = tuple(name for name in NAMES if parse_format(name).family is Family.GGML)
INF = math.inf

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, host_build.COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture(scope="module")
def codec(host_codec):
    return host_codec


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """``blocks.h`` alone, as a library: encode and decode of one group."""
    source = tmp_path_factory.mktemp("blocks") / "kernels" / "host" / "blocks.cpp"
    source.parent.mkdir(parents=True)
    header = host_build.kernel_sources() / "codec" / "blocks.h"
    calls = "\n".join(
        f"case {FORMAT_IDS[name]}: Block<{FORMAT_IDS[name]}>::DO; break;" for name in NAMES
    )
    source.write_text(f"""#include "{header}"
using namespace memkv;
extern "C" void encode(int format, const float* x, uint8_t* codes, uint8_t* scales, float factor) {{
  switch (format) {{ {calls.replace("DO", "encode(x, codes, scales, factor)")} }}
}}
extern "C" void decode(int format, const uint8_t* codes, const uint8_t* scales, float* x, float factor) {{
  switch (format) {{ {calls.replace("DO", "decode(codes, scales, x, factor)")} }}
}}
""")
    directory = tmp_path_factory.mktemp("cache") / "kernels"
    return ctypes.CDLL(str(host_build.build(source, host_build.find_toolchain(None), directory)))


def adversarial_rows(*, nan=True):
    """[rows, 64] f32: ordinary rows of many magnitudes, then the odd ones."""
    generator = torch.Generator().manual_seed(8)
    powers = 10.0 ** torch.arange(-44, 39, 4, dtype=torch.float64)
    random = torch.randn(len(powers), 64, generator=generator, dtype=torch.float64)
    odd = [torch.arange(-32, 32) * step for step in (0.5, 1e-41, 3e-39, 1e-7, 2e36)]
    odd += [torch.arange(64) * 0.25, torch.arange(64) * -0.25]
    # Halves, and the f32 below a half, which a plain sum with a half would round up.
    odd.append(torch.tensor([127.0, 0.49999997, -0.49999997, *(j / 2 for j in range(-30, 31))]))
    odd += [torch.full((64,), value) for value in (0.0, -0.0, 0.7, -3.25, 3e38, INF, -INF)]
    patterns = [[3.0, -3.0], [-3.0, 3.0], [0.0, -0.0], [-0.0, 1.0], [3e38, -3e38], [INF, 1.0]]
    # A zero minimum, on either side of the other zero and of the middle of a group.
    patterns += [[-0.0, 0.0, 1.0, 2.0], [0.0, -0.0, 1.0, 2.0], [*[1.0] * 15, 0.0, 1.0, -0.0]]
    odd += [torch.tensor((pattern * 32)[:64]) for pattern in patterns]
    if nan:
        odd += [
            torch.linspace(-4, 4, 64).index_fill(0, torch.tensor([i]), math.nan) for i in (0, 47)
        ]
        odd.append(torch.full((64,), math.nan))
    return torch.cat([(random * powers[:, None]).float(), torch.stack([o.float() for o in odd])])


def assert_same(found, expected):
    """Bit for bit, but one NaN is as good as another."""
    assert torch.equal(found.isnan(), expected.isnan())
    bits = [
        t.nan_to_num(nan=0.0, posinf=INF, neginf=-INF).view(torch.uint8) for t in (found, expected)
    ]
    assert torch.equal(*bits)


def packed(codec, fmt, rows, scale=1.0):
    """codes and scales [rows, row bytes] of ``rows``, each in a record of its own."""
    count, head_size = rows.shape
    codes = torch.full((count, 1, 1, fmt.code_row_bytes(head_size)), 0xA5, dtype=torch.uint8)
    scales = torch.full((count, 1, 1, fmt.scale_row_bytes(head_size)), 0xA5, dtype=torch.uint8)
    place = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    codec.append(fmt, codes, scales, *place, rows[:, None], scale)
    return codes, scales


def test_the_ids_are_those_of_the_sources():
    header = (SOURCE.parent.parent / "codec" / "blocks.h").read_text()
    enum = header.split("enum Format : int {")[1].split("}")[0]
    ids = dict(re.findall(r"(\w+) = (\d+)", enum))
    assert tuple(name.lower() for name in ids) == BASE_FORMATS
    assert list(map(int, ids.values())) == list(range(len(BASE_FORMATS)))
    assert set(FORMAT_IDS) == set(FORMATS)
    assert FORMAT_IDS["turbo3e"] == FORMAT_IDS["turbo3"] == BASE_FORMATS.index("turbo3")
    types = dict(re.findall(r"MEMKV_(F32|BF16|F16) = (\d)", SOURCE.read_text()))
    assert [int(types[name]) for name in ("F32", "BF16", "F16")] == list(TYPE_IDS.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_block_codec_has_the_bytes_of_the_truth(blocks, name):
    fmt, scale = parse_format(name), 0.037
    encoding = fp8_reciprocal(scale)
    for row in adversarial_rows():
        for first in range(0, 64, max(fmt.group, 8)):
            group = row[first : first + fmt.group].contiguous()
            codes = (ctypes.c_uint8 * fmt.code_bytes)()
            scales = (ctypes.c_uint8 * max(fmt.scale_bytes, 1))()
            out = torch.empty(fmt.group)
            number = FORMAT_IDS[name]
            x = ctypes.c_void_p(group.data_ptr())
            blocks.encode(number, x, codes, scales, ctypes.c_float(encoding))
            expected = pack_group(fmt, group.tolist(), scale=scale)
            assert (bytes(codes), bytes(scales)[: fmt.scale_bytes]) == expected, group
            x = ctypes.c_void_p(out.data_ptr())
            blocks.decode(number, codes, scales, x, ctypes.c_float(scale))
            assert_same(out, torch.tensor(unpack_group(fmt, *expected, scale=scale)))


@pytest.mark.parametrize("dtype", TYPE_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_bytes_and_values_of_the_truth(codec, name, dtype):
    fmt, scale = parse_format(name), 0.037
    rows = adversarial_rows().to(dtype)
    if name == {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]:
        rows = adversarial_rows(nan=False).to(dtype)  # copied: a NaN is whatever it was
    codes, scales = packed(codec, fmt, rows, scale)
    place = torch.arange(len(rows))
    torch_codes, torch_scales = encode(fmt, rows, scale)
    assert torch.equal(codes[:, 0, 0], torch_codes)
    assert torch.equal(scales[:, 0, 0], torch_scales)
    for index, row in enumerate(rows.float().tolist()):
        groups = [row[i : i + fmt.group] for i in range(0, 64, fmt.group)]
        truth = [pack_group(fmt, group, scale=scale) for group in groups]
        assert bytes(codes[index].flatten().tolist()) == b"".join(c for c, _ in truth), row
        assert bytes(scales[index].flatten().tolist()) == b"".join(s for _, s in truth), row
    for out_dtype in TYPE_IDS:
        found = codec.gather(fmt, 64, codes, scales, place, out_dtype, scale)[0]
        assert_same(found, decode(fmt, codes[:, 0, 0], scales[:, 0, 0], 64, out_dtype, scale))


@pytest.mark.parametrize("name", GGML_NAMES)
def test_rows_have_the_bytes_and_values_of_gguf(codec, name):
    fmt, qtype = parse_format(name), gguf.GGMLQuantizationType[name.upper()]
    random = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    # numpy does not say which of two zeros of unlike sign is the minimum
    rows = torch.cat([random, adversarial_rows(nan=False)]) + 0.0
    rows = rows[~rows.isinf().all(-1)]  # where gguf differs from ggml
    with np.errstate(all="ignore"):
        expected = quantize(rows.numpy(), qtype)
        values = torch.from_numpy(dequantize(expected, qtype))
    codes, scales = packed(codec, fmt, rows)
    parts = [scales.reshape(len(rows), 2, -1), codes.reshape(len(rows), 2, -1)]
    if fmt.code_bytes == 20:  # ggml has the fifth bits before the nibbles
        parts = [parts[0], parts[1][..., 16:], parts[1][..., :16]]
    assert np.array_equal(torch.cat(parts, -1).flatten(1).numpy(), expected)
    found = codec.gather(fmt, 64, codes, scales, torch.arange(len(rows)), torch.float32)
    assert_same(found[0], values)


@pytest.mark.parametrize("name", ["f16", "bf16", "fp8"])
def test_every_code_of_a_narrow_float_comes_back_as_its_number(codec, name):
    fmt = parse_format(name)
    every = torch.arange(256 ** (fmt.code_bytes), dtype=torch.int32)
    codes = every.to(torch.uint16 if fmt.code_bytes == 2 else torch.uint8).view(torch.uint8)
    codes = codes.reshape(1, 1, 1, -1)
    scales = codes[..., :0]
    for dtype in TYPE_IDS:
        found = codec.gather(
            fmt, len(every), codes, scales, torch.zeros(1, dtype=torch.int64), dtype
        )
        assert_same(found, decode(fmt, codes, scales, len(every), dtype).reshape(1, 1, -1))


@pytest.mark.parametrize("name", ["f16", "bf16", "fp8"])
def test_numbers_between_two_codes_round_to_the_right_one(codec, name):
    fmt = parse_format(name)
    bits = torch.arange(0x3200, 0x4800, dtype=torch.int32) << 16
    values = torch.cat([bits + step for step in (-1, 0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001)])
    values = torch.cat([values.view(torch.float32), -values.view(torch.float32)])[None]
    assert torch.equal(packed(codec, fmt, values)[0][0, 0, 0], encode(fmt, values)[0][0])


HEADS, RECORDS, ROWS = 3, 5, 4


def arena_side(name, head_size):
    """A side whose parts lie apart in poisoned records, and the bytes of all of them."""
    fmt = parse_format(name)
    widths = fmt.code_row_bytes(head_size), fmt.scale_row_bytes(head_size)
    record = 64 + HEADS * ROWS * sum(widths)
    arena = torch.full((RECORDS * record,), 0xEE, dtype=torch.uint8)
    offsets = 16, 48 + HEADS * ROWS * widths[0]
    codes, scales = (
        arena.as_strided((RECORDS, HEADS, ROWS, width), (record, ROWS * width, width, 1), offset)
        for width, offset in zip(widths, offsets, strict=True)
    )
    exponents = arena.as_strided((RECORDS, HEADS, 1, 0), (record, 1, 1, 1))
    return ops.SideView(fmt, head_size, codes, scales, exponents), arena


PLACES = {
    "one row": ([2], [3]),
    "records in reverse, the last one partial": (
        [4, 4, 4, 4, 3, 3, 3, 3, 1, 1],
        [*range(4)] * 2 + [0, 1],
    ),
    "rows of the step in any order": ([1, 0, 4, 1, 0], [3, 0, 2, 0, 3]),
    "negative records": ([-1, 2, -1, 0, -7], [0, 1, 2, 3, 0]),
    "no rows": ([], []),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("name", "head_size"),
    [
        *((name, 64) for name in NAMES),
        *((name, 96) for name in GGML_NAMES),
        *((name, size) for name in ("f32", "f16", "bf16", "fp8") for size in (3, 80, 100)),
    ],
)
def test_an_arena_holds_the_bytes_that_torch_puts_there_and_no_others(
    codec, name, head_size, places
):
    records, rows = (torch.tensor(column, dtype=torch.int64) for column in PLACES[places])
    side, arena = arena_side(name, head_size)
    expected_side, expected_arena = arena_side(name, head_size)
    generator = torch.Generator().manual_seed(9)
    # K of a fused projection: tokens and heads lie apart, heads before tokens.
    fused = torch.randn(HEADS + 1, len(records) + 1, head_size + 3, generator=generator)
    values = fused[1:, 1:, :head_size].transpose(0, 1)
    codec.append(side.format, side.codes, side.scales, records, rows, values)
    kept = records >= 0
    codes, scales = encode(side.format, values[kept])
    expected_side.codes[records[kept], :, rows[kept]] = codes
    if scales.shape[-1]:
        expected_side.scales[records[kept], :, rows[kept]] = scales
    assert torch.equal(arena, expected_arena)
    wanted = torch.tensor([4, 0, 1, 1, 4, 2])
    shape = HEADS, len(wanted) * ROWS, head_size
    for dtype in TYPE_IDS:
        memory = torch.full((math.prod(shape) + 64,), -7.0, dtype=dtype)
        found = memory[:-64].view(shape)
        arguments = side.format, head_size, side.codes, side.scales, wanted, dtype
        codec.gather(*arguments, out=found)
        assert memory[-64:].eq(-7.0).all()
        codes, scales = (part[wanted].transpose(0, 1) for part in (side.codes, side.scales))
        assert_same(found, decode(side.format, codes, scales, head_size, dtype).flatten(1, 2))


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q5_1"])
def test_rows_with_gaps_between_them_are_gathered_row_by_row(codec, name):
    fmt = parse_format(name)
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    codes, scales = (
        torch.nn.functional.pad(part, (0, 5)).reshape(2, 1, 3, -1)[..., : part.shape[-1]]
        for part in encode(fmt, rows)
    )
    found = codec.gather(fmt, 64, codes, scales, torch.tensor([1, 0]), torch.float32)
    assert torch.equal(
        found[0], decode(fmt, *encode(fmt, rows), 64, torch.float32)[[3, 4, 5, 0, 1, 2]]
    )


@pytest.mark.parametrize("name", ["f32", "q8_0", "q5_1"])
def test_records_beyond_two_gibibytes_are_found(codec, name):
    fmt, far = parse_format(name), (1 << 30) + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    arena = torch.frombuffer(mmap.mmap(-1, 4 * far, flags=flags), dtype=torch.uint8)
    widths = fmt.code_row_bytes(64), fmt.scale_row_bytes(64)
    codes, scales = (
        arena.as_strided((4, 1, 2, width), (far, 2 * width, width, 1), offset)
        for width, offset in zip(widths, (0, 1 << 20), strict=True)
    )
    rows = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(4))
    records = torch.tensor([3, 2, 3, 0])
    codec.append(fmt, codes, scales, records, torch.tensor([1, 0, 0, 1]), rows)
    expected = encode(fmt, rows[:, 0])
    assert torch.equal(codes[3, 0], expected[0][[2, 0]])
    assert torch.equal(scales[3, 0], expected[1][[2, 0]])
    found = codec.gather(fmt, 64, codes, scales, torch.tensor([3, 2]), torch.float32)[0]
    assert torch.equal(found[:3], decode(fmt, *expected, 64, torch.float32)[[2, 0, 1]])


def test_places_that_are_not_there_are_refused_and_nothing_is_written(codec):
    side, arena = arena_side("q8_0", 64)
    before = arena.clone()
    values = torch.ones(2, HEADS, 64)
    for records, rows in (([0, RECORDS], [0, 0]), ([0, 0], [0, ROWS]), ([0, 0], [0, -1])):
        with pytest.raises(InternalError, match=r"outside \[0, 5\) or \[0, 4\)"):
            codec.append(
                side.format,
                side.codes,
                side.scales,
                torch.tensor(records),
                torch.tensor(rows),
                values,
            )
    for records in ([RECORDS], [-1]):
        with pytest.raises(InternalError, match=r"outside \[0, 5\)"):
            codec.gather(
                side.format, 64, side.codes, side.scales, torch.tensor(records), torch.float32
            )
    with pytest.raises(InternalError, match="1 records, 2 rows"):
        codec.append(
            side.format, side.codes, side.scales, torch.tensor([0]), torch.tensor([0, 1]), values
        )
    with pytest.raises(InternalError, match=r"rows of 32 elements of q8_0 are 32 \+ 2 bytes"):
        codec.gather(side.format, 32, side.codes, side.scales, torch.tensor([0]), torch.float32)
    assert torch.equal(arena, before)


def test_rows_are_unpacked_into_memory_that_is_there(codec):
    side, _ = arena_side("q4_0", 64)
    out = torch.empty(HEADS, 2 * ROWS, 64)
    which = torch.tensor([1, 0])
    arguments = side.format, 64, side.codes, side.scales, which, torch.float32
    assert codec.gather(*arguments, out=out) is out
    assert_same(out, codec.gather(*arguments))
    with pytest.raises(InternalError, match=r"out is no dense \[3, 8, 64\]"):
        codec.gather(*arguments, out=out[:, :4])


def test_the_cache_uses_the_kernels_once_they_are_loaded():
    if host_kernels.load() is None:
        pytest.skip(host_kernels.status().found)
    side, _ = arena_side("q5_1", 64)
    values = torch.randn(1, HEADS, 64, generator=torch.Generator().manual_seed(5))
    ops.append(side, torch.tensor([2]), torch.tensor([3]), values)
    assert torch.equal(side.codes[2, :, 3], encode(side.format, values)[0][0])
    with pytest.raises(InternalError, match="append: a record"):
        ops.append(side, torch.tensor([RECORDS]), torch.tensor([0]), values)
    assert ops.gather(side, torch.tensor([2]), torch.bfloat16).shape == (HEADS, ROWS, 64)
    assert not HostCodec.covers(side.format, side.codes.to("meta"), torch.float32)
    assert not HostCodec.covers(side.format, side.codes, torch.float64)
