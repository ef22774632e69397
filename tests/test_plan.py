from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import CapacityError, ConfigError, FenceError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import ModelGeometry, uniform_geometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.fences import Budget, FenceChoice, choose_fence
from memkv_pp.plan.model_size import size_model
from memkv_pp.plan.planner import PlanRequest, plan_capacity
from memkv_pp.sizing import CacheOptions, Layout, size_fence
from memkv_pp.testing.geometries import full_layer, known_geometry, recurrent_layer
from memkv_pp.units import GIB, parse_size

F16 = parse_pair("f16")
DEFAULT = parse_pair("q8_0:q5_1")


def same(geometry: ModelGeometry, pair: Pair) -> tuple[Pair, ...]:
    return (pair,) * (geometry.num_layers + len(geometry.nextn_layers))


def planned(
    geometry: ModelGeometry,
    *stage_bytes: int,
    pair: Pair = F16,
    fence: FenceChoice = "balanced",
    ctx: int | None = None,
    sequences: int | None = None,
    options: CacheOptions | None = None,
    **budget,
) -> CapacityPlan:
    plan = plan_capacity(
        geometry,
        same(geometry, pair),
        PlanRequest(
            budget=Budget(stage_bytes=stage_bytes, **({"cache_only": True} | budget)),
            options=options or CacheOptions(),
            fence=fence,
            ctx=ctx,
            sequences=sequences,
        ),
    )
    for row in plan.stages:
        assert row.context_bytes + row.stranded_bytes == row.cache_budget_bytes
        spent = row.weight_bytes + row.fixed_bytes + row.reserve_bytes + row.cache_budget_bytes
        assert spent == row.device_bytes
    assert plan.stranded_bytes == sum(row.stranded_bytes for row in plan.stages)
    return plan


def layers_of_2048_bytes(num_layers: int) -> ModelGeometry:
    return uniform_geometry(num_layers, kv_heads=4, head_size=128)


def test_every_stage_is_checked_against_its_own_layers_and_budget():
    plan = planned(layers_of_2048_bytes(48), parse_size("3.18GiB"), 8 * GIB, fence=(0, 16, 48))
    assert plan.capacity_tokens == 104_192
    assert plan.binding_stage == 0
    assert [row.capacity_tokens for row in plan.stages] == [104_192, 131_072]
    assert [row.bytes_per_token for row in plan.stages] == [32_768, 65_536]


def test_a_context_that_does_not_fit_lists_need_and_have_of_both_stages():
    budgets = parse_size("3.18GiB"), 8 * GIB
    with pytest.raises(CapacityError) as refused:
        planned(layers_of_2048_bytes(48), *budgets, fence=(0, 16, 48), ctx=262_144)
    stages = [(s.stage, s.have_bytes, s.need_bytes) for s in refused.value.stages]
    assert stages == [(0, budgets[0], 8 * GIB), (1, budgets[1], 16 * GIB)]
    message = refused.value.message
    assert f"stage 0 needs {8 * GIB} bytes and has {budgets[0]}" in message
    assert f"stage 1 needs {16 * GIB} bytes and has {budgets[1]}" in message
    assert "--ctx 104192 or less" in refused.value.hint


def test_a_refused_context_names_the_fence_that_holds_it():
    with pytest.raises(CapacityError, match="--fence 0,32,64 fits"):
        planned(layers_of_2048_bytes(64), 5 * GIB, 5 * GIB, fence=(0, 56, 64), ctx=81_920)


@pytest.mark.slow
def test_a_lopsided_fence_strands_bytes_that_the_planner_finds_again():
    plan = planned(layers_of_2048_bytes(64), 5 * GIB, 5 * GIB, fence=(0, 56, 64))
    assert plan.capacity_tokens == 46_800
    assert plan.stages[1].context_bytes == 766_771_200
    assert plan.stages[1].stranded_bytes == 5 * GIB - 766_771_200
    assert round(plan.stages[1].stranded_bytes / GIB, 3) == 4.286
    (better,) = plan.alternatives
    assert (better.fence, better.capacity_tokens, better.stranded_bytes) == ((0, 32, 64), 81_920, 0)
    assert "--fence 0,32,64 holds 35120 more tokens" in better.says
    assert planned(layers_of_2048_bytes(64), 5 * GIB, 5 * GIB).fence == (0, 32, 64)


