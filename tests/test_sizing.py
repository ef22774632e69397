import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import ConfigError, FormatError, GeometryError, InternalError
from memkv_pp.fence import Fence, even
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import LayerKind, ModelGeometry, uniform_geometry
from memkv_pp.records import record_layout, state_layout
from memkv_pp.sizing import (
    CacheOptions,
    Footprint,
    Layout,
    StageSizing,
    check_equal_bytes,
    layer_context_bytes,
    recurrent_bytes,
    size_fence,
    size_layers,
    stage_fixed_bytes,
    stage_weight_elements,
)
from memkv_pp.testing.geometries import (
    KNOWN_NAMES,
    full_layer,
    known_geometry,
    latent_layer,
    recurrent_layer,
    sliding_layer,
)

DEFAULT = parse_pair("q8_0:q5_1")
E4M3 = parse_pair("fp8:fp8")
NO_RING = CacheOptions(ring=False)
STEP_FENCE = Fence((0, 22, 45))


def same(geometry: ModelGeometry, pair: Pair = DEFAULT) -> tuple[Pair, ...]:
    return (pair,) * (geometry.num_layers + len(geometry.nextn_layers))


def unsplit(
    geometry: ModelGeometry,
    options: CacheOptions = NO_RING,
    *,
    formats: tuple[Pair, ...] | None = None,
    spec: bool = False,
) -> StageSizing:
    return size_layers(
        geometry,
        formats or same(geometry),
        range(geometry.num_layers),
        options,
        with_nextn=spec,
    )


QWEN = {
    "qwen3.5-9b": (14_848, 16_704),
    "qwen3.5-27b": (29_696, 31_552),
    "qwen3.5-35b-a3b": (9_280, 10_208),
}


@pytest.mark.parametrize("name", QWEN)
def test_qwen_hybrids_grow_by_their_full_layers_alone(name):
    geometry = known_geometry(name)
    plain, spec = QWEN[name]
    assert unsplit(geometry).bytes_per_token == plain
    assert unsplit(geometry, spec=True).bytes_per_token == spec


@pytest.mark.parametrize(
    ("name", "plain_8192", "spec_131072"),
    [
        ("qwen3.5-9b", 121_634_816, 2_189_426_688),
        ("qwen3.5-27b", 243_269_632, 4_135_583_744),
        ("qwen3.5-35b-a3b", 76_021_760, 1_337_982_976),
    ],
)
def test_qwen_contexts_take_the_published_bytes(name, plain_8192, spec_131072):
    geometry = known_geometry(name)
    assert unsplit(geometry).unpadded_bytes(8192) == plain_8192
    assert unsplit(geometry, spec=True).unpadded_bytes(131_072) == spec_131072


@pytest.mark.parametrize(
    ("name", "fence", "per_token", "recurrent_layers"),
    [
        ("qwen3.5-9b", Fence((0, 16, 32)), (7_424, 7_424), (12, 12)),
        ("qwen3.5-27b", Fence((0, 32, 64)), (14_848, 14_848), (24, 24)),
        ("qwen3.5-35b-a3b", Fence((0, 20, 40)), (4_640, 4_640), (15, 15)),
        ("qwen3.5-9b", even(32, 4), (3_712,) * 4, (6,) * 4),
        ("qwen3.5-27b", even(64, 4), (7_424,) * 4, (12,) * 4),
        ("qwen3.5-35b-a3b", even(40, 4), (1_856, 2_784, 1_856, 2_784), (8, 7, 8, 7)),
    ],
)
def test_qwen_stages_charge_their_own_layers(name, fence, per_token, recurrent_layers):
    geometry = known_geometry(name)
    stages = size_fence(geometry, same(geometry), fence, CacheOptions())
    assert tuple(stage.bytes_per_token for stage in stages) == per_token
    counts = tuple(len(stage.state.layers) if stage.state else 0 for stage in stages)
    assert counts == recurrent_layers


