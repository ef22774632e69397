"""Which format goes where: ranges, both ends, and the source's own rules."""

import itertools

import pytest

from memkv_pp.errors import ConfigError, FormatError
from memkv_pp.formats import DEFAULT_PAIR, SOURCE_NAMES, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry, uniform_geometry
from memkv_pp.kv_policy import (
    SourceSwitches,
    auto_high_precision_layers,
    boundary_layers,
    effective_pair,
    layer_formats,
    parse_layer_ranges,
    source_boundary_layers,
    source_pair,
)
from memkv_pp.sizing import layer_bytes_per_token

BF16 = parse_pair("bf16")
FP8 = parse_pair("fp8")
RECURRENT = LayerGeometry(
    kind=LayerKind.RECURRENT, conv_channels=8, conv_kernel=4, state_elements=16
)


def attention(*, kv_heads=2, head_size=64, window=0):
    return LayerGeometry(
        kind=LayerKind.SLIDING if window else LayerKind.FULL,
        query_heads=kv_heads, kv_heads=kv_heads, key_head_size=head_size,
        value_head_size=head_size, window=window,
    )  # fmt: skip


def shared(source):
    return LayerGeometry(kind=LayerKind.SHARED, source_layer=source)


def model(*layers, family="uniform", nextn=()):
    return ModelGeometry(name="tiny", family=family, layers=layers, nextn_layers=nextn)


def names(geometry, **options):
    options.setdefault("kv", DEFAULT_PAIR)
    return [str(pair) for pair in layer_formats(geometry, **options)]


def bf16_layers(geometry, **options):
    return [i for i, name in enumerate(names(geometry, **options)) if name == "bf16:bf16"]


def tiny(num_layers):
    return uniform_geometry(num_layers, kv_heads=2, head_size=64)


def test_without_knobs_every_layer_has_the_pair():
    assert names(tiny(3)) == ["q8_0:q5_1"] * 3


def test_explicit_ranges_are_absolute_inclusive_and_may_name_one_layer():
    assert names(tiny(5), kv_layers=" 0-1=bf16:bf16, 4=Q8_0:q4_0 ") == [
        "bf16:bf16", "bf16:bf16", "q8_0:q5_1", "q8_0:q5_1", "q8_0:q4_0",
    ]  # fmt: skip


def test_an_explicit_range_beats_high_precision_layers():
    found = names(tiny(4), kv_layers="3=q4_0", high_precision_layers=1)
    assert found == ["bf16:bf16", "q8_0:q5_1", "q8_0:q5_1", "q4_0:q4_0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-3", "'0-3' is no range"),
        ("a-b=bf16", "'a-b=bf16' is no range"),
        ("-1=bf16", "'-1=bf16' is no range"),
        ("0=bf16,", "'' is no range"),
        ("0=", "'0=' is no range"),
        ("0-1-2=bf16", "is no range"),
        ("٣=bf16", "is no range"),
        ("2-1=bf16", "2-1 is not within layers 0-3"),
        ("0-4=bf16", "0-4 is not within layers 0-3"),
        ("4=bf16", "4-4 is not within layers 0-3"),
        ("0-2=bf16,2-3=q8_0", "layer 2 is in two ranges"),
        ("1=bf16,1=bf16", "layer 1 is in two ranges"),
    ],
)
def test_ranges_that_make_no_sense_are_refused_with_their_numbers(text, message):
    with pytest.raises(ConfigError, match="--kv-layers: ") as caught:
        layer_formats(tiny(4), kv=DEFAULT_PAIR, kv_layers=text)
    assert message in caught.value.message


def test_an_unknown_format_in_a_range_names_the_knob_and_the_range():
    with pytest.raises(FormatError, match=r"--kv-layers: 1-2: unknown format 'int8'"):
        parse_layer_ranges("1-2=q8_0:int8", 4)


