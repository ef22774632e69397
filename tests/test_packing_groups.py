"""The truth of groups of sixteen: codebooks, bit orders and scale rules, by hand."""

import math
import struct
from itertools import pairwise
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import FormatError
from memkv_pp.formats import FORMATS, parse_format
from memkv_pp.packing import pack_group, unpack_group
from memkv_pp.packing_groups import (
    E2M1_BOUNDARIES,
    E2M1_LEVELS,
    TURBO_BOUNDARIES,
    TURBO_LEVELS,
    exponent_byte,
)
from memkv_pp.small_floats import bf16_value, e4m3_code, e4m3_value, to_f32

INF = math.inf
SIXTEENS = tuple(name for name, fmt in FORMATS.items() if fmt.group == 16)
CODEBOOKS = ("turbo4", "turbo3", "turbo2")
ONE = 0x38  # 1.0 as E4M3

finite_groups = st.lists(
    st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=16, max_size=16
)


def pack(name, values, **options):
    return pack_group(parse_format(name), values, **options)


def unpack(name, codes, scales, **options):
    return unpack_group(parse_format(name), codes, scales, **options)


def packed_and_back(name, values, **options):
    exponent = {"exponent": options["exponent"]} if "exponent" in options else {}
    return unpack(name, *pack(name, values, **options), **exponent)


def squared_error(name, values, **options):
    found = packed_and_back(name, values, **options)
    return sum((x - y) ** 2 for x, y in zip(values, found, strict=True))


def norm(values):
    return math.sqrt(sum(x * x for x in values))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_ascend_and_are_symmetric_with_boundaries_half_way(name):
    levels, boundaries = TURBO_LEVELS[name], TURBO_BOUNDARIES[name]
    assert list(levels) == sorted(set(levels))
    assert len(boundaries) == len(levels) - 1
    assert levels == tuple(-x for x in reversed(levels))
    assert boundaries == tuple(0.0 - x for x in reversed(boundaries))
    for (low, high), between in zip(pairwise(levels), boundaries, strict=True):
        assert between == pytest.approx((low + high) / 2, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "off", "error"),
    [("turbo4", 6e-5, 0.0095), ("turbo3", 2e-4, 0.0345), ("turbo2", 6e-5, 0.1175)],
)
def test_lloyd_and_max_find_the_same_levels(name, off, error):
    normal = NormalDist()
    levels, distortion = list(TURBO_LEVELS[name]), 1.0
    for _ in range(500):
        edges = [-INF, *((a + b) / 2 for a, b in pairwise(levels)), INF]
        mass = [normal.cdf(b) - normal.cdf(a) for a, b in pairwise(edges)]
        moment = [normal.pdf(a) - normal.pdf(b) for a, b in pairwise(edges)]
        levels = [m / p for m, p in zip(moment, mass, strict=True)]
        distortion = 1 - sum(level * m for level, m in zip(levels, moment, strict=True))
    assert list(TURBO_LEVELS[name]) == pytest.approx(levels, abs=off)
    assert distortion == pytest.approx(error, abs=5e-5)


def test_e2m1_rounds_to_nearest_and_ties_to_the_even_code():
    for code, boundary in enumerate(E2M1_BOUNDARIES):
        middle = (E2M1_LEVELS[code] + E2M1_LEVELS[code + 1]) / 2
        goes_up = code % 2 == 1
        assert (boundary == middle) is goes_up
        below = struct.unpack("<I", struct.pack("<f", boundary))[0] - 1
        assert struct.unpack("<f", struct.pack("<I", below))[0] <= middle <= boundary


def test_nvfp4_has_sign_and_magnitude_nibbles_with_the_even_element_low():
    codes, scales = pack("nvfp4", [*E2M1_LEVELS, *(-x for x in E2M1_LEVELS)])
    assert (codes, scales) == (bytes.fromhex("1032547698badcfe"), bytes([ONE]))
    assert math.copysign(1, unpack("nvfp4", codes, scales)[8]) == -1


def test_nvfp4_rounds_at_its_thresholds():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    above = [x * (1 + 2**-20) for x in ties[:7]]
    found = packed_and_back("nvfp4", [*ties, *above, -0.75])
    assert found[:8] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert found[8:] == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -1.0]


def test_nvfp4_divides_by_the_scale_as_it_is_stored():
    # amax / 6 = 1.09 is stored as 1.125: 0.8 / 1.125 is below 0.75, 0.8 / 1.09 above it is not.
    values = [6.54, 0.83] + [0.0] * 14
    codes, scales = pack("nvfp4", values)
    assert e4m3_value(scales[0]) == 1.125
    assert codes[0] == 0x17
    assert 0.83 / 1.09 > 0.75 > 0.83 / 1.125