@pytest.mark.parametrize(
    ("name", "per_layer", "layers", "layers_with_nextn", "snapshot_bytes"),
    [
        ("qwen3.5-9b", 4_292_608, 24, 25, 54_886_400),
        ("qwen3.5-27b", 6_414_336, 48, 49, 160_161_792),
        ("qwen3.5-35b-a3b", 4_292_608, 30, 31, 68_059_136),
    ],
)
def test_recurrent_states_count_trunk_layers_and_the_nextn_layer_if_asked(
    name, per_layer, layers, layers_with_nextn, snapshot_bytes
):
    geometry = known_geometry(name)
    assert recurrent_bytes(geometry) == layers * per_layer
    assert recurrent_bytes(geometry, count_nextn=True) == layers_with_nextn * per_layer
    assert recurrent_bytes(geometry, states=1, count_nextn=True) == snapshot_bytes


def test_the_recurrent_totals_are_the_published_mebibytes():
    totals = [recurrent_bytes(known_geometry(name), count_nextn=True) / 2**20 for name in QWEN]
    assert [round(total, 2) for total in totals] == [102.34, 299.74, 126.91]


def test_a_sequence_holds_two_slots_of_convolution_and_matrix_state():
    sizing = unsplit(known_geometry("qwen3.5-9b"))
    assert sizing.slot_bytes == 24 * (98_304 + 2_097_152)
    assert sizing.bytes_per_sequence == 2 * sizing.slot_bytes


GEMMA = {
    "gemma4-e4b": (28_672, 26_752, 25_984),
    "gemma4-26b": (112_640, 103_040, 102_080),
    "gemma4-31b": (450_560, 412_160, 408_320),
}


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize(
    ("column", "window_pair", "global_pair"),
    [(0, E4M3, E4M3), (1, DEFAULT, E4M3), (2, DEFAULT, DEFAULT)],
)
def test_gemma_layers_follow_the_switch_of_their_class(name, column, window_pair, global_pair):
    geometry = known_geometry(name)
    formats = tuple(
        global_pair if layer.kind is LayerKind.FULL else window_pair for layer in geometry.layers
    )
    assert unsplit(geometry, formats=formats).bytes_per_token == GEMMA[name][column]


def test_gemma_heads_may_differ_per_layer_or_be_one_number_for_all():
    rows = {
        (layer.kind, layer.kv_heads * layer.key_head_size)
        for layer in known_geometry("gemma4-e4b").layers
    }
    assert rows == {(LayerKind.SLIDING, 512), (LayerKind.FULL, 1024), (LayerKind.SHARED, 0)}
    rows = {
        (layer.kind, layer.kv_heads * layer.key_head_size)
        for layer in known_geometry("gemma4-26b").layers
    }
    assert rows == {(LayerKind.SLIDING, 2048), (LayerKind.FULL, 1024)}


def test_shared_layers_cost_nothing_and_their_source_owns_the_cache():
    geometry = known_geometry("gemma4-e4b")
    for source, reader in geometry.shared_edges():
        assert layer_context_bytes(geometry.layers[reader], DEFAULT, 4096) == 0
        is_global = (reader + 1) % 6 == 0
        kind = LayerKind.FULL if is_global else LayerKind.SLIDING
        assert geometry.layers[source].kind is kind
    tail = size_layers(geometry, same(geometry), range(24, 42), CacheOptions())
    assert tail.footprint(4096) == Footprint(0, 0, 0)
    assert tail.context_bytes(4096) == 0


def step(*, slack: int = 0, ring: bool = True) -> CacheOptions:
    return CacheOptions(
        prefill_chunk=4096,
        rewind_slack=slack,
        ring=ring,
        layout=Layout.FLAT,
        flat_rows=262_144,
    )


def test_step_flash_has_the_published_coefficients():
    geometry = known_geometry("step-3.5-flash")
    plain = unsplit(geometry, step())
    assert plain.bytes_per_token + plain.ring_bytes_per_token == 83_520
    assert plain.ring_bytes_per_token == 61_248
    spec = unsplit(geometry, step(), spec=True)
    assert spec.bytes_per_token + spec.ring_bytes_per_token == 85_376
    assert spec.ring_bytes_per_token == 63_104
    assert spec.ring_rows == plain.ring_rows == 4639
    assert spec.unpadded_bytes(262_144) == 6_131_210_624


