import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import ConfigError
from memkv_pp.units import GIB, MIB, align_up, ceil_div, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("1.5GB", 1_500_000_000),
        ("800MiB", 800 * MIB),
        ("17", 17),
        ("17 b", 17),
        (" 2 kib ", 2048),
        ("1TB", 10**12),
        ("3.18GiB", 3_414_499_000),
        ("0.0000000001GiB", 0),
    ],
)
def test_a_size_is_read_and_fractions_round_down(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "1 GiB 2", "12Gi", "0x10", "nan", "inf", "٣GiB", "1" * 65]
)
def test_text_that_is_no_size_is_refused_with_the_knob(text):
    with pytest.raises(ConfigError, match="--reserve"):
        parse_size(text, "--reserve")


@given(st.integers(0, 1 << 60))
def test_plain_digits_mean_bytes(num_bytes):
    assert parse_size(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (MIB, "1.00 MiB"), (-2 * GIB, "-2.00 GiB")],
)
def test_sizes_for_people_take_the_largest_unit_below_them(num_bytes, text):
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_rounding_up_reaches_the_next_multiple_and_no_further(value, divisor):
    assert (ceil_div(value, divisor) - 1) * divisor < value <= ceil_div(value, divisor) * divisor
    assert align_up(value, divisor) == ceil_div(value, divisor) * divisor