def test_unequal_budgets_get_an_unequal_fence():
    geometry = layers_of_2048_bytes(48)
    even = planned(geometry, 20 * GIB, 8 * GIB, fence="even")
    assert (even.fence, even.capacity_tokens) == ((0, 24, 48), 174_752)
    assert round(even.stranded_bytes / GIB, 1) == 12.0
    assert [other.fence for other in even.alternatives] == [(0, 34, 48)]
    best = planned(geometry, 20 * GIB, 8 * GIB)
    assert (best.fence, best.capacity_tokens) == ((0, 34, 48), 299_584)
    assert round(best.stranded_bytes / GIB, 2) == 0.57
    assert best.alternatives == ()


def test_a_context_that_fits_exactly_is_planned_and_one_byte_less_is_refused():
    geometry = layers_of_2048_bytes(4)
    need = 2 * 2048 * 8192
    plan = planned(geometry, need, need, ctx=8192)
    assert (plan.stranded_bytes, plan.sequences, plan.context_tokens) == (0, 1, 8192)
    with pytest.raises(CapacityError) as refused:
        planned(geometry, need, need - 1, fence="even", ctx=8192)
    assert [(s.have_bytes, s.need_bytes) for s in refused.value.stages] == [
        (need, need), (need - 1, need),
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [98_305, 106_496])
def test_one_short_stage_of_three_refuses_the_whole_context(tokens):
    geometry = layers_of_2048_bytes(3)
    rooms = 2048 * 131_072, 2048 * 131_072, 2048 * 98_304
    assert planned(geometry, *rooms, ctx=98_304).binding_stage == 2
    with pytest.raises(CapacityError, match="stage 2 needs"):
        planned(geometry, *rooms, ctx=tokens)


def test_an_explicit_context_is_charged_for_as_many_sequences_as_fit():
    plan = planned(layers_of_2048_bytes(4), GIB, GIB, ctx=8192)
    assert plan.sequences == GIB // (2 * 2048 * 8192) == 32
    assert [row.sequences for row in plan.stages] == [32, 32]
    assert plan.stages[0].context_bytes == GIB


def test_explicit_context_and_sequences_are_charged_as_given():
    plan = planned(layers_of_2048_bytes(4), GIB, GIB, ctx=100, sequences=3)
    assert plan.sequences == 3
    assert plan.stages[0].context_bytes == 3 * 2 * 2048 * 112
    assert plan.capacity_tokens == 262_144
    with pytest.raises(CapacityError, match="--ctx 8192 --sequences 33 does not fit"):
        planned(layers_of_2048_bytes(4), GIB, GIB, ctx=8192, sequences=33)


def test_sequences_alone_share_what_there_is_up_to_the_models_own_context():
    geometry = layers_of_2048_bytes(4)
    assert planned(geometry, GIB, GIB, sequences=5).context_tokens == 52_416
    own = replace(geometry, context_tokens=4096)
    plan = planned(own, GIB, GIB, sequences=5)
    assert (plan.context_tokens, plan.sequences) == (4096, 5)
    assert plan.stages[0].context_bytes == 5 * 4096 * 2 * 2048
    with pytest.raises(CapacityError, match="--ctx 16 --sequences 16385"):
        planned(geometry, GIB, GIB, sequences=16_385)


def test_without_a_context_the_longest_sequence_is_charged_and_the_models_own_is_counted():
    geometry = replace(layers_of_2048_bytes(4), context_tokens=65_536)
    plan = planned(geometry, GIB, GIB)
    assert (plan.capacity_tokens, plan.context_tokens, plan.sequences) == (262_144, 65_536, 4)
    assert plan.stranded_bytes == 0
    short = planned(replace(geometry, context_tokens=10**9), GIB, GIB)
    assert (short.context_tokens, short.sequences) == (262_144, 1)


def test_a_stage_that_does_not_grow_has_no_capacity_of_its_own_and_never_binds():
    recurrent = recurrent_layer(key_groups=2, value_heads=2, state_size=8)
    full = full_layer(4, 128)
    geometry = ModelGeometry(name="mixed", family="mixed", layers=(recurrent, full, full))
    plan = planned(geometry, 10_000, GIB, fence=(0, 1, 3))
    assert [row.capacity_tokens for row in plan.stages] == [None, 262_144]
    assert (plan.binding_stage, plan.capacity_tokens) == (1, 262_144)
    assert plan.stages[0].bytes_per_token == plan.stages[0].record_bytes == 0
    assert plan.stages[0].context_bytes == plan.stages[0].bytes_per_sequence > 0