@pytest.mark.parametrize(
    ("num_layers", "at_each_end", "expected"),
    [
        (10, 0, ()),
        (10, 2, (0, 1, 8, 9)),
        (4, 2, (0, 1, 2, 3)),
        (5, 2, (0, 1, 3, 4)),
        (3, 2, (0, 1, 2)),
        (3, 99, (0, 1, 2)),
        (1, 1, (0,)),
        (0, 2, ()),
    ],
)
def test_boundary_layers_are_both_ends_and_meet_in_the_middle(num_layers, at_each_end, expected):
    assert boundary_layers(num_layers, at_each_end) == expected


@pytest.mark.parametrize(
    ("kv", "value", "expected"),
    [
        ("q8_0:q5_1", 1, [0, 5]),
        ("q8_0:q5_1", "2", [0, 1, 4, 5]),
        ("q8_0:q5_1", 100, [0, 1, 2, 3, 4, 5]),
        ("q8_0:q5_1", " MAX ", [0, 1, 2, 3, 4, 5]),
        ("q8_0:q5_1", "all", [0, 1, 2, 3, 4, 5]),
        ("q8_0:q5_1", "auto", []),
        ("fp8:fp8", "auto", []),
        ("q8_0:turbo3", "Auto", [0, 1, 4, 5]),
        ("turbo4e:q8_0", "auto", [0, 1, 4, 5]),
        ("nvfp4:q8_0", "auto", [0, 1, 4, 5]),
        ("turbo2:turbo2", 0, []),
    ],
)
def test_high_precision_layers_of_the_default_policy(kv, value, expected):
    assert bf16_layers(tiny(6), kv=parse_pair(kv), high_precision_layers=value) == expected


def test_the_default_policy_counts_only_layers_that_keep_rows():
    hybrid = model(
        RECURRENT, attention(), RECURRENT, attention(), RECURRENT, attention(), RECURRENT
    )
    assert bf16_layers(hybrid, high_precision_layers=1) == [1, 5]
    gemma = model(*[attention(window=8)] * 3, attention(), shared(2), shared(3))
    assert bf16_layers(gemma, high_precision_layers=1) == [0, 3, 5]


@pytest.mark.parametrize("value", [-1, "-1", "two", "", "1.5", "²"])
@pytest.mark.parametrize("policy", ["default", "source"])
def test_a_bad_number_of_high_precision_layers_names_the_knob(value, policy):
    with pytest.raises(ConfigError, match="--high-precision-layers"):
        layer_formats(tiny(4), kv=DEFAULT_PAIR, high_precision_layers=value, policy=policy)


def test_an_unknown_policy_names_the_knob():
    with pytest.raises(ConfigError, match="--kv-policy: unknown policy 'best'"):
        layer_formats(tiny(4), kv=DEFAULT_PAIR, policy="best")


def test_a_shared_layer_has_the_pair_of_its_source():
    geometry = model(attention(), attention(), shared(0), shared(1))
    assert names(geometry, kv_layers="0=bf16,2-3=q4_0") == [
        "bf16:bf16", "q8_0:q5_1", "bf16:bf16", "q8_0:q5_1",
    ]  # fmt: skip


def test_nextn_layers_follow_the_trunk_and_take_the_plain_pair():
    geometry = model(attention(), attention(), nextn=(attention(),))
    assert names(geometry, high_precision_layers="max") == ["bf16:bf16", "bf16:bf16", "q8_0:q5_1"]
    open_door = SourceSwitches(fp8=True)
    assert names(geometry, policy="source", switches=open_door) == [
        "fp8:fp8",
        "fp8:fp8",
        "q8_0:q5_1",
    ]
    with pytest.raises(ConfigError, match="2-2 is not within layers 0-1"):
        layer_formats(geometry, kv=DEFAULT_PAIR, kv_layers="2=bf16")


@pytest.mark.parametrize("head_size", [80, 100])
def test_a_head_size_that_a_layer_cannot_pack_is_refused_with_the_layer(head_size):
    geometry = model(attention(), RECURRENT, attention(head_size=head_size))
    message = f"layer 2: q8_0 cannot hold a head size of {head_size}"
    with pytest.raises(FormatError, match=message):
        layer_formats(geometry, kv=DEFAULT_PAIR)
    assert names(geometry, kv_layers="2=fp8")[2] == "fp8:fp8"
    with pytest.raises(FormatError, match="layer 2: q5_1 cannot hold"):
        layer_formats(geometry, kv=parse_pair("bf16:q5_1"))


