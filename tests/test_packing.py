"""The truth of one group, against ggml's published bytes (`gguf.quants`) and by hand."""

import math
import struct

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import assume, given
from hypothesis import strategies as st

from memkv_pp.errors import ConfigError, FormatError
from memkv_pp.formats import FORMATS, parse_format
from memkv_pp.packing import from_ggml_block, pack_group, to_ggml_block, unpack_group
from memkv_pp.small_floats import bf16_bits, e4m3_code, e4m3_value, to_f32

GGML_NAMES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
INF = math.inf


def ramp(step, start=-16):
    return [to_f32((start + j) * step) for j in range(32)]


ROWS = {
    "ramp": ramp(0.125),
    "halves of both parities": [127.0, *(j / 2 for j in range(-15, 16))],
    "ties of the largest magnitude": [3.0, -3.0] * 16,
    "zero": [0.0] * 32,
    "constant": [0.7] * 32,
    "negative constant": [-3.25] * 32,
    "positive only": ramp(0.3, start=5),
    "one outlier": [0.01] * 31 + [-1000.0],
    "least denormal": ramp(1e-45, start=0),
    "denormal": ramp(1e-41),
    "denormal with a finite reciprocal": ramp(3e-39),
    "denormal in f16": ramp(1e-7),
    "large for f16": ramp(1e6),
    "huge": ramp(2e37),
    "sum overflows": [3e38, -3e38] * 16,
    "one infinity": [INF, *ramp(1.0)[1:]],
    "one negative infinity": [*ramp(1.0)[:31], -INF],
    "both infinities": [INF, -INF, *ramp(1.0)[2:]],
}


def ggml_block(name, values):
    with np.errstate(all="ignore"):
        row = np.array([values], dtype=np.float32)
        return quantize(row, gguf.GGMLQuantizationType[name.upper()]).tobytes()


def ggml_values(name, block):
    with np.errstate(all="ignore"):
        data = np.frombuffer(block, dtype=np.uint8)[None]
        return dequantize(data, gguf.GGMLQuantizationType[name.upper()])[0].tolist()