@pytest.mark.parametrize(
    ("ctx", "off", "rows_4639", "rows_5151", "stage_0", "stage_1"),
    [
        (4_096, 342_097_920, 342_097_920, 342_097_920, 167_247_872, 174_850_048),
        (8_192, 684_195_840, 466_581_696, 497_940_672, 228_985_856, 237_595_840),
        (131_072, 10_947_133_440, 3_203_365_056, 3_234_724_032, 1_597_377_536, 1_605_987_520),
        (262_144, 21_894_266_880, 6_122_600_640, 6_153_959_616, 3_056_995_328, 3_065_605_312),
    ],
)
def test_step_flash_contexts_take_the_published_bytes(
    ctx, off, rows_4639, rows_5151, stage_0, stage_1
):
    geometry = known_geometry("step-3.5-flash")
    assert unsplit(geometry, step(ring=False)).unpadded_bytes(ctx) == off
    assert unsplit(geometry, step()).unpadded_bytes(ctx) == rows_4639
    assert unsplit(geometry, step(slack=512)).unpadded_bytes(ctx) == rows_5151
    stages = size_fence(geometry, same(geometry), STEP_FENCE, step())
    assert [stage.unpadded_bytes(ctx) for stage in stages] == [stage_0, stage_1]


def test_step_flash_stages_split_full_and_sliding_layers():
    geometry = known_geometry("step-3.5-flash")
    stages = size_fence(geometry, same(geometry), STEP_FENCE, step())
    assert [s.bytes_per_token + s.ring_bytes_per_token for s in stages] == [40_832, 42_688]
    assert [s.ring_bytes_per_token for s in stages] == [29_696, 31_552]
    assert [len(s.full.layers) if s.full else 0 for s in stages] == [6, 6]
    assert [len(s.window.layers) if s.window else 0 for s in stages] == [16, 17]


@pytest.mark.parametrize(("slack", "rows"), [(0, 4639), (512, 5151)])
def test_a_flat_ring_is_capped_and_never_longer_than_the_context(slack, rows):
    geometry = known_geometry("step-3.5-flash")
    assert unsplit(geometry, step(slack=slack)).ring_rows == rows
    short = CacheOptions(prefill_chunk=4096, rewind_slack=slack, layout=Layout.FLAT, flat_rows=4096)
    window = unsplit(geometry, short).window
    assert window is not None
    assert window.rows == 4096


def test_e4m3_on_both_sides_is_larger_than_the_default_pair():
    geometry = known_geometry("step-3.5-flash")
    default = unsplit(geometry, step(ring=False)).unpadded_bytes(262_144)
    e4m3 = unsplit(geometry, step(ring=False), formats=same(geometry, E4M3)).unpadded_bytes(262_144)
    assert (round(default / 2**30, 2), round(e4m3 / 2**30, 2)) == (20.39, 22.5)


def test_a_latent_layer_counts_one_row_of_latent_and_rope():
    geometry = ModelGeometry(name="mla", family="mla", layers=(latent_layer(448, 64),) * 11)
    assert unsplit(geometry, formats=same(geometry, parse_pair("f32"))).bytes_per_token == 22_528
    assert unsplit(geometry, formats=same(geometry, parse_pair("bf16"))).bytes_per_token == 11_264


@pytest.mark.parametrize(
    ("pair", "num_bytes"),
    [
        ("f16:f16", 1_073_741_824),
        ("q8_0:q8_0", 570_425_344),
        ("q8_0:q4_0", 436_207_616),
        ("q8_0:q5_1", 486_539_264),
    ],
)
def test_block_formats_count_bytes_per_group_not_per_element(pair, num_bytes):
    geometry = uniform_geometry(32, kv_heads=8, head_size=128)
    sizing = unsplit(geometry, formats=same(geometry, parse_pair(pair)))
    assert sizing.unpadded_bytes(8192) == sizing.context_bytes(8192) == num_bytes


@pytest.mark.parametrize("head_size", [80, 100])
def test_a_head_size_that_is_no_multiple_of_the_group_is_refused_by_name(head_size):
    geometry = uniform_geometry(2, kv_heads=8, head_size=head_size)
    with pytest.raises(FormatError, match=f"q8_0 cannot hold a head size of {head_size}"):
        unsplit(geometry)