def test_nvfp4_whose_scale_is_stored_as_zero_has_no_codes():
    small = 6 * 2**-10
    assert pack("nvfp4", [-small] * 16) == (bytes(8), b"\0")
    assert pack("nvfp4", [-1.01 * small] * 16) == (b"\xdd" * 8, b"\x01")


def test_turbo4_has_ascending_codes_in_nibbles_with_the_even_element_low():
    assert pack("turbo4", TURBO_LEVELS["turbo4"]) == (
        bytes.fromhex("1032547698badcfe"),
        bytes([ONE]),
    )


def test_turbo3_has_eight_codes_in_three_little_endian_bytes():
    levels = TURBO_LEVELS["turbo3"]
    assert pack("turbo3", [*levels, *reversed(levels)]) == (
        (0b111_110_101_100_011_010_001_000).to_bytes(3, "little")
        + (0b000_001_010_011_100_101_110_111).to_bytes(3, "little"),
        bytes([ONE]),
    )


def test_turbo2_has_four_codes_in_a_byte_with_the_first_lowest():
    levels = TURBO_LEVELS["turbo2"]
    codes, scales = pack("turbo2", [*levels, *reversed(levels), *levels, *levels])
    assert codes == bytes([0b11_10_01_00, 0b00_01_10_11, 0b11_10_01_00, 0b11_10_01_00])
    assert scales == bytes([ONE])