def same(left, right):
    """Equal element by element, signs of zeros included; a NaN equals a NaN."""
    return all(
        (math.isnan(a) and math.isnan(b)) or struct.pack("<f", a) == struct.pack("<f", b)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", GGML_NAMES)
def test_a_group_has_the_bytes_and_the_values_of_its_ggml_block(name, row):
    fmt = parse_format(name)
    block = ggml_block(name, ROWS[row])
    codes, scales = pack_group(fmt, ROWS[row])
    assert (len(codes), len(scales)) == (fmt.code_bytes, fmt.scale_bytes)
    assert to_ggml_block(fmt, codes, scales) == block
    assert from_ggml_block(fmt, block) == (codes, scales)
    assert same(unpack_group(fmt, codes, scales), ggml_values(name, block))


@pytest.mark.parametrize("name", GGML_NAMES)
def test_random_groups_of_every_magnitude_have_the_bytes_of_ggml(name):
    fmt = parse_format(name)
    random = np.random.default_rng(7)
    for power in range(-44, 39, 3):
        values = (random.standard_normal(32) * 10.0**power).astype(np.float32)
        values = values.tolist()
        assert to_ggml_block(fmt, *pack_group(fmt, values)) == ggml_block(name, values)


@pytest.mark.slow
@pytest.mark.parametrize("name", GGML_NAMES)
def test_any_finite_group_has_the_bytes_of_ggml(name):
    fmt = parse_format(name)

    @given(st.lists(st.floats(width=32, allow_nan=False), min_size=32, max_size=32))
    def check(values):
        # numpy does not say which of two zeros of unlike sign is the minimum.
        values = [value + 0.0 for value in values]
        assert to_ggml_block(fmt, *pack_group(fmt, values)) == ggml_block(name, values)

    check()


@pytest.mark.parametrize("name", GGML_NAMES)
def test_groups_where_gguf_differs_from_ggml_have_the_same_elements(name):
    fmt = parse_format(name)
    for values in ([-0.0] * 32, [INF] * 32, [-INF] * 32):
        found = unpack_group(fmt, *pack_group(fmt, values))
        expected = ggml_values(name, ggml_block(name, values))
        for a, b in zip(found, expected, strict=True):
            assert a == b or (math.isnan(a) and math.isnan(b))


# Blocks of ``ggml_quantize_chunk``: (format, values, d and m, code bytes).
NAN_BLOCKS = [
    ("q8_0", [math.nan, *[1.0] * 30, 127.0], "003c", "00" + "01" * 30 + "7f"),
    ("q8_0", [300.0, math.nan, *[127.0] * 30], "003c", "2c00" + "7f" * 30),
    ("q8_0", [1.0] * 31 + [math.nan], "007e", "00" * 32),
    ("q4_0", [math.nan, *[8.0] * 31], "00bc", "00" + "00" * 15),
    ("q4_0", [math.nan] * 32, "0080", "00" * 16),
    ("q5_0", [math.nan] * 32, "0080", "00" * 20),
    ("q4_1", [math.nan] * 32, "00fc007c", "00" * 16),
    ("q5_1", [math.nan] * 32, "00fc007c", "00" * 20),
    ("q4_1", [15.0, *[0.0] * 30, math.nan], "003c0000", "0f" + "00" * 15),
    ("q4_1", [INF] * 32, "007c007c", "00" * 16),
    ("q5_1", [-INF] * 32, "007c00fc", "00" * 20),
    ("q5_0", [-0.0] * 32, "0080", "00" * 16 + "ff" * 4),
]


@pytest.mark.parametrize(("name", "values", "scales", "codes"), NAN_BLOCKS)
def test_a_nan_is_packed_as_the_loops_of_ggml_pack_it(name, values, scales, codes):
    assert pack_group(parse_format(name), values) == (bytes.fromhex(codes), bytes.fromhex(scales))


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_a_minimum_of_zero_has_the_sign_of_the_first_zero_and_its_values_are_the_same(name):
    fmt = parse_format(name)
    for first, second, sign_byte in ((0.0, -0.0, 0x00), (-0.0, 0.0, 0x80)):
        for rest in ([first, second], [1.0, 2.0]):
            values = [first, second, *rest] * 8
            codes, scales = pack_group(fmt, values)
            assert scales[2:] == bytes([0, sign_byte])
            block = ggml_block(name, values)
            assert codes == from_ggml_block(fmt, block)[0]
            assert same(unpack_group(fmt, codes, scales), ggml_values(name, block))


def test_q5_1_keeps_four_bits_in_nibbles_and_the_fifth_in_the_word_behind_them():
    values = [float(j) for j in range(32)]
    codes, scales = pack_group(parse_format("q5_1"), values)
    assert codes[:16] == bytes(j | j << 4 for j in range(16))
    assert codes[16:] == b"\x00\x00\xff\xff"
    assert scales == struct.pack("<ee", 1.0, 0.0)


def test_q4_0_takes_the_scale_from_the_first_largest_magnitude():
    codes, scales = pack_group(parse_format("q4_0"), [8.0, -8.0] + [1.0] * 30)
    assert scales == struct.pack("<e", -1.0)
    assert codes[:2] == b"\x70\x7f"


@pytest.mark.slow
@pytest.mark.parametrize("name", GGML_NAMES)
def test_repacking_what_was_unpacked_changes_nothing(name):
    fmt = parse_format(name)

    @given(st.lists(st.floats(-4, 4, width=32), min_size=32, max_size=32))
    def check(values):
        # A minimum far above the step, or a step below f16's normal numbers, loses bits in the sum.
        spread = max(values) - min(values)
        assume(spread >= max(map(abs, values)) / 8 and spread > 0.01)
        codes, scales = pack_group(fmt, values)
        unpacked = unpack_group(fmt, codes, scales)
        assert pack_group(fmt, unpacked) == (codes, scales)

    check()


@pytest.mark.parametrize("name", GGML_NAMES)
def test_an_element_is_at_most_half_a_step_off(name):
    fmt = parse_format(name)
    values = [math.sin(j * j) for j in range(32)]
    codes, scales = pack_group(fmt, values)
    d = abs(struct.unpack("<e", scales[:2])[0])
    # Signed formats cut their largest code off: the other end may be a whole step away.
    bound = 0.51 * d if name in ("q8_0", "q5_1", "q4_1") else 1.01 * d
    for value, found in zip(values, unpack_group(fmt, codes, scales), strict=True):
        assert abs(value - found) <= bound


@pytest.mark.parametrize(
    ("code", "value"),
    [(0x01, 2**-9), (0x07, 7 * 2**-9), (0x08, 2**-6), (0x38, 1.0), (0x3F, 1.875), (0x40, 2.0),
     (0x78, 256.0), (0x7E, 448.0), (0x80, -0.0), (0xB8, -1.0), (0xFE, -448.0)],
)  # fmt: skip
def test_e4m3_bytes_stand_for_their_numbers(code, value):
    assert same([e4m3_value(code)], [value])
    assert e4m3_code(value) == code


def test_e4m3_rounds_to_nearest_even_and_saturates():
    assert [e4m3_code(x) for x in (2**-10, 3 * 2**-10, 1.0625, 1.1875)] == [0x00, 0x02, 0x38, 0x3A]
    assert [e4m3_code(x) for x in (432.0, 449.0, 1e30, INF, -INF)] == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    assert e4m3_code(15.99) == e4m3_code(16.0)


def test_every_e4m3_byte_survives_and_both_nans_become_one():
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert math.isnan(e4m3_value(code))
            assert e4m3_code(e4m3_value(code)) == 0x7F
        else:
            assert e4m3_code(e4m3_value(code)) == code


@given(st.floats(-448, 448, width=32))
def test_no_e4m3_number_is_nearer_than_the_one_chosen(value):
    chosen = e4m3_value(e4m3_code(value))
    finite = [e4m3_value(c) for c in range(256) if c & 0x7F != 0x7F]
    assert abs(value - chosen) == min(abs(value - x) for x in finite)


def test_fp8_divides_by_its_scale_and_multiplies_back():
    fmt = parse_format("fp8")
    assert pack_group(fmt, [3.0], scale=2.0) == (b"\x3c", b"")
    assert unpack_group(fmt, b"\x3c", b"", scale=2.0) == [3.0]
    assert pack_group(fmt, [1000.0]) == (b"\x7e", b"")
    assert pack_group(fmt, [math.nan]) == (b"\x7f", b"")


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, math.nan, 1e-46, 1e-39, 1e300])
def test_an_fp8_scale_that_cannot_scale_is_refused(scale):
    for call in (
        lambda: pack_group(parse_format("fp8"), [1.0], scale=scale),
        lambda: unpack_group(parse_format("fp8"), b"\x38", b"", scale=scale),
    ):
        with pytest.raises(ConfigError, match="fp8 scale"):
            call()


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    below, tie, above = 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8
    assert [bf16_bits(x) for x in (1.0, below, tie, above)] == [0x3F80, 0x3F80, 0x3F80, 0x3F82]
    assert [bf16_bits(x) for x in (-0.0, INF, -INF, math.nan)] == [0x8000, 0x7F80, 0xFF80, 0x7FC0]
    assert bf16_bits(to_f32(3.4e38)) == 0x7F80