def hybrid(num_layers: int, interval: int) -> ModelGeometry:
    recurrent = recurrent_layer(key_groups=2, value_heads=2, state_size=8)
    full = full_layer(2, 32)
    return ModelGeometry(
        name="hybrid",
        family="hybrid",
        layers=tuple(
            full if i % interval == interval - 1 else recurrent for i in range(num_layers)
        ),
    )


def test_a_stage_without_attention_pays_for_state_alone_once_per_sequence():
    geometry = hybrid(48, 4)
    stages = size_fence(geometry, same(geometry), Fence((0, 2, 18, 34, 48)), CacheOptions())
    first = stages[0]
    assert first.bytes_per_token == first.record_bytes == 0
    assert first.footprint(100_000) == Footprint(0, 0, 2)
    assert first.context_bytes(1) == first.context_bytes(100_000) == first.bytes_per_sequence > 0
    assert first.capacity_tokens(first.bytes_per_sequence) is None
    assert first.capacity_tokens(first.bytes_per_sequence - 1) == 0
    assert all(stage.bytes_per_token > 0 for stage in stages[1:])
    assert {stage.options.block_tokens for stage in stages} == {16}


def test_three_recurrent_layers_and_one_latent_layer_make_two_stages():
    recurrent = recurrent_layer(key_groups=2, value_heads=2, state_size=8)
    geometry = ModelGeometry(
        name="mla", family="mla", layers=(recurrent, recurrent, recurrent, latent_layer(32, 32))
    )
    stages = size_fence(geometry, same(geometry), Fence((0, 2, 4)), CacheOptions())
    assert [stage.bytes_per_token for stage in stages] == [0, 68]
    assert [stage.footprint(17) for stage in stages] == [Footprint(0, 0, 2), Footprint(2, 0, 2)]


layer_shapes = st.sampled_from(
    [
        full_layer(2, 64),
        full_layer(3, 128),
        sliding_layer(2, 64, 40),
        sliding_layer(1, 128, 8),
        latent_layer(32, 32),
        recurrent_layer(key_groups=1, value_heads=2, state_size=5),
    ]
)
pairs = st.sampled_from([parse_pair(name) for name in ("q8_0:q5_1", "bf16", "nvfp4", "turbo4k3v")])
models = st.lists(st.tuples(layer_shapes, pairs), min_size=1, max_size=10)


def built(
    layers: list[tuple[object, Pair]], window: int | None = None
) -> tuple[ModelGeometry, tuple[Pair, ...]]:
    shapes = [layer for layer, _ in layers]
    formats = tuple(DEFAULT if layer == latent_layer(32, 32) else pair for layer, pair in layers)
    geometry = ModelGeometry(name="drawn", family="drawn", layers=tuple(shapes))  # pyright: ignore[reportArgumentType]
    return geometry, formats


@pytest.mark.slow
@given(models, st.data())
def test_the_stages_of_any_fence_add_up_to_the_unsplit_model(layers, data):
    geometry, formats = built(layers)
    inner = data.draw(st.sets(st.integers(1, max(geometry.num_layers - 1, 1)), max_size=4))
    cuts = sorted({0, geometry.num_layers} | {c for c in inner if c < geometry.num_layers})
    options = CacheOptions(ring=data.draw(st.booleans()), prefill_chunk=8, rewind_slack=4)
    whole = unsplit(geometry, options, formats=formats)
    stages = size_fence(geometry, formats, Fence(tuple(cuts)), options)
    assert sum(s.bytes_per_token for s in stages) == whole.bytes_per_token
    assert sum(s.ring_bytes_per_token for s in stages) == whole.ring_bytes_per_token
    assert max(s.ring_rows for s in stages) == whole.ring_rows
    for part in ("full", "window", "state"):
        payloads = [getattr(s, part).payload_bytes for s in stages if getattr(s, part)]
        total = getattr(whole, part)
        assert sum(payloads) == (total.payload_bytes if total else 0)