def test_a_model_that_never_grows_needs_a_context_and_is_bound_by_its_sequences():
    recurrent = recurrent_layer(key_groups=2, value_heads=2, state_size=8)
    geometry = ModelGeometry(name="state", family="state", layers=(recurrent,) * 2)
    with pytest.raises(ConfigError, match="--ctx"):
        planned(geometry, GIB, GIB)
    plan = planned(geometry, 10_000, 20_000, ctx=100)
    each = plan.stages[0].bytes_per_sequence
    assert plan.capacity_tokens is None
    assert plan.sequences == 10_000 // each
    assert plan.binding_stage == 0


def test_room_for_less_than_one_block_is_a_shortage_not_a_plan():
    with pytest.raises(CapacityError, match="--ctx 16 --sequences 1 does not fit"):
        planned(layers_of_2048_bytes(2), GIB, 1000)


def weighted(num_layers: int = 8) -> ModelGeometry:
    layer = replace(full_layer(4, 128), weight_elements=1_000_000)
    return ModelGeometry(
        name="weighted",
        family="weighted",
        layers=(layer,) * num_layers,
        hidden_size=64,
        vocabulary_size=1000,
        embedding_elements=64_000,
        head_elements=64_000,
        norm_elements=64,
        context_tokens=4096,
    )


def test_devices_pay_for_weights_buffers_and_reserve_before_the_cache():
    plan = planned(
        weighted(), 40_000_000, 24_000_000, cache_only=False, reserve_bytes=1_000_000, dtype_bytes=2
    )
    first, last = plan.stages
    assert first.weight_bytes == 2 * (first.layers[1] * 1_000_000 + 64_000)
    assert last.weight_bytes == 2 * ((8 - last.layers[0]) * 1_000_000 + 64_064)
    each = 2 * 512 * 64 * 2 + 512 * 4 * 64 * 2 + 4
    assert (first.fixed_bytes, last.fixed_bytes) == (each, each + 1000 * 4)
    assert {row.reserve_bytes for row in plan.stages} == {1_000_000}
    assert plan.fence == (0, 5, 8)


def test_weights_that_do_not_fit_are_a_shortage_of_device_bytes():
    with pytest.raises(CapacityError, match="weights, buffers and reserve") as refused:
        planned(weighted(), 5_000_000, 5_000_000, cache_only=False, dtype_bytes=2)
    assert all(s.need_bytes > s.have_bytes == 5_000_000 for s in refused.value.stages)


def test_a_written_fence_must_agree_with_the_number_of_devices():
    with pytest.raises(FenceError, match="makes 3 stages, 2 were asked for"):
        planned(layers_of_2048_bytes(8), GIB, GIB, fence=(0, 2, 4, 8))


def test_no_devices_and_no_tokens_are_refused_with_their_knob():
    with pytest.raises(ConfigError, match="--device"):
        planned(layers_of_2048_bytes(8))
    with pytest.raises(ConfigError, match="--ctx: 0"):
        planned(layers_of_2048_bytes(8), GIB, ctx=0)
    with pytest.raises(ConfigError, match="--sequences: -1"):
        planned(layers_of_2048_bytes(8), GIB, sequences=-1)


def test_the_balanced_fence_keeps_shared_layers_with_their_sources():
    geometry = known_geometry("gemma4-e4b")
    plan = planned(geometry, GIB, GIB, pair=DEFAULT)
    assert Fence(plan.fence).stage_of(22) == Fence(plan.fence).stage_of(41)
    with pytest.raises(FenceError, match="reads the cache of layer"):
        planned(geometry, GIB, GIB, GIB, pair=DEFAULT, fence="even")


def test_nextn_layers_are_paid_by_the_last_stage_while_speculating():
    geometry = known_geometry("qwen3.5-9b")
    plan = planned(
        geometry, GIB, GIB, pair=DEFAULT, fence="even", options=CacheOptions(spec_tokens=2)
    )
    assert [row.bytes_per_token for row in plan.stages] == [7_424, 9_280]
    assert plan.binding_stage == 1