@given(st.floats(width=32, allow_nan=False))
def test_bf16_has_the_bits_of_gguf(value):
    row = np.array([[value]], dtype=np.float32)
    assert (
        pack_group(parse_format("bf16"), [value])[0]
        == quantize(row, gguf.GGMLQuantizationType.BF16).tobytes()
    )


@given(st.floats(width=32, allow_nan=False))
def test_f16_has_the_bits_of_numpy_and_f32_its_own(value):
    with np.errstate(over="ignore"):
        half = np.float32(value).astype(np.float16)
    fmt = parse_format("f16")
    assert pack_group(fmt, [value])[0] == half.tobytes()
    assert same(unpack_group(fmt, half.tobytes(), b""), [float(half)])
    assert pack_group(parse_format("f32"), [value])[0] == struct.pack("<f", value)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_formats_keep_nan(name):
    fmt = parse_format(name)
    codes, scales = pack_group(fmt, [-math.nan])
    assert codes == {"f32": b"\0\0\xc0\x7f", "f16": b"\0\x7e", "bf16": b"\xc0\x7f"}[name]
    assert math.isnan(unpack_group(fmt, codes, scales)[0])


def test_values_are_rounded_to_f32_before_they_are_packed():
    assert to_f32(0.1) != 0.1
    assert [to_f32(1e39), to_f32(-1e39), to_f32(1e-46)] == [INF, -INF, 0.0]
    assert pack_group(parse_format("q8_0"), [0.1] * 32) == pack_group(
        parse_format("q8_0"), [to_f32(0.1)] * 32
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_catalogue_packs_a_group_and_brings_it_back(name):
    fmt = parse_format(name)
    values = [1.0 + j / 64 for j in range(fmt.group)]
    codes, scales = pack_group(fmt, values)
    assert (len(codes), len(scales)) == (fmt.code_bytes, fmt.scale_bytes)
    found = unpack_group(fmt, codes, scales)
    bound = 0.6 if fmt.name.startswith("turbo2") else 0.35
    assert max(abs(x - y) for x, y in zip(values, found, strict=True)) < bound


def test_wrong_lengths_are_refused_with_the_numbers():
    fmt = parse_format("q8_0")
    with pytest.raises(FormatError, match="groups of 32 values, got 31"):
        pack_group(fmt, [0.0] * 31)
    with pytest.raises(FormatError, match=r"32 \+ 2 bytes, got 32 \+ 1"):
        unpack_group(fmt, bytes(32), bytes(1))
    with pytest.raises(FormatError, match="34 bytes, got 33"):
        from_ggml_block(fmt, bytes(33))
    with pytest.raises(FormatError, match="bf16 is no ggml block"):
        to_ggml_block(parse_format("bf16"), bytes(2), b"")