@pytest.mark.slow
@given(models, st.integers(1, 200))
def test_a_ring_never_charges_more_than_whole_layers_and_the_same_while_it_is_not_full(
    layers, tokens
):
    geometry, formats = built(layers)
    options = CacheOptions(prefill_chunk=8, rewind_slack=4)
    ring = unsplit(geometry, options, formats=formats)
    flat = unsplit(geometry, NO_RING, formats=formats)
    assert ring.bytes_per_token + ring.ring_bytes_per_token == flat.bytes_per_token
    assert ring.unpadded_bytes(tokens) <= flat.unpadded_bytes(tokens)
    if tokens <= ring.ring_rows or not ring.window:
        assert ring.unpadded_bytes(tokens) == flat.unpadded_bytes(tokens)


@pytest.mark.slow
@given(models, st.integers(1, 300), st.integers(1, 4), st.sampled_from([1, 5, 16]))
def test_bytes_grow_with_tokens_and_cover_every_row(layers, tokens, sequences, block):
    geometry, formats = built(layers)
    options = CacheOptions(prefill_chunk=8, rewind_slack=4, block_tokens=block)
    sizing = unsplit(geometry, options, formats=formats)
    taken = sizing.context_bytes(tokens, sequences)
    assert taken <= sizing.context_bytes(tokens + 1, sequences)
    assert taken == sequences * sizing.context_bytes(tokens)
    states = sizing.bytes_per_sequence
    assert sizing.unpadded_bytes(tokens) + states <= sizing.context_bytes(tokens)
    units = sizing.footprint(tokens)
    assert units.full_records * block >= (tokens if sizing.full else 0)
    assert units.window_records * block >= (min(tokens, sizing.ring_rows) if sizing.window else 0)


@pytest.mark.slow
@given(models, st.integers(1, 300), st.booleans())
def test_live_bytes_are_the_rows_times_their_size_plus_one_state(layers, tokens, flat):
    geometry, formats = built(layers)
    layout = Layout.FLAT if flat else Layout.PAGED
    options = CacheOptions(ring=False, layout=layout, flat_rows=tokens if flat else 0)
    sizing = unsplit(geometry, options, formats=formats)
    live = sum(
        layer_context_bytes(layer, pair, tokens)
        for layer, pair in zip(geometry.layers, formats, strict=True)
        if layer.kind is not LayerKind.SLIDING
    )
    sliding = sum(
        tokens * layer_context_bytes(layer, pair, 1)
        for layer, pair in zip(geometry.layers, formats, strict=True)
        if layer.kind is LayerKind.SLIDING
    )
    state = sizing.state.payload_bytes if sizing.state else 0
    assert live + sliding == sizing.unpadded_bytes(tokens) + state


@pytest.mark.slow
@given(models, st.integers(1, 200))
def test_a_flat_record_is_its_rows_and_an_8_byte_tail_per_plane_and_little_else(layers, rows):
    geometry, formats = built(layers)
    options = CacheOptions(ring=False, layout=Layout.FLAT, flat_rows=rows)
    sizing = unsplit(geometry, options, formats=formats)
    if sizing.full is None:
        return
    assert sizing.full.payload_bytes == sizing.bytes_per_token * rows
    planes = sum(1 if layer.v is None else 2 for layer in sizing.full.layers)
    assert 8 * planes <= sizing.padding_bytes <= planes * (8 + 3 * 15) + 255
    assert sizing.footprint(rows).full_records == 1


def test_default_records_carry_no_padding():
    geometry = known_geometry("qwen3.5-27b")
    sizing = unsplit(geometry)
    assert sizing.padding_bytes == 0
    assert sizing.record_bytes == 16 * 29_696
    assert sizing.context_bytes(17) == 2 * sizing.record_bytes + sizing.bytes_per_sequence


@pytest.mark.slow
@given(models, st.integers(0, 3_000_000), st.integers(1, 3))
def test_the_capacity_fits_and_one_block_more_does_not(layers, budget, sequences):
    geometry, formats = built(layers)
    options = CacheOptions(prefill_chunk=8, rewind_slack=4)
    sizing = unsplit(geometry, options, formats=formats)
    capacity = sizing.capacity_tokens(budget, sequences)
    if capacity is None:
        assert not sizing.grows
        assert sizing.context_bytes(10**9, sequences) <= budget
        return
    assert capacity % 16 == 0
    assert capacity == 0 or sizing.context_bytes(capacity, sequences) <= budget
    assert sizing.context_bytes(capacity + 16, sequences) > budget


