"""The catalogue: bytes, names and head sizes."""

import pytest

from memkv_pp.errors import FormatError
from memkv_pp.formats import ALIASES, FORMATS, SOURCE_NAMES, parse_format, parse_pair
from memkv_pp.geometry import uniform_geometry
from memkv_pp.kv_policy import layer_formats
from memkv_pp.sizing import CacheOptions, size_layers

BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5,
    "q4_0": 4.5, "nvfp4": 4.5, "turbo8": 9, "turbo4": 4.5, "turbo3": 3.5, "turbo2": 2.5,
}  # fmt: skip


def test_every_format_has_its_bits_and_a_suffixed_name_the_same():
    assert {name: f.bits_per_element for name, f in FORMATS.items()} == BITS | {
        name + "e": BITS[name] for name in ("nvfp4", "turbo8", "turbo4", "turbo3", "turbo2")
    }
    assert {name for name, f in FORMATS.items() if f.exponent} == FORMATS.keys() - BITS.keys()


@pytest.mark.parametrize(
    ("kv_heads", "head_size", "expected"),
    [
        (2, 256, {"bf16": 16384, "fp8": 8192, "nvfp4": 4608, "turbo4": 4608, "turbo3": 3584,
                  "turbo2": 2560, "turbo8": 9216}),
        (8, 128, {"bf16": 32768, "fp8": 16384, "nvfp4": 9216, "turbo4": 9216, "turbo3": 7168,
                  "turbo2": 5120, "turbo8": 18432}),
    ],
)  # fmt: skip
def test_one_side_of_a_block_of_sixteen_tokens_has_the_source_bytes(kv_heads, head_size, expected):
    found = {name: 16 * kv_heads * parse_format(name).row_bytes(head_size) for name in expected}
    assert found == expected


def test_codes_and_scales_of_a_row_make_up_the_row():
    for fmt in FORMATS.values():
        assert fmt.code_row_bytes(128) + fmt.scale_row_bytes(128) == fmt.row_bytes(128)
    nvfp4 = parse_format("nvfp4")
    assert (nvfp4.code_row_bytes(256), nvfp4.scale_row_bytes(256)) == (128, 16)


def test_the_sixteen_source_names_and_their_aliases_are_pairs_that_print_and_parse_back():
    assert len(SOURCE_NAMES) == 16
    assert len(ALIASES) == 9
    for name in (*SOURCE_NAMES, *ALIASES):
        pair = parse_pair(name)
        assert (pair.k.name, pair.v.name) == SOURCE_NAMES[ALIASES.get(name, name)]
        assert parse_pair(str(pair)) == pair
    assert str(parse_pair(" Turbo4K3V ")) == "turbo4:turbo3"
    assert str(parse_pair("fp8k2v")) == "fp8:turbo2"
    assert parse_pair("bf16k4v") == parse_pair("bf16k_turbo4v")


@pytest.mark.parametrize("text", ["int8", "q8_0:int8", "", "turbo5", "q8_0:", ":q8_0"])
def test_an_unknown_format_is_refused_and_the_known_names_listed(text):
    with pytest.raises(FormatError) as caught:
        parse_pair(text)
    assert "--kv" in caught.value.message
    for name in BITS:
        assert name in caught.value.hint


def test_three_sides_are_no_pair():
    with pytest.raises(FormatError, match="no pair"):
        parse_pair("q8_0:q5_1:q4_0")


@pytest.mark.parametrize(
    ("pair", "total_bytes"),
    [
        ("f16", 1_073_741_824),
        ("q8_0:q8_0", 570_425_344),
        ("q8_0:q4_0", 436_207_616),
        ("q8_0:q5_1", 486_539_264),
    ],
)
def test_thirty_two_layers_of_eight_heads_at_8192_tokens_have_the_known_bytes(pair, total_bytes):
    geometry = uniform_geometry(32, kv_heads=8, head_size=128)
    formats = layer_formats(geometry, kv=parse_pair(pair))
    sizing = size_layers(geometry, formats, range(32), CacheOptions())
    assert sizing.bytes_per_token * 8192 == total_bytes
    assert sizing.context_bytes(8192) == total_bytes


@pytest.mark.parametrize("head_size", [80, 100])
def test_a_head_that_is_no_multiple_of_the_group_is_refused_by_name(head_size):
    for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        with pytest.raises(FormatError, match=rf"{name} cannot hold a head size of {head_size}"):
            parse_format(name).row_bytes(head_size)
    for name in ("f32", "f16", "bf16", "fp8"):
        assert parse_format(name).row_bytes(head_size) == BITS[name] // 8 * head_size


def test_nvfp4_holds_multiples_of_sixteen_only():
    assert parse_format("nvfp4").row_bytes(80) == 45
    with pytest.raises(FormatError, match="nvfp4 cannot hold a head size of 100"):
        parse_format("nvfp4").row_bytes(100)


def test_rotated_formats_hold_powers_of_two_from_64_to_512_only():
    rotated = [f for f in FORMATS.values() if f.rotated]
    assert {f.name.removesuffix("e") for f in rotated} == {"turbo8", "turbo4", "turbo3", "turbo2"}
    for fmt in rotated:
        for size in (64, 128, 256, 512):
            fmt.check_head_size(size)
        for size in (16, 32, 96, 192, 1024):
            with pytest.raises(FormatError, match=f"{fmt.name} cannot hold a head size of {size}"):
                fmt.check_head_size(size)


def test_no_format_holds_an_empty_head():
    for fmt in FORMATS.values():
        with pytest.raises(FormatError):
            fmt.check_head_size(0)
