"""Error tables: what each format costs on plain, small and outlier-heavy rows, and what helps."""

import functools

import pytest
import torch

from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.packing_groups import exponent_bytes
from memkv_pp.cache.rotation import rotate
from memkv_pp.formats import parse_format, parse_pair

HEAD_SIZE = 128
RECORD_ROWS = 16
NUM_ROWS = 512
SIGMAS = {"gaussian": 1.0, "small": 0.002, "outliers": 1.0}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def rows_of(kind, seed=0, num_rows=NUM_ROWS):
    """f32 [rows, 128]: normal, of sigma 0.002, or with two channels twelve times as large."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, HEAD_SIZE, generator=generator) * SIGMAS[kind]
    if kind == "outliers":
        rows[:, [5, 77]] *= 12
    return rows


def stored(name, rows, *, rotated=None, clip_search=False):
    """``rows`` as they come back from records of sixteen; rotated as the format says, or as told."""
    fmt = parse_format(name)
    turned = fmt.rotated if rotated is None else rotated
    packed = rotate(rows) if turned else rows
    exponents = exponent_bytes(packed[::RECORD_ROWS]).repeat_interleave(RECORD_ROWS)
    codes, scales = encode(fmt, packed, exponents=exponents, clip_search=clip_search)
    found = decode(fmt, codes, scales, HEAD_SIZE, torch.float32, exponents=exponents)
    return rotate(found, inverse=True) if turned else found


def nmse(name, kind, **options):
    """Mean squared error over the mean square."""
    rows = rows_of(kind)
    return ((stored(name, rows, **options) - rows).square().sum() / rows.square().sum()).item()


def attention_error(pair, kind, **options):
    """Relative error of the output of 64 queries over 512 cached rows, a softmax of spread 2."""
    sides = parse_pair(pair)
    key, value = rows_of(kind, seed=1), rows_of(kind, seed=2)
    query = rows_of("gaussian", seed=3, num_rows=64)
    query = query * 2 / (query @ key.T).std()

    def output(key, value):
        return torch.softmax(query @ key.T, -1) @ value

    exact = output(key, value)
    found = output(stored(sides.k.name, key, **options), stored(sides.v.name, value, **options))
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("name", "known"),
    [("nvfp4", 0.00908), ("turbo8", 0.00050), ("turbo4", 0.00586), ("turbo3", 0.0243),
     ("turbo2", 0.129), ("fp8", 0.00070)],
)  # fmt: skip
def test_gaussian_rows_have_the_published_error(name, known):
    assert nmse(name, "gaussian") == pytest.approx(known, rel=0.03)
    assert nmse("turbo4", "gaussian") <= 0.006


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gaussian", "outliers"),
    [("nvfp4", 0.76, 0.94), ("turbo4", 0.88, 0.84), ("turbo3", 0.89, 0.86), ("turbo2", 0.75, 0.7)],
)
def test_a_clip_search_pays_in_every_format_with_a_codebook(name, gaussian, outliers):
    for kind, factor in (("gaussian", gaussian), ("outliers", outliers)):
        assert nmse(name, kind, clip_search=True) <= factor * nmse(name, kind)


def test_a_clip_search_leaves_turbo8_as_it_is():
    assert nmse("turbo8", "outliers", clip_search=True) == nmse("turbo8", "outliers")


@pytest.mark.parametrize(
    ("name", "known"), [("nvfp4", 0.92), ("turbo4", 0.157), ("turbo3", 0.076), ("turbo8", 0.0005)]
)
def test_small_rows_sink_below_the_scales_of_a_bare_format(name, known):
    assert nmse(name, "small") == pytest.approx(known, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("name", ["nvfp4e", "turbo8e", "turbo4e", "turbo3e", "turbo2e"])
def test_an_exponent_makes_small_rows_as_good_as_any(name, clip_search):
    usual = nmse(name, "gaussian", clip_search=clip_search)
    assert nmse(name, "small", clip_search=clip_search) <= 1.1 * usual
    assert usual <= 1.001 * nmse(name.removesuffix("e"), "gaussian", clip_search=clip_search)


@pytest.mark.parametrize("first_row", [1 / 64, 64.0])
def test_rows_that_differ_much_from_the_first_of_their_record_still_fit(first_row):
    for name in ("nvfp4e", "turbo4e", "turbo2e"):
        rows = rows_of("small").clone()
        rows[::RECORD_ROWS] *= first_row
        found = stored(name, rows)
        others = torch.arange(len(rows)) % RECORD_ROWS != 0
        missed = (found - rows)[others].square().sum() / rows[others].square().sum()
        assert missed <= 1.1 * nmse(name, "gaussian")


@pytest.mark.parametrize(
    ("name", "straight", "turned"),
    [("turbo4", 0.0098, 0.0057), ("turbo3", 0.063, 0.021), ("turbo2", 0.37, 0.11),
     ("nvfp4", 0.0087, 0.0097), ("turbo8", 0.00017, 0.00054)],
)  # fmt: skip
def test_rotation_helps_codebooks_against_outliers_and_small_floats_not(name, straight, turned):
    assert nmse(name, "outliers", rotated=False) == pytest.approx(straight, rel=0.1)
    assert nmse(name, "outliers", rotated=True) == pytest.approx(turned, rel=0.1)
    for kind in ("gaussian", "small"):
        assert nmse(name, kind, rotated=True) == pytest.approx(
            nmse(name, kind, rotated=False), rel=0.03
        )


# pair: relative error of the attention output on gaussian, small and outlier-heavy rows.
ATTENTION_ERRORS = {
    "f16:f16": (0.0005, 0.0005, 0.001),
    "fp8:fp8": (0.06, 0.6, 0.08),
    "q8_0:q5_1": (0.045, 0.045, 0.07),
    "q5_1:q5_1": (0.08, 0.08, 0.14),
    "q4_0:q4_0": (0.18, 0.18, 0.4),
    "turbo8:turbo8": (0.05, 0.05, 0.06),
    "turbo4:turbo4": (0.17, 1.4, 0.23),
    "turbo4e:turbo4e": (0.17, 0.18, 0.23),
    "turbo4:turbo3": (0.23, 1.1, 0.27),
    "turbo3e:turbo3e": (0.34, 0.34, 0.34),
    "turbo2e:turbo2e": (0.72, 0.72, 0.72),
    "bf16:turbo2e": (0.42, 0.42, 0.38),
    "nvfp4:nvfp4": (0.22, 1.0, 0.28),
    "nvfp4e:nvfp4e": (0.22, 0.22, 0.28),
}


@pytest.mark.parametrize("pair", ATTENTION_ERRORS)
def test_the_output_of_attention_misses_by_no_more_than_its_pair_allows(pair):
    for kind, bound in zip(SIGMAS, ATTENTION_ERRORS[pair], strict=True):
        assert bound / 3 < attention_error(pair, kind) <= bound, kind


@pytest.mark.slow
def test_the_output_of_attention_gains_from_rotation_exponents_and_search():
    for pair, gain in (("turbo4:turbo4", 0.85), ("turbo3:turbo3", 0.5), ("turbo2:turbo2", 0.5)):
        straight = attention_error(pair, "outliers", rotated=False)
        turned = attention_error(pair, "outliers")
        assert turned < gain * straight
        assert attention_error(pair, "outliers", clip_search=True) < 0.97 * turned
    for name in ("nvfp4", "turbo4", "turbo3"):
        bare = attention_error(f"{name}:{name}", "small")
        assert attention_error(f"{name}e:{name}e", "small") < 0.6 * bare
