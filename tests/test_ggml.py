"""The five shared formats have ggml's own bytes, NaN and all; runs where ``llama_cpp`` is installed."""

import math

import pytest
import torch

from memkv_pp.bench import ggml
from memkv_pp.cache import host_kernels
from memkv_pp.cache.codec import decode, encode
from memkv_pp.errors import InternalError
from memkv_pp.formats import parse_format
from memkv_pp.packing import pack_group, to_ggml_block

INF, NAN = math.inf, math.nan
RAMP = [float(j - 10) for j in range(32)]
SHAPES = {
    "ramp": RAMP,
    "the other way": [-x for x in RAMP],
    "ties of the largest magnitude": [3.0, -3.0] * 16,
    "halves": [127.0, 0.49999997, -0.49999997, *(j / 2 for j in range(-14, 15))],
    "falling by powers": [x * 10.0 ** (9 - 9 * (j // 8)) for j, x in enumerate(RAMP)],
    "zero": [0.0] * 32,
    "negative zero": [-0.0] * 32,
    "zeros of both signs": [-0.0, 0.0, 1.0, 2.0] * 8,
    "constant": [0.7] * 32,
    "negative constant": [-3.25] * 32,
    "least denormal": [j * 1e-45 for j in range(32)],
    "denormal": [x * 1e-41 for x in RAMP],
    "denormal in f16": [x * 1e-7 for x in RAMP],
    "huge": [x * 2e36 for x in RAMP],
    "sum overflows": [3e38, -3e38] * 16,
    "one infinity": [INF, *RAMP[1:]],
    "both infinities": [INF, -INF, *RAMP[2:]],
    "nothing but infinity": [INF] * 32,
    "nothing but negative infinity": [-INF] * 32,
}
NAN_PLACES = ((), (0,), (5,), (20,), (31,), (0, 31), range(1, 32), range(31), range(32))


@pytest.fixture(scope="module")
def library():
    found = ggml.find()
    if found is None:
        pytest.skip("llama_cpp is not installed, which brings ggml")
    return found


@pytest.fixture(scope="module")
def groups():
    """f32 [groups, 32]: every shape with NaN in every place, then ordinary rows of all magnitudes."""
    odd = [
        [NAN if j in places else x for j, x in enumerate(shape)]
        for shape in SHAPES.values()
        for places in NAN_PLACES
    ]
    generator = torch.Generator().manual_seed(4)
    powers = 10.0 ** torch.arange(-44, 39, dtype=torch.float64).repeat(8)[:, None]
    random = torch.randn(len(powers), 32, generator=generator, dtype=torch.float64) * powers
    return torch.cat([torch.tensor(odd), random.float()])


def block_bytes(fmt, codes, scales):
    return to_ggml_block(fmt, bytes(codes), bytes(scales))


def packed_by_the_kernels(fmt, groups):
    """codes and scales [groups, bytes], a record of one row for each."""
    kernels = host_kernels.load()
    if kernels is None:
        pytest.skip(host_kernels.status().found)
    count = len(groups)
    codes = torch.zeros(count, 1, 1, fmt.code_bytes, dtype=torch.uint8)
    scales = torch.zeros(count, 1, 1, fmt.scale_bytes, dtype=torch.uint8)
    rows = torch.zeros(count, dtype=torch.int64)
    kernels.codec.append(fmt, codes, scales, torch.arange(count), rows, groups[:, None])
    return codes.flatten(1), scales.flatten(1)


@pytest.mark.parametrize("name", ggml.TYPES)
def test_truth_and_torch_and_kernels_have_the_bytes_of_ggml(library, groups, name):
    fmt = parse_format(name)
    blocks = torch.zeros(len(groups), fmt.group_bytes, dtype=torch.uint8)
    library.quantise_chunk(fmt, groups, blocks)
    torch_pairs = zip(*(part.tolist() for part in encode(fmt, groups)), strict=True)
    kernel_pairs = zip(*(p.tolist() for p in packed_by_the_kernels(fmt, groups)), strict=True)
    for group, block, by_torch, by_kernel in zip(
        groups.tolist(), blocks.tolist(), torch_pairs, kernel_pairs, strict=True
    ):
        expected = bytes(block)
        assert to_ggml_block(fmt, *pack_group(fmt, group)) == expected, group
        assert block_bytes(fmt, *by_torch) == expected, group
        assert block_bytes(fmt, *by_kernel) == expected, group


@pytest.mark.parametrize("name", ggml.TYPES)
def test_ggml_and_torch_unpack_the_same_numbers(library, groups, name):
    fmt = parse_format(name)
    codes, scales = encode(fmt, groups)
    blocks = torch.tensor(
        [
            list(block_bytes(fmt, c, s))
            for c, s in zip(codes.tolist(), scales.tolist(), strict=True)
        ],
        dtype=torch.uint8,
    )
    found = torch.zeros_like(groups)
    library.dequantise(fmt, blocks, found)
    expected = decode(fmt, codes, scales, 32, torch.float32)
    assert torch.equal(found.isnan(), expected.isnan())
    where = ~expected.isnan()
    assert torch.equal(found[where].view(torch.int32), expected[where].view(torch.int32))


def test_the_vector_path_of_ggml_differs_by_one_code_in_few_places(library):
    fmt = parse_format("q8_0")
    values = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))
    blocks = [torch.zeros(len(values), fmt.group_bytes, dtype=torch.uint8) for _ in range(2)]
    library.quantise_chunk(fmt, values, blocks[0])
    library.quantise_vectors(fmt, values, blocks[1])
    difference = (blocks[0][:, 2:].view(torch.int8).int() - blocks[1][:, 2:].view(torch.int8)).abs()
    assert difference.max() <= 1
    assert difference.count_nonzero() <= 100


def test_values_that_are_no_whole_groups_are_refused(library):
    values, blocks = torch.zeros(40), torch.zeros(34, dtype=torch.uint8)
    with pytest.raises(InternalError, match="40 values"):
        library.quantise_chunk(parse_format("q8_0"), values, blocks)
