"""The tensor codec has the bytes of the plain-Python truth, hence ggml's."""

import math

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.packing_groups import exponent_bytes
from memkv_pp.errors import FormatError
from memkv_pp.formats import FORMATS, parse_format
from memkv_pp.packing import pack_group, unpack_group
from memkv_pp.packing_groups import exponent_byte

GGML_NAMES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
SIXTEENS = tuple(name for name, fmt in FORMATS.items() if fmt.group == 16)
INF = math.inf


def adversarial_rows():
    """[rows, 64] f32: ordinary rows of many magnitudes, then the odd ones."""
    generator = torch.Generator().manual_seed(3)
    powers = 10.0 ** torch.arange(-44, 39, 4, dtype=torch.float64)
    random = torch.randn(len(powers), 64, generator=generator, dtype=torch.float64)
    ramp = torch.arange(-32, 32, dtype=torch.float64)
    odd = [ramp * step for step in (0.5, 1e-45, 1e-41, 3e-39, 1e-7, 1e6, 2e36)]
    # A step half-way between two f16 numbers: times a rounded 1 / 15 it lands on the wrong side.
    step = 1 + (2 * 146 + 1) / 2048
    odd.append(torch.zeros(64).index_fill(0, torch.tensor([9, 41]), 15 * step))
    odd.append(torch.tensor([127.0, *(j / 2 for j in range(-31, 32))]))
    odd += [torch.full((64,), value) for value in (0.0, -0.0, 0.7, -3.25, 3e38, INF, -INF)]
    odd += [
        torch.tensor(pattern * 32)
        for pattern in (
            [3.0, -3.0],
            [0.0, -0.0],
            [-0.0, 0.0],
            [3e38, -3e38],
            [INF, 1.0],
            [-INF, 1.0],
        )
    ]
    # One whose sum of squares tells the order of summation (see test_packing_groups.py).
    odd.append(torch.tensor([
        1.21186566, -0.547150135, -2.0968411, -1.17225707, -0.093301788, -0.824736595, -0.323974967,
        1.53224158, -0.323843807, -0.693662822, 0.00229988992, 1.27801585, 1.80267668, 0.706810534,
        -0.336102813, -0.512622535,
    ]).repeat(4))  # fmt: skip
    odd += list(torch.zeros(4, 64).copysign(torch.randn(4, 64, generator=generator)))
    odd += [torch.tensor(([-0.0, 0.0, 1.0, 2.0], [0.0, -0.0, -1.0, -2.0])[i] * 16) for i in (0, 1)]
    return torch.cat([(random * powers[:, None]).float(), torch.stack([o.float() for o in odd])])


def rows_with_nan():
    rows = torch.linspace(-4, 4, 64).repeat(3, 1)
    rows[0, 5] = math.nan
    rows[1, 40] = -math.nan
    rows[2] = math.nan
    return rows


def truth(fmt, row, scale=1.0, exponent=127, *, clip_search=False):
    """(codes, scales, f32 values) of a row, group by group."""
    groups = [row[i : i + fmt.group] for i in range(0, len(row), fmt.group)]
    said = {"scale": scale, "exponent": exponent}
    packed = [pack_group(fmt, group, **said, clip_search=clip_search) for group in groups]
    values = [x for c, s in packed for x in unpack_group(fmt, c, s, **said)]
    return b"".join(c for c, _ in packed), b"".join(s for _, s in packed), values