def test_only_the_key_side_of_a_latent_layer_is_checked():
    latent = LayerGeometry(kind=LayerKind.LATENT, latent_size=24, rope_size=8)
    assert names(model(latent), kv=parse_pair("q8_0:turbo4")) == ["q8_0:turbo4"]
    with pytest.raises(FormatError, match="layer 0: turbo4 cannot hold a head size of 32"):
        layer_formats(model(latent), kv=parse_pair("turbo4:q8_0"))


def test_the_head_of_a_nextn_layer_is_checked_too():
    geometry = model(attention(), nextn=(attention(head_size=80),))
    with pytest.raises(FormatError, match="layer 1: q8_0"):
        layer_formats(geometry, kv=DEFAULT_PAIR)


@pytest.mark.parametrize("num_layers", range(1, 65))
def test_the_automatic_number_of_the_source_by_name(num_layers):
    third, most = max(2, -(-num_layers // 3)), max(4, -(-4 * num_layers // 5))
    expected = dict.fromkeys(SOURCE_NAMES, third) | {"bf16": 0, "fp8": 0, "nvfp4": 0}
    expected |= {"turbo2": most, "bf16k_turbo3v": most}
    found = {name: auto_high_precision_layers(name, num_layers) for name in SOURCE_NAMES}
    assert found == expected
    for name in ("turbo2", "bf16k_turbo3v"):
        assert source_boundary_layers(parse_pair(name), num_layers) == tuple(range(num_layers))


def test_the_worked_figures_of_the_automatic_number():
    assert auto_high_precision_layers("turbo8", 10) == 4
    assert source_boundary_layers(parse_pair("turbo8"), 10) == (0, 1, 2, 3, 6, 7, 8, 9)
    assert auto_high_precision_layers("turbo2", 10) == 8
    assert auto_high_precision_layers("turbo4", 3) == 2
    with pytest.raises(FormatError, match="no rule for 'q8_0'"):
        auto_high_precision_layers("q8_0", 10)


@pytest.mark.parametrize(
    ("kv", "value", "expected"),
    [
        ("turbo4:turbo4", "auto", (0, 1, 8, 9)),
        ("turbo4:turbo4", 1, (0, 9)),
        ("turbo4:turbo3", 0, (0, 1, 2, 3, 6, 7, 8, 9)),
        ("bf16:bf16", "max", ()),
        ("bf16:bf16", 3, ()),
        ("fp8:fp8", 0, ()),
        ("fp8:fp8", "auto", (0, 1, 8, 9)),
        ("q8_0:q5_1", 0, ()),
        ("nvfp4:nvfp4", "all", tuple(range(10))),
        ("fp8:turbo2", 40, tuple(range(10))),
    ],
)
def test_the_boundary_lists_of_the_source(kv, value, expected):
    assert source_boundary_layers(parse_pair(kv), 10, value) == expected


def test_the_source_counts_attention_ordinals_and_explicit_ranges_still_win():
    hybrid = model(*[RECURRENT, attention()] * 5)
    options = {"kv": parse_pair("turbo4"), "policy": "source"}
    assert bf16_layers(hybrid, high_precision_layers=1, **options) == [1, 9]
    assert bf16_layers(hybrid, **options) == [1, 3, 7, 9]
    assert bf16_layers(hybrid, kv_layers="9=q8_0", **options) == [1, 3, 7]


def test_the_source_counts_shared_layers_too():
    geometry = model(attention(), attention(), attention(), attention(), shared(2), shared(3))
    options = {"kv": parse_pair("turbo4"), "high_precision_layers": 2}
    assert bf16_layers(geometry, **options) == [0, 1, 2, 3, 4, 5]
    assert bf16_layers(geometry, policy="source", **options) == [0, 1]


def test_an_unset_switch_falls_back_and_a_set_one_wins_in_every_combination():
    tristate = (None, False, True)
    for global_, window, drafting, fp8, forced in itertools.product(
        (False, True), tristate, (False, True), tristate, tristate
    ):
        switches = SourceSwitches(
            gemma_global=global_, gemma_window=window, drafting=drafting, fp8=fp8, model_fp8=forced
        )
        windows_on = window if window is not None else not drafting
        door_open = fp8 if fp8 is not None else forced is True
        for gemma, windowed, on in (
            (True, False, global_),
            (True, True, windows_on),
            (False, False, door_open),
            (False, True, door_open),
        ):
            for base in (DEFAULT_PAIR, parse_pair("q8_0:q4_0"), BF16):
                found = switches.pair_for(gemma=gemma, windowed=windowed, pair=base)
                assert found == (FP8 if on else base)


def test_switches_do_nothing_under_the_default_policy():
    gemma = model(attention(window=8), attention(), family="gemma4")
    assert names(gemma) == ["q8_0:q5_1"] * 2
    assert names(gemma, policy="source") == ["fp8:fp8"] * 2


def gemma4(num_layers, *, sliding_heads, global_heads, num_shared=0):
    """Five windowed layers (heads of 256), then a global one (512); the last ones share."""
    own = num_layers - num_shared
    layers = []
    for index in range(num_layers):
        is_global = (index + 1) % 6 == 0
        if index >= own:
            layers.append(shared(own - 1 if is_global else own - 2))
        elif is_global:
            layers.append(attention(kv_heads=global_heads, head_size=512))
        else:
            layers.append(attention(kv_heads=sliding_heads, head_size=256, window=512))
    return model(*layers, family="gemma4")


@pytest.mark.parametrize(
    ("geometry", "serving", "drafting", "neither"),
    [
        (gemma4(42, sliding_heads=2, global_heads=2, num_shared=18), 28_672, 26_752, 25_984),
        (gemma4(30, sliding_heads=8, global_heads=2), 112_640, 103_040, 102_080),
        (gemma4(60, sliding_heads=16, global_heads=4), 450_560, 412_160, 408_320),
    ],
    ids=["E4B", "26B", "31B"],
)
def test_gemma4_has_the_bytes_per_token_of_its_switches(geometry, serving, drafting, neither):
    def bytes_per_token(switches):
        pairs = layer_formats(geometry, kv=source_pair(), policy="source", switches=switches)
        return sum(
            sum(layer_bytes_per_token(layer, pair))
            for layer, pair in zip(geometry.layers, pairs, strict=True)
        )

    assert bytes_per_token(SourceSwitches()) == serving
    assert bytes_per_token(SourceSwitches(drafting=True)) == drafting
    off = SourceSwitches(gemma_global=False, gemma_window=False)
    assert bytes_per_token(off) == neither


def test_the_two_settings_of_the_source_take_their_own_names_only():
    assert source_pair() == DEFAULT_PAIR
    assert str(source_pair("fp8", "q4_0")) == "fp8:q4_0"
    assert str(source_pair("q8_0", "fp8")) == "q8_0:fp8"
    for k, v, side in (("q5_1", "", "K"), ("q4_0", "", "K"), ("", "q8_0", "V"), ("", "bf16", "V")):
        with pytest.raises(FormatError, match=f"is no {side} format of the source"):
            source_pair(k, v)


def test_an_explicit_pair_beats_the_model_default_which_beats_the_engine_default():
    assert effective_pair(None, None).pair == DEFAULT_PAIR
    assert effective_pair(None, FP8).pair == FP8
    assert effective_pair(None, FP8).warning == ""
    explicit = effective_pair(DEFAULT_PAIR, FP8)
    assert explicit.pair == DEFAULT_PAIR
    assert "q8_0:q5_1" in explicit.warning
    assert "fp8:fp8" in explicit.warning
    assert effective_pair(FP8, FP8).warning == ""
    assert effective_pair(BF16, None).warning == ""