@pytest.mark.slow
@given(models, st.integers(0, 3_000_000), st.integers(1, 200))
def test_as_many_sequences_fit_as_promised_and_not_one_more(layers, budget, tokens):
    geometry, formats = built(layers)
    sizing = unsplit(geometry, CacheOptions(prefill_chunk=8), formats=formats)
    count = sizing.sequences_within(tokens, budget)
    assert count is not None
    assert sizing.context_bytes(tokens, count) <= budget
    assert sizing.context_bytes(tokens, count + 1) > budget


@pytest.mark.slow
@given(models, st.integers(0, 3_000_000), st.integers(1, 3))
def test_pools_cut_from_a_budget_stay_within_it_and_hold_every_ring_and_slot(
    layers, budget, sequences
):
    geometry, formats = built(layers)
    sizing = unsplit(geometry, CacheOptions(prefill_chunk=8, rewind_slack=4), formats=formats)
    least = sizing.footprint(1)._replace(window_records=sizing.footprint(10**6).window_records)
    if sizing.context_bytes(1) == 0 or sizing.bytes_of(least.times(sequences)) > budget:
        with pytest.raises(ConfigError, match="--kv-bytes: stage 0 needs"):
            sizing.units_within(budget, sequences)
        return
    units = sizing.units_within(budget, sequences)
    assert least.times(sequences).within(units)
    assert sizing.bytes_of(units) <= budget
    if sizing.full:
        assert budget - sizing.bytes_of(units) < sizing.record_bytes


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_a_known_model_split_evenly_keeps_its_bytes(name):
    geometry = known_geometry(name)
    options = CacheOptions()
    whole = unsplit(geometry, options)
    cuts = (0, 12, 22, geometry.num_layers) if geometry.shared_edges() else None
    fence = Fence(cuts) if cuts else even(geometry.num_layers, 3)
    stages = size_fence(geometry, same(geometry), fence, options)
    assert sum(s.unpadded_bytes(10_000) for s in stages) == whole.unpadded_bytes(10_000)


def test_a_model_that_is_not_known_is_refused_with_the_names():
    with pytest.raises(GeometryError, match="gemma4-31b"):
        known_geometry("gpt-9")


def test_a_flat_record_refuses_more_rows_than_it_has():
    options = CacheOptions(layout=Layout.FLAT, flat_rows=8)
    sizing = unsplit(uniform_geometry(1, kv_heads=1, head_size=32), options)
    assert sizing.footprint(8) == Footprint(1, 0, 0)
    assert sizing.capacity_tokens(sizing.record_bytes) == 8
    assert sizing.capacity_tokens(sizing.record_bytes - 1) == 0
    with pytest.raises(ConfigError, match="--ctx: 9 rows do not fit a flat record of 8"):
        sizing.footprint(9)


def test_no_rows_take_nothing():
    assert unsplit(known_geometry("qwen3.5-9b")).footprint(0) == Footprint()


@pytest.mark.parametrize(
    ("knob", "options"),
    [
        ("--block-tokens", {"block_tokens": 0}),
        ("--prefill-chunk", {"prefill_chunk": 0}),
        ("--rewind-slack", {"rewind_slack": -1}),
        ("--spec", {"spec_tokens": -1}),
        ("--ctx", {"layout": Layout.FLAT, "flat_rows": 0}),
    ],
)
def test_options_that_cannot_work_name_their_knob(knob, options):
    with pytest.raises(ConfigError, match=knob):
        CacheOptions(**options)


def test_a_format_pair_is_needed_for_every_layer():
    geometry = known_geometry("qwen3.5-9b")
    with pytest.raises(GeometryError, match="32 format pairs for 33 layers"):
        unsplit(geometry, formats=(DEFAULT,) * 32)


def test_nextn_layers_are_charged_on_the_last_stage_while_speculating():
    geometry = known_geometry("qwen3.5-9b")
    options = CacheOptions(spec_tokens=3)
    stages = size_fence(geometry, same(geometry), even(32, 2), options)
    assert [stage.bytes_per_token for stage in stages] == [7_424, 7_424 + 1_856]