def test_the_flat_layout_is_planned_in_whole_records():
    options = CacheOptions(layout=Layout.FLAT, flat_rows=1000)
    plan = planned(layers_of_2048_bytes(4), GIB, GIB, options=options, ctx=1000)
    record = plan.stages[0].record_bytes
    assert plan.capacity_tokens == 1000
    assert plan.sequences == GIB // record
    assert plan.stages[0].context_bytes == plan.sequences * record


@pytest.mark.slow
@given(
    rooms=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    interval=st.integers(1, 3),
    num_layers=st.integers(3, 7),
)
def test_the_balanced_fence_holds_as_many_tokens_as_any_other(rooms, interval, num_layers):
    recurrent = recurrent_layer(key_groups=1, value_heads=1, state_size=16)
    geometry = ModelGeometry(
        name="drawn",
        family="drawn",
        layers=tuple(recurrent if i % interval else full_layer(1, 32) for i in range(num_layers)),
    )
    options = CacheOptions(block_tokens=4)
    budget = Budget(stage_bytes=tuple(room * 1024 for room in rooms), cache_only=True)
    formats = same(geometry, F16)

    def capacity(fence: Fence) -> float:
        sizings = size_fence(geometry, formats, fence, options)
        found = [s.capacity_tokens(budget.stage_bytes[s.stage]) for s in sizings]
        return min(float("inf") if tokens is None else tokens for tokens in found)

    inner = [(c,) for c in range(1, num_layers)]
    if len(rooms) == 3:
        inner = [(a, b) for (a,) in inner for (b,) in inner if a < b]
    best = max(capacity(Fence((0, *cuts, num_layers))) for cuts in inner)
    chosen = choose_fence("balanced", geometry, formats, options, budget)
    assert capacity(chosen) == best


@pytest.mark.parametrize("layout", [Layout.PAGED, Layout.FLAT])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "gemma4-e4b", "step-3.5-flash"])
def test_the_layers_of_size_add_up_to_the_stage_the_planner_charges(name, layout):
    geometry = known_geometry(name)
    options = CacheOptions(layout=layout, flat_rows=5000 if layout is Layout.FLAT else 0)
    size = size_model(geometry, same(geometry, DEFAULT), options, 5000)
    plan = planned(
        geometry, 64 * GIB, pair=DEFAULT, fence="even", options=options, ctx=5000, sequences=1
    )
    assert sum(layer.allocated_bytes for layer in size.layers) == plan.stages[0].context_bytes
    assert sum(layer.context_bytes for layer in size.layers) == size.total_bytes
    assert size.bytes_per_token == plan.stages[0].bytes_per_token
    assert size.bytes_per_sequence == plan.stages[0].bytes_per_sequence


def test_a_layer_of_size_shows_live_rows_beside_what_is_allocated():
    size = size_model(
        known_geometry("step-3.5-flash"),
        same(known_geometry("step-3.5-flash"), DEFAULT),
        CacheOptions(),
        5001,
    )
    full, sliding = size.layers[0], size.layers[1]
    assert (full.context_bytes, full.allocated_bytes) == (5001 * 1856, 5008 * 1856)
    assert (sliding.context_bytes, sliding.allocated_bytes) == (512 * 1856, 1120 * 1856)
    assert size.ring_rows == 1120
    assert len(size.layers) == 45


def test_size_counts_nextn_layers_while_speculating_and_no_format_for_states():
    geometry = known_geometry("qwen3.5-9b")
    size = size_model(geometry, same(geometry, DEFAULT), CacheOptions(spec_tokens=1), 100)
    assert [layer.layer for layer in size.layers] == list(range(33))
    assert size.bytes_per_token == 16_704
    assert (size.layers[0].k_format, size.layers[3].k_format) == (None, "q8_0")
    assert size.layers[0].context_bytes == 98_304 + 2_097_152
    assert size.layers[0].allocated_bytes == 2 * size.layers[0].context_bytes


def test_a_short_context_fills_no_ring():
    geometry = known_geometry("step-3.5-flash")
    assert size_model(geometry, same(geometry, DEFAULT), CacheOptions(), 100).ring_rows == 100
    no_ring = CacheOptions(ring=False)
    assert size_model(geometry, same(geometry, DEFAULT), no_ring, 5000).ring_rows == 0