@pytest.mark.parametrize("name", CODEBOOKS)
def test_a_value_on_a_boundary_takes_the_upper_code(name):
    top = TURBO_LEVELS[name][-1]
    edges = TURBO_BOUNDARIES[name]
    values = [top, *edges, *[top] * (15 - len(edges))]
    found = packed_and_back(name, values)
    scale = found[0] / top
    expected = [level * scale for level in TURBO_LEVELS[name][1:]]
    assert found[1 : 1 + len(edges)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@given(finite_groups)
def test_the_scale_of_a_codebook_keeps_the_norm_of_the_group(values):
    for name in CODEBOOKS:
        codes, scales = pack(name, values)
        found = unpack(name, codes, bytes([ONE]))
        wanted = norm(values) / norm(found)
        # The sums are f32, so a scale between two E4M3 numbers may fall to either.
        nearest = {e4m3_code(wanted * (1 + slip)) for slip in (-1e-6, 0, 1e-6)}
        assert scales[0] in nearest
        if 2**-6 <= wanted <= 448:
            kept = norm(unpack(name, codes, scales))
            assert kept == pytest.approx(norm(values), rel=1 / 16 + 1e-5)


# A group whose scale is 0x34 by halves, and 0x35 where the squares are summed exactly, one after
# another from either end, or neighbour with neighbour.
ORDER_GROUP = (
    1.21186566, -0.547150135, -2.0968411, -1.17225707, -0.093301788, -0.824736595, -0.323974967,
    1.53224158, -0.323843807, -0.693662822, 0.00229988992, 1.27801585, 1.80267668, 0.706810534,
    -0.336102813, -0.512622535,
)  # fmt: skip


def test_sums_of_sixteen_are_taken_by_halves():
    codes, scales = pack("turbo4", ORDER_GROUP)
    assert (codes.hex(), scales.hex()) == ("5d2047e646d8be56", "34")


def test_turbo8_keeps_a_bf16_scale_and_e4m3_bytes_over_it():
    values = [448.0, -448.0, 224.0, 1.0, -0.0, 2**-9, 3 * 2**-10, 0.0] * 2
    codes, scales = pack("turbo8", values)
    assert scales == b"\x80\x3f"
    assert codes[:8] == bytes([0x7E, 0xFE, 0x76, 0x38, 0x80, 0x01, 0x02, 0x00])
    # 452 / 448 is nearer to 1.0078125, 449 / 448 to 1: there 449 is cut off at 448.
    assert pack("turbo8", [452.0] * 16)[1] == b"\x81\x3f"
    assert packed_and_back("turbo8", [449.0] * 16) == [448.0] * 16


def test_turbo8_divides_by_the_scale_as_it_is_stored():
    # 452 / 448 = 1.0089 is stored as 1.0078: 1.45 over the one is nearer to 1.375, over the other
    # to 1.5.
    codes, scales = pack("turbo8", [452.0, 1.45] + [0.0] * 14)
    assert scales == b"\x81\x3f"
    assert codes[1] == 0x3C


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("name", SIXTEENS)
def test_a_zero_group_comes_back_as_zeros(name, zero):
    codes, scales = pack(name, [zero] * 16)
    assert unpack(name, codes, scales) == [0.0] * 16
    if parse_format(name).scale_bytes == 1:
        assert scales == b"\0"
    else:
        assert bf16_value(int.from_bytes(scales, "little")) == pytest.approx(1e-12, rel=2**-8)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_groups_below_a_trillionth_take_codes_at_their_own_size_and_scale_zero(name):
    highest = len(TURBO_LEVELS[name]) // 2
    tiny = [1e-13, -1e-13] * 8
    bits = 8 * parse_format(name).code_bytes // 16
    word = sum((highest if i % 2 == 0 else highest - 1) << bits * i for i in range(16))
    assert pack(name, tiny) == (word.to_bytes(2 * bits, "little"), b"\0")


@pytest.mark.parametrize("name", [n for n in SIXTEENS if "turbo8" not in n])
def test_scales_are_cut_off_at_448_and_so_are_elements(name):
    codes, scales = pack(name, [1e6, -1e6] * 8)
    assert scales == b"\x7e"
    highest = 6.0 if name.startswith("nvfp4") else TURBO_LEVELS[name.removesuffix("e")][-1]
    assert unpack(name, codes, scales)[:2] == [to_f32(448 * highest), -to_f32(448 * highest)]
    assert pack(name, [3e38, -3e38] * 8) == (codes, scales)


@pytest.mark.parametrize("odd", [INF, -INF, math.nan, -math.nan])
@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("name", SIXTEENS)
def test_one_infinity_or_nan_makes_the_whole_group_nan(name, odd, clip_search):
    fmt = parse_format(name)
    codes, scales = pack(name, [1.0] * 7 + [odd] + [-2.0] * 8, clip_search=clip_search)
    assert codes == bytes(fmt.code_bytes)
    assert scales == (b"\xc0\x7f" if fmt.scale_bytes == 2 else b"\x7f")
    assert all(map(math.isnan, unpack(name, codes, scales)))


@pytest.mark.parametrize(
    ("row", "byte"),
    [([4.0], 127), ([7.99], 127), ([8.0], 128), ([-8.0, 1.0], 128), ([1.0], 125), ([0.002], 116),
     ([1e-45], 1), ([2.0**-124], 1), ([2.0**-123], 2), ([3.4e38], 252), ([0.0, -0.0], 127),
     ([INF], 127), ([1.0, math.nan], 127)],
)  # fmt: skip
def test_the_first_row_of_a_record_sets_a_power_of_two_that_brings_it_to_four(row, byte):
    assert exponent_byte(row) == byte


@pytest.mark.slow
@given(finite_groups)
def test_an_exponent_packs_the_quotient_and_multiplies_back(values):
    for name in SIXTEENS:
        if not parse_format(name).exponent:
            continue
        bare = name.removesuffix("e")
        for byte in (117, 127, 137):
            power = math.ldexp(1.0, byte - 127)
            codes, scales = pack(name, values, exponent=byte)
            assert (codes, scales) == pack(bare, [x / power for x in values])
            found = unpack(name, codes, scales, exponent=byte)
            assert found == [x * power for x in unpack(bare, codes, scales)]


def test_formats_without_exponents_ignore_them_and_others_refuse_what_no_row_sets():
    values = [0.001 * j for j in range(16)]
    assert pack("turbo4", values, exponent=99) == pack("turbo4", values)
    assert pack("turbo4e", values, exponent=99) != pack("turbo4", values)
    codes, scales = pack("turbo4e", values)
    for byte in (0, 253, 256, -1):
        for call in (
            lambda byte=byte: pack("turbo4e", values, exponent=byte),
            lambda byte=byte: unpack("turbo4e", codes, scales, exponent=byte),
        ):
            with pytest.raises(FormatError, match=f"1 to 252, got {byte}"):
                call()


@pytest.mark.slow
@given(finite_groups)
def test_a_clip_search_never_misses_by_more(values):
    for name in ("nvfp4", *CODEBOOKS):
        searched = squared_error(name, values, clip_search=True)
        assert searched <= squared_error(name, values) * (1 + 1e-5)


def test_a_clip_search_cuts_an_outlier_off_for_the_good_of_the_rest():
    values = [1.0, -1.0] * 7 + [1.0, 3.0]
    usual = squared_error("turbo4", values)
    assert squared_error("turbo4", values, clip_search=True) < 0.3 * usual
    assert pack("turbo8", values, clip_search=True) == pack("turbo8", values)