def test_units_of_footprints_add_subtract_and_compare():
    one, two = Footprint(1, 2, 3), Footprint(2, 2, 4)
    assert one.plus(two) == Footprint(3, 4, 7)
    assert two.minus(one) == Footprint(1, 0, 1)
    assert one.times(3) == Footprint(3, 6, 9)
    assert one.within(two)
    assert not two.within(one)


def test_three_figures_that_differ_are_our_bug_with_the_equation():
    check_equal_bytes(0, sized=5, allocated=5, promised=5)
    with pytest.raises(InternalError, match="stage 1: sized 5 == allocated 6 == promised 5"):
        check_equal_bytes(1, sized=5, allocated=6, promised=5)


def weighted(*, tied: bool) -> ModelGeometry:
    from dataclasses import replace

    layer = replace(full_layer(1, 32), weight_elements=10)
    return ModelGeometry(
        name="weighted",
        family="weighted",
        layers=(layer,) * 4,
        nextn_layers=(layer,),
        embedding_elements=100,
        head_elements=0 if tied else 90,
        norm_elements=7,
        tied_embedding=tied,
        hidden_size=8,
        feed_forward_size=24,
        vocabulary_size=50,
    )


@pytest.mark.parametrize(
    ("tied", "cuts", "spec", "elements"),
    [
        (False, (0, 4), False, [40 + 100 + 7 + 90]),
        (True, (0, 4), False, [40 + 100 + 7]),
        (True, (0, 1, 4), False, [10 + 100, 30 + 7 + 100]),
        (False, (0, 1, 4), True, [10 + 100, 30 + 7 + 90 + 10]),
    ],
)
def test_weights_lie_with_their_stage_and_a_tied_head_elsewhere_is_a_copy(
    tied, cuts, spec, elements
):
    geometry, fence = weighted(tied=tied), Fence(cuts)
    found = [
        stage_weight_elements(geometry, fence, stage, spec=spec)
        for stage in range(fence.num_stages)
    ]
    assert found == elements


def test_fixed_bytes_are_boundaries_activations_logits_and_lengths():
    geometry, fence = weighted(tied=True), Fence((0, 1, 2, 4))
    options = CacheOptions(prefill_chunk=16, spec_tokens=3)
    fixed = [
        stage_fixed_bytes(geometry, fence, stage, options, dtype_bytes=2, sequences=5)
        for stage in range(3)
    ]
    boundary, activations = 2 * 20 * 8 * 2, 20 * (4 * 8 + 2 * 24) * 2
    each = activations + 5 * 4
    assert fixed == [boundary + each, 2 * boundary + each, boundary + each + 20 * 50 * 4]
    alone = stage_fixed_bytes(geometry, Fence((0, 4)), 0, options, dtype_bytes=2)
    assert alone == 16 * (4 * 8 + 2 * 24) * 2 + 4 * 50 * 4 + 4


def test_layouts_of_a_stage_are_those_of_the_records_module():
    geometry = known_geometry("qwen3.5-9b")
    sizing = unsplit(geometry)
    stored = [(i, layer, DEFAULT) for i, layer in enumerate(geometry.layers)]
    full = [entry for entry in stored if entry[1].kind is LayerKind.FULL]
    assert sizing.full == record_layout(full, 16)
    states = [(i, layer) for i, layer, _ in stored if layer.kind is LayerKind.RECURRENT]
    assert sizing.state == state_layout(states)


def test_a_stage_of_rings_alone_is_unbounded_only_when_the_whole_ring_fits():
    geometry = ModelGeometry(name="rings", family="rings", layers=(sliding_layer(2, 64, 512),) * 3)
    sizing = unsplit(geometry, CacheOptions())
    ring = 1120 // 16 * sizing.window_record_bytes
    assert not sizing.grows
    assert sizing.capacity_tokens(ring) is None
    assert sizing.capacity_tokens(ring - 1) == 1120 - 16
    assert sizing.capacity_tokens(3 * ring - 1, sequences=3) == 1120 - 16