def assert_same_f32(found, expected):
    """Bit for bit, but one NaN is as good as another."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(
        found.nan_to_num(nan=0.0).view(torch.int32), expected.nan_to_num(nan=0.0).view(torch.int32)
    )


@pytest.mark.parametrize("scale", [1.0, 0.037])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_have_the_bytes_and_the_values_of_their_groups(name, scale):
    fmt = parse_format(name)
    rows = torch.cat([adversarial_rows(), rows_with_nan()])
    if name == "f32":
        # A row already in f32 is a view: its NaN is whatever it was.
        rows = adversarial_rows()
    codes, scales = encode(fmt, rows, scale)
    assert codes.shape == (len(rows), fmt.code_row_bytes(64))
    assert scales.shape == (len(rows), fmt.scale_row_bytes(64))
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    values = decode(fmt, codes, scales, 64, torch.float32, scale)
    for index, row in enumerate(rows.tolist()):
        expected_codes, expected_scales, expected_values = truth(fmt, row, scale)
        assert bytes(codes[index].tolist()) == expected_codes, row
        assert bytes(scales[index].tolist()) == expected_scales, row
        assert_same_f32(values[index], torch.tensor(expected_values))


def levels_and_boundaries_rows():
    """[rows, 64]: groups whose elements lie on, or just beside, the boundaries of the codes."""
    rows = []
    for top, inner in ((2.7326, 0.2582), (2.152, 0.501), (1.5104, 0.9816), (6.0, 0.25)):
        edges = torch.tensor([inner, top / 2, 1.05, 1.748, 1.25, 2.5, 5.0, 0.75]) / (8 / top)
        edges = torch.cat([edges, -edges.nextafter(torch.zeros(8))])
        for scale in (1.0, 2.0**-7, 3e-3, 1e-4, 2.0**9, 300.0):
            group = edges.clone() * scale
            group[3] = top * scale
            rows.append(group.repeat(4))
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("name", SIXTEENS)
def test_groups_of_sixteen_have_the_bytes_of_the_truth_at_any_exponent(name, clip_search):
    fmt = parse_format(name)
    generator = torch.Generator().manual_seed(8)
    spread = 10.0 ** torch.linspace(-9, 6, 31)[:, None]
    rows = torch.cat(
        [
            torch.randn(31, 64, generator=generator) * spread,
            torch.randn(20, 64, generator=generator),
            levels_and_boundaries_rows(),
            adversarial_rows(),
            rows_with_nan(),
        ]
    )
    exponents = exponent_bytes(rows)
    if not fmt.exponent:
        assert (exponents != 127).any()
    # Own, fixed, and that of another row: small rows under large exponents and the reverse.
    for bytes_of_rows in (exponents, torch.full_like(exponents, 131), exponents.flip(0)):
        codes, scales = encode(fmt, rows, exponents=bytes_of_rows, clip_search=clip_search)
        values = decode(fmt, codes, scales, 64, torch.float32, exponents=bytes_of_rows)
        for index, row in enumerate(rows.tolist()):
            exponent = int(bytes_of_rows[index])
            expected = truth(fmt, row, exponent=exponent, clip_search=clip_search)
            assert bytes(codes[index].tolist()) == expected[0], row
            assert bytes(scales[index].tolist()) == expected[1], row
            assert_same_f32(values[index], torch.tensor(expected[2]))


def test_exponent_bytes_are_those_of_the_truth():
    rows = torch.cat(
        [adversarial_rows(), rows_with_nan(), torch.tensor([[4.0], [7.99], [8.0]]).repeat(1, 64)]
    )
    assert exponent_bytes(rows).tolist() == [exponent_byte(row) for row in rows.tolist()]


@pytest.mark.parametrize("name", ["nvfp4e", "turbo3e"])
def test_exponents_are_shared_by_the_rows_they_broadcast_to(name):
    fmt = parse_format(name)
    rows = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(9)) / 300
    exponents = exponent_bytes(rows[:, :1])
    assert exponents.shape == (2, 1)
    shared = encode(fmt, rows, exponents=exponents)
    apart = encode(fmt, rows, exponents=exponents.expand(2, 5))
    assert all(map(torch.equal, shared, apart))
    assert not torch.equal(shared[1], encode(fmt, rows)[1])
    found = decode(fmt, *shared, 64, torch.float32, exponents=exponents)
    assert (found - rows).abs().max() < 0.0035


@pytest.mark.parametrize("name", GGML_NAMES)
def test_rows_have_the_bytes_and_the_values_of_gguf(name):
    fmt = parse_format(name)
    qtype = gguf.GGMLQuantizationType[name.upper()]
    rows = torch.cat(
        [torch.randn(4000, 64, generator=torch.Generator().manual_seed(1)), adversarial_rows()]
    )
    rows = rows + 0.0  # numpy does not say which of two zeros of unlike sign is the minimum
    rows = rows[~rows.isinf().all(-1)]  # where gguf differs from ggml
    with np.errstate(all="ignore"):
        blocks = quantize(rows.numpy(), qtype)
        values = torch.from_numpy(dequantize(blocks, qtype))
    codes, scales = encode(fmt, rows)
    codes, scales = codes.unflatten(-1, (2, -1)), scales.unflatten(-1, (2, -1))
    fifth_bits, rest = (
        (codes[..., 16:], codes[..., :16]) if name[1] == "5" else (codes, codes[..., :0])
    )
    ours = torch.cat([scales, fifth_bits, rest], -1)
    assert np.array_equal(ours.flatten(-2).numpy(), blocks)
    assert_same_f32(decode(fmt, codes.flatten(-2), scales.flatten(-2), 64, torch.float32), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_half_rows_are_packed_from_f32_and_come_back_rounded_once(name, dtype):
    fmt = parse_format(name)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    codes, scales = encode(fmt, rows)
    from_f32 = encode(fmt, rows.float())
    assert torch.equal(codes, from_f32[0])
    assert torch.equal(scales, from_f32[1])
    found = decode(fmt, codes, scales, 64, dtype)
    assert found.dtype is dtype
    assert torch.equal(found, decode(fmt, codes, scales, 64, torch.float32).to(dtype))


def test_every_e4m3_byte_decodes_to_its_number():
    fmt = parse_format("fp8")
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([unpack_group(fmt, bytes([c]), b"")[0] for c in range(256)])
    found = decode(fmt, codes, codes.new_empty(0), 256, torch.float32)
    assert_same_f32(found, expected)


def test_every_bf16_number_and_its_neighbours_round_to_the_right_e4m3_byte():
    fmt = parse_format("fp8")
    bits = torch.arange(0x3A00, 0x4400, dtype=torch.int32) << 16
    values = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    values = torch.cat([values, -values])
    codes, _ = encode(fmt, values)
    assert bytes(codes.tolist()) == b"".join(pack_group(fmt, [x])[0] for x in values.tolist())


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_rows_are_views_both_ways(name):
    fmt = parse_format(name)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
    rows = torch.ones(2, 3, 8, dtype=dtype)
    codes, scales = encode(fmt, rows)
    assert codes.data_ptr() == rows.data_ptr()
    assert scales.shape == (2, 3, 0)
    assert decode(fmt, codes, scales, 8, dtype).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_slices_of_an_arena_decode_as_contiguous_rows(name, offset):
    fmt = parse_format(name)
    rows = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(4))
    codes, scales = encode(fmt, rows)
    width = fmt.row_bytes(64)
    arena = torch.full((offset + 2 * 4 * width + 32,), 0xFF, dtype=torch.uint8)
    body = arena[offset : offset + 2 * 4 * width].unflatten(0, (2, 4, width))
    body[..., : codes.shape[-1]] = codes
    body[..., codes.shape[-1] :] = scales
    found = decode(
        fmt, body[..., : codes.shape[-1]], body[..., codes.shape[-1] :], 64, torch.float32
    )
    assert torch.equal(found, decode(fmt, codes, scales, 64, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_leaves_the_cache_as_it_was(name):
    fmt = parse_format(name)
    codes, scales = encode(fmt, torch.randn(3, 64, generator=torch.Generator().manual_seed(5)))
    before = codes.clone(), scales.clone()
    decode(fmt, codes, scales, 64, torch.bfloat16)
    assert torch.equal(codes, before[0])
    assert torch.equal(scales, before[1])


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_leaves_the_rows_as_they_were(name):
    rows = torch.cat([adversarial_rows(), rows_with_nan()])
    before = rows.clone()
    encode(parse_format(name), rows)
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_are_no_bytes_and_transposed_rows_are_packed_in_their_order(name):
    fmt = parse_format(name)
    codes, scales = encode(fmt, torch.empty(2, 0, 64))
    assert codes.shape == (2, 0, fmt.code_row_bytes(64))
    assert scales.shape == (2, 0, fmt.scale_row_bytes(64))
    assert decode(fmt, codes, scales, 64, torch.float32).shape == (2, 0, 64)
    rows = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(6))
    turned = encode(fmt, rows.transpose(0, 1))
    straight = encode(fmt, rows.transpose(0, 1).contiguous())
    assert torch.equal(turned[0], straight[0])
    assert torch.equal(turned[1], straight[1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_may_have_any_strides(name, count):
    fmt = parse_format(name)
    size = {1: 1, 32: 32, 16: 64 if fmt.rotated else 16}[fmt.group]
    generator = torch.Generator().manual_seed(6)
    dense = torch.randn(count, 2, size, generator=generator)
    expected = encode(fmt, dense)
    # Where a dimension has one element or none, torch calls any strides contiguous.
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        back = [order.index(i) for i in range(3)]
        turned = dense.permute(order).contiguous().permute(back)
        for rows, wanted in ((turned, expected), (turned[:, :1], [x[:, :1] for x in expected])):
            codes, scales = encode(fmt, rows)
            assert torch.equal(codes, wanted[0])
            assert torch.equal(scales, wanted[1])


def test_heads_and_rows_of_the_wrong_length_are_refused():
    fmt = parse_format("q8_0")
    with pytest.raises(FormatError, match="q8_0 cannot hold a head size of 80"):
        encode(fmt, torch.zeros(1, 80))
    codes, scales = encode(fmt, torch.zeros(1, 64))
    with pytest.raises(FormatError, match=r"128 \+ 8 bytes, got 64 \+ 4"):
        decode(fmt, codes, scales, 128, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_makes_the_same_bytes_and_values(name):
    fmt = parse_format(name)
    rows = adversarial_rows()
    codes, scales = encode(fmt, rows, 0.037)
    on_gpu = encode(fmt, rows.cuda(), 0.037)
    assert torch.equal(codes, on_gpu[0].cpu())
    assert torch.equal(scales, on_gpu[1].cpu())
    found = decode(fmt, *on_gpu, 64, torch.float32, 0.037).cpu()
    assert_same_f32(found, decode(fmt, codes, scales, 64, torch.float32, 0.037))
