"""The optimiser beside every fence there is, and the limits a user sets on it."""

from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from random import Random

import pytest

from memkv_pp.errors import CapacityError, ConfigError, FenceError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry, uniform_geometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.fences import choose_fence, requested_fence
from memkv_pp.plan.optimise import best_fence
from memkv_pp.plan.planner import PlanRequest, evaluate, plan_capacity
from memkv_pp.plan.profiles import DeviceProfile
from memkv_pp.plan.ranges import SATURATED_BYTES, RangeSizes
from memkv_pp.plan.request import Budget, Objective
from memkv_pp.plan.stage_times import StageTimes
from memkv_pp.plan.times import linked, stage_seconds
from memkv_pp.sizing import CacheOptions, Layout, size_fence, size_layers
from memkv_pp.testing.geometries import (
    full_layer,
    known_geometry,
    latent_layer,
    recurrent_layer,
    shared_layer,
    sliding_layer,
)
from memkv_pp.units import GIB

PAIRS = [parse_pair(name) for name in ("f16", "q8_0:q5_1", "q4_0", "bf16:q8_0")]


@dataclass(frozen=True, kw_only=True)
class Case:
    geometry: ModelGeometry
    formats: tuple[Pair, ...]
    request: PlanRequest


def drawn_layer(random: Random, before: list[LayerGeometry]) -> LayerGeometry:
    kinds = [
        full_layer(random.choice([1, 2]), 32),
        full_layer(random.choice([1, 3]), 64),
        sliding_layer(1, 32, random.choice([4, 9, 40])),
        recurrent_layer(key_groups=1, value_heads=random.choice([1, 2]), state_size=5),
        LayerGeometry(kind=LayerKind.SHORT_CONV, conv_channels=24, conv_kernel=3),
        latent_layer(32, 32),
    ]
    sources = [i for i, layer in enumerate(before) if layer.kind is not LayerKind.SHARED]
    if sources and random.random() < 0.12:
        layer = shared_layer(random.choice(sources[-2:]))
    else:
        layer = random.choice(kinds)
    return replace(layer, weight_elements=random.choice([0, 300, 300, 1000]))


def drawn_profile(random: Random) -> DeviceProfile:
    return DeviceProfile(
        name="drawn",
        memory_bytes=1,
        bandwidth_bytes_per_s=random.choice([1e6, 2e6]),
        half_flops_per_s=random.choice([1e6, 1e9]),
        single_flops_per_s=1e6,
        link="drawn",
        link_bytes_per_s=random.choice([1e5, 1e6]),
        source="drawn",
    )


def drawn_case(random: Random) -> Case:
    layers: list[LayerGeometry] = []
    for _ in range(random.randint(3, 7)):
        layers.append(drawn_layer(random, layers))
    stages = random.randint(2, min(4, len(layers))) if random.random() < 0.95 else 1
    vocabulary = random.choice([0, 5])
    geometry = ModelGeometry(
        name="drawn",
        family="drawn",
        layers=tuple(layers),
        nextn_layers=random.choice([(), (full_layer(1, 32),), (sliding_layer(1, 32, 60),)]),
        context_tokens=random.choice([0, 50, 50, 100_000]),
        hidden_size=8,
        vocabulary_size=vocabulary,
        embedding_elements=8 * vocabulary,
        head_elements=8 * vocabulary,
        norm_elements=8,
        tied_embedding=random.random() < 0.5,
    )
    flat = random.random() < 0.15
    options = CacheOptions(
        block_tokens=random.choice([1, 4, 16]),
        prefill_chunk=random.choice([1, 8]),
        rewind_slack=random.choice([0, 4]),
        ring=random.random() < 0.8,
        layout=Layout.FLAT if flat else Layout.PAGED,
        flat_rows=60 if flat else 0,
        spec_tokens=random.choice([0, 0, 2]),
    )
    small = random.choice([10_000, 30_000, 60_000, 400_000])
    equal = random.random() < 0.3
    rooms = [random.randint(small // 2, small) for _ in range(stages)]
    pinned = random.sample(range(len(layers)), min(len(layers), random.choice([0, 0, 0, 0, 1, 2])))
    caps = [s for s in range(stages) if random.random() < 0.1]
    objectives: tuple[Objective, ...] = ("capacity", "capacity", "sequences", "time")
    request = PlanRequest(
        budget=Budget(
            stage_bytes=tuple(rooms[0] if equal else room for room in rooms),
            cache_only=random.random() < 0.5,
            reserve_bytes=random.choice([0, 100]),
        ),
        options=options,
        ctx=random.choice([None, None, 10, 33]),
        sequences=random.choice([None, None, 1, 3]),
        objective=random.choice(objectives),
        pins=tuple((layer, random.randrange(stages)) for layer in pinned),
        max_stage_bytes=tuple((s, random.randint(small // 2, small)) for s in caps),
        profiles=tuple(drawn_profile(random) for _ in range(stages)),
    )
    count = len(layers) + len(geometry.nextn_layers)
    return Case(
        geometry=geometry,
        formats=tuple(random.choice(PAIRS) for _ in range(count)),
        request=request,
    )


def drawn_padded_case(random: Random) -> Case:
    """Records that are mostly padding, so that what a fence's load takes depends on the fence."""
    count = random.randint(4, 7)
    stages = random.randint(2, 3)
    geometry = ModelGeometry(
        name="padded",
        family="padded",
        layers=tuple(full_layer(random.choice([1, 2]), 16) for _ in range(count)),
        context_tokens=4,
    )
    loads: tuple[tuple[int | None, Objective], ...] = (
        (2, "capacity"), (2, "time"), (None, "sequences"), (None, "time"),
    )  # fmt: skip
    ctx, objective = random.choice(loads)
    request = PlanRequest(
        budget=Budget(
            stage_bytes=tuple(random.randint(1, 12) * 512 for _ in range(stages)), cache_only=True
        ),
        options=CacheOptions(block_tokens=1),
        ctx=ctx,
        objective=objective,
        profiles=(replace(drawn_profile(random), link_latency_s=1.0),) * stages,
    )
    return Case(geometry=geometry, formats=(PAIRS[0],) * count, request=request)


def every_fence(case: Case) -> list[Fence]:
    layers, stages = case.geometry.num_layers, case.request.budget.num_stages
    fences = [Fence((0, *inner, layers)) for inner in combinations(range(1, layers), stages - 1)]
    return [
        fence
        for fence in fences
        if all(fence.stage_of(layer) == stage for layer, stage in case.request.pins)
        and all(fence.stage_of(a) == fence.stage_of(b) for a, b in case.geometry.shared_edges())
    ]


def longest_each(case: Case, plan: CapacityPlan) -> float:
    """The longest that each of the sequences asked for can be, straight from sizing."""
    request = case.request
    caps = dict(request.max_stage_bytes)
    found = []
    for row, sizing in zip(
        plan.stages,
        size_fence(case.geometry, case.formats, Fence(plan.fence), request.options),
        strict=True,
    ):
        spent = row.weight_bytes + row.fixed_bytes
        room = min(row.cache_budget_bytes, caps.get(row.stage, inf) - spent)
        tokens = sizing.capacity_tokens(int(room), request.sequences or 1)
        found.append(inf if tokens is None else tokens)
    return min(found)


def slowest(case: Case, plan: CapacityPlan) -> float:
    request = case.request
    stages = len(plan.stages)
    copies = request.sequences or 1
    return max(
        stage_seconds(
            case.geometry,
            case.formats,
            range(*row.layers),
            profile,
            first=row.stage == 0,
            last=row.stage == stages - 1,
            context_tokens=plan.context_tokens,
            sequences=-(-copies // min(copies, stages)),
            dtype_bytes=request.budget.dtype_bytes,
            options=request.options,
        )
        for row, profile in zip(plan.stages, linked(request.profiles), strict=True)
    )


def fitting_sequences(case: Case, plan: CapacityPlan) -> int:
    return min(row.sequences for row in plan.stages if row.sequences is not None)


def merit(case: Case, plan: CapacityPlan) -> tuple:
    """Smaller is better: the objective, then the contract's ties."""
    if case.request.objective == "capacity":
        objective = (-longest_each(case, plan),)
    elif case.request.objective == "sequences":
        objective = (-plan.context_tokens, -fitting_sequences(case, plan))
    else:
        objective = (-plan.context_tokens, slowest(case, plan))
    largest = max(row.context_bytes for row in plan.stages)
    return (*objective, plan.stranded_bytes, largest, plan.fence)


def evaluated(case: Case, fence: Fence) -> CapacityPlan | None:
    """The plan on ``fence``; None where it does not fit."""
    try:
        return evaluate(case.geometry, case.formats, case.request, fence)
    except CapacityError:
        return None


def check(case: Case) -> str:
    """Compare the search with every fence; says what kind of case it was."""
    fences = every_fence(case)
    if not fences:
        with pytest.raises(FenceError, match=r"^--(pin|fence)"):
            best_fence(case.geometry, case.formats, case.request)
        return "no fence"
    chosen = best_fence(case.geometry, case.formats, case.request)
    assert chosen in fences
    try:
        plans = [plan for fence in fences if (plan := evaluated(case, fence)) is not None]
    except ConfigError:
        assert (case.request.ctx, case.geometry.context_tokens) == (None, 0)
        return "no context"
    found = evaluated(case, chosen)
    if found is None:
        assert not plans
        return "nothing fits"
    assert merit(case, found) == min(merit(case, plan) for plan in plans)
    return "searched" if len(plans) > 1 else "one fits"


def searches(seed: int, count: int) -> list[str]:
    random = Random(seed)
    draws = (drawn_case, drawn_case, drawn_case, drawn_padded_case)
    return [check(draws[i % len(draws)](random)) for i in range(count)]


@pytest.mark.slow
def test_the_search_finds_what_trying_every_fence_finds():
    kinds = searches(20_250_101, 2000)
    assert kinds.count("searched") > 700
    assert {"no fence", "no context", "nothing fits", "one fits", "searched"} == set(kinds)


@pytest.mark.full
def test_the_search_finds_what_trying_every_fence_finds_in_many_more_cases():
    assert searches(20_250_102, 20_000).count("searched") > 7000


@pytest.mark.slow
def test_the_bytes_of_every_run_of_layers_are_those_of_sizing():
    random = Random(7)
    for _ in range(60):
        case = drawn_case(random)
        geometry, options = case.geometry, case.request.options
        num_layers = geometry.num_layers
        sizes = RangeSizes(geometry, case.formats, options)
        for rows, sequences in ((1, 1), (9, 2), (60, 3)):
            table = sizes.context_bytes(rows, sequences)
            least = 0
            for lo, hi in combinations(range(num_layers + 1), 2):
                drafts = options.spec_tokens > 0 and hi == num_layers
                sized = size_layers(
                    geometry, case.formats, range(lo, hi), options, with_nextn=drafts
                ).context_bytes(rows, sequences)
                assert table[hi, lo] == sized
                least = max(least, sized)
            assert sizes.least_bytes(rows, sequences) <= least


@pytest.mark.slow
def test_the_seconds_of_every_run_of_layers_are_those_predicted():
    random = Random(8)
    for _ in range(60):
        case = drawn_case(random)
        request, stages = case.request, case.request.budget.num_stages
        times = StageTimes(case.geometry, case.formats, request, 50)
        for stage, profile in enumerate(linked(request.profiles)):
            for lo, hi in combinations(range(case.geometry.num_layers + 1), 2):
                assert times.seconds(stage)[hi, lo] == stage_seconds(
                    case.geometry,
                    case.formats,
                    range(lo, hi),
                    profile,
                    first=stage == 0,
                    last=stage == stages - 1,
                    context_tokens=50,
                    sequences=-(-request.copies // min(request.copies, stages)),
                    dtype_bytes=2,
                    options=request.options,
                )


def test_figures_past_the_largest_integer_stop_below_it():
    geometry = uniform_geometry(4, kv_heads=8, head_size=128)
    sizes = RangeSizes(geometry, (PAIRS[0],) * 4, CacheOptions())
    table = sizes.context_bytes(1 << 50, 1 << 40)
    assert (table.min(), table.max()) == (0, SATURATED_BYTES)
    assert sizes.context_bytes(16, 1)[4, 0] == 4 * 16 * 4096


def layers_of_2048_bytes(num_layers: int) -> ModelGeometry:
    return uniform_geometry(num_layers, kv_heads=4, head_size=128)


def asked(geometry: ModelGeometry, *stage_bytes: int, **fields) -> Case:
    budget = Budget(stage_bytes=stage_bytes, cache_only=True)
    return Case(
        geometry=geometry,
        formats=(PAIRS[0],) * (geometry.num_layers + len(geometry.nextn_layers)),
        request=PlanRequest(budget=budget, options=CacheOptions(), **fields),
    )


def planned(case: Case) -> CapacityPlan:
    return plan_capacity(case.geometry, case.formats, case.request)


def test_equal_capacity_is_told_apart_by_idle_bytes_then_the_largest_stage_then_the_cuts():
    # One token of three heads of 16 in f16 is 192 bytes: 256 alone, 512 for two, 768 for four.
    layer = full_layer(3, 16)
    geometry = ModelGeometry(name="padded", family="padded", layers=(layer,) * 6)
    budget = Budget(stage_bytes=(768,) * 3, cache_only=True)
    request = PlanRequest(budget=budget, options=CacheOptions(block_tokens=1))
    case = Case(geometry=geometry, formats=(PAIRS[0],) * 6, request=request)
    sums = {
        fence.cuts: [row.context_bytes for row in found.stages]
        for fence in every_fence(case)
        if (found := evaluated(case, fence)) is not None and found.capacity_tokens == 1
    }
    assert sums[0, 2, 4, 6] == [512, 512, 512]
    assert sums[0, 1, 2, 6] == [256, 256, 768]
    assert sums[0, 1, 3, 6] == [256, 512, 768]
    assert len(sums) == 10
    assert planned(case).fence == (0, 2, 4, 6)


def test_loads_of_equal_bytes_and_different_lengths_are_told_apart_by_the_largest_stage():
    geometry = ModelGeometry(
        name="padded",
        family="padded",
        layers=tuple(full_layer(heads, 16) for heads in (2, 1, 2, 2, 2, 2, 2)),
        context_tokens=4,
    )
    case = asked(geometry, 4096, 3584, 5120, objective="sequences")
    request = replace(case.request, options=CacheOptions(block_tokens=1))
    case = replace(case, request=request)
    assert check(case) == "searched"
    lengths = {
        plan.capacity_tokens
        for fence in every_fence(case)
        if (plan := evaluated(case, fence)) is not None
        and plan.stranded_bytes == planned(case).stranded_bytes
        and plan.sequences == planned(case).sequences
    }
    assert len(lengths) > 1


def test_stages_without_bounds_strand_nothing_and_are_cut_by_their_largest_cache():
    endless = (1 << 62,) * 2
    state = recurrent_layer(key_groups=1, value_heads=1, state_size=5)
    geometry = ModelGeometry(name="states", family="states", layers=(state,) * 6)
    case = asked(geometry, *endless)
    fence = choose_fence(
        "balanced", geometry, case.formats, case.request.options, case.request.budget
    )
    assert fence.cuts == (0, 3, 6)


def test_a_pinned_layer_stays_on_its_stage_and_the_rest_is_the_best_that_leaves():
    geometry = layers_of_2048_bytes(48)
    free = planned(asked(geometry, 20 * GIB, 8 * GIB))
    assert free.fence == (0, 34, 48)
    pinned = planned(asked(geometry, 20 * GIB, 8 * GIB, pins=((30, 1),)))
    assert pinned.fence == (0, 30, 48)
    assert planned(asked(geometry, 20 * GIB, 8 * GIB, pins=((33, 0),))).fence == free.fence


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (((48, 0),), "layer 48 is not among 48 layers"),
        (((4, 3),), "stage 3 is not among 3 stages"),
        (((4, 0), (4, 1)), "layer 4 is given 0 and 1"),
        (((4, 2), (9, 1)), "layer 4 on stage 2 and layer 9 on stage 1 contradict"),
        (((4, 0), (5, 2)), r"layer 4 on stage 0 and layer 5 on stage 2 contradict: 1 cut\(s\)"),
        (((1, 2),), "layer 0 on stage 0 and layer 1 on stage 2 contradict"),
        (((47, 1),), "layer 47 on stage 1 and layer 47 on stage 2 contradict"),
    ],
)
def test_pins_that_cannot_be_kept_are_refused_by_name(pins, says):
    with pytest.raises(ConfigError, match=f"--pin: {says}"):
        planned(asked(layers_of_2048_bytes(48), GIB, GIB, GIB, pins=pins))


def test_a_pin_that_parts_a_shared_layer_from_its_source_is_refused():
    geometry = known_geometry("gemma4-e4b")
    with pytest.raises(FenceError, match="--pin: layer 22 on stage 0 and layer 41 on stage 1"):
        planned(asked(geometry, GIB, GIB, pins=((22, 0),)))


def test_a_written_fence_that_moves_a_pinned_layer_is_refused():
    geometry = layers_of_2048_bytes(8)
    case = asked(geometry, GIB, GIB, fence=(0, 4, 8), pins=((4, 0),))
    with pytest.raises(FenceError, match="layer 4 is to be on stage 0") as refused:
        planned(case)
    assert "--pin" in refused.value.message
    kept = replace(case.request, pins=((4, 1),))
    assert requested_fence(geometry, case.formats, kept).cuts == (0, 4, 8)


def test_a_capped_stage_gets_fewer_layers_and_the_rest_of_its_room_is_stranded():
    geometry = layers_of_2048_bytes(48)
    plan = planned(asked(geometry, 8 * GIB, 8 * GIB, max_stage_bytes=((1, 2 * GIB),)))
    assert plan.fence == (0, 39, 48)
    first, second = plan.stages
    assert second.cache_budget_bytes == 8 * GIB
    assert second.context_bytes <= 2 * GIB
    assert second.stranded_bytes == 8 * GIB - second.context_bytes
    assert second.capacity_tokens == 2 * GIB // (9 * 2048 * 16) * 16
    assert plan.capacity_tokens == min(first.capacity_tokens or 0, second.capacity_tokens)


def test_a_cap_that_is_too_tight_is_the_knob_that_the_refusal_names():
    geometry = layers_of_2048_bytes(8)
    with pytest.raises(CapacityError) as refused:
        planned(asked(geometry, GIB, GIB, max_stage_bytes=((1, 1000),)))
    assert "--max-stage-bytes" in refused.value.hint
    assert refused.value.stages[1].have_bytes == 1000
    with pytest.raises(ConfigError, match="--max-stage-bytes: stage 2 is not among 2 stages"):
        planned(asked(geometry, GIB, GIB, max_stage_bytes=((2, 1000),)))
    with pytest.raises(ConfigError, match="--max-stage-bytes: stage 1 is given 5 and 6"):
        planned(asked(geometry, GIB, GIB, max_stage_bytes=((1, 5), (1, 6))))


def test_a_cap_on_a_device_counts_its_weights():
    layer = replace(full_layer(4, 128), weight_elements=1000)
    geometry = ModelGeometry(name="heavy", family="heavy", layers=(layer,) * 4)
    case = asked(geometry, GIB, GIB, max_stage_bytes=((0, 1999),))
    device = replace(case.request, budget=Budget(stage_bytes=(GIB, GIB)))
    with pytest.raises(CapacityError, match="weights, buffers and reserve") as refused:
        plan_capacity(geometry, case.formats, device)
    assert refused.value.stages[0].need_bytes > GIB


def test_objectives_choose_different_fences_and_each_is_best_at_its_own():
    slow, fast = (
        DeviceProfile(
            name=name,
            memory_bytes=GIB,
            bandwidth_bytes_per_s=rate,
            half_flops_per_s=1e15,
            single_flops_per_s=1e15,
            link="none",
            link_bytes_per_s=1e12,
            link_latency_s=1e-9,
            source="a test",
        )
        for name, rate in (("slow", 1e9), ("fast", 3e9))
    )
    layer = replace(full_layer(4, 128), weight_elements=1_000_000)
    geometry = ModelGeometry(
        name="drawn", family="drawn", layers=(layer,) * 8, context_tokens=1024, hidden_size=8
    )
    case = asked(geometry, GIB, GIB, profiles=(slow, fast))
    assert planned(case).fence == (0, 4, 8)
    timed = replace(case.request, objective="time")
    assert planned(replace(case, request=timed)).fence == (0, 2, 8)
    (quicker,) = planned(replace(case, request=replace(timed, fence="even"))).alternatives
    assert quicker.fence == (0, 2, 8)
    assert "--fence 0,2,8 has a faster slowest stage" in quicker.says
    assert planned(replace(case, request=timed)).alternatives == ()
    with pytest.raises(ConfigError, match="--objective time: 0 device profiles for 2 stages"):
        asked(geometry, GIB, GIB, objective="time")


def test_an_alternative_is_better_at_the_objective_and_says_by_how_much():
    geometry = replace(layers_of_2048_bytes(8), context_tokens=1024)
    fields = {"fence": (0, 1, 8), "objective": "sequences"}
    plan = planned(asked(geometry, GIB, GIB, **fields))
    (better,) = plan.alternatives
    assert (better.fence, better.sequences - plan.sequences) == ((0, 4, 8), 55)
    assert "holds 55 more sequences" in better.says
    assert planned(asked(geometry, GIB, GIB, objective="sequences")).alternatives == ()
    small = planned(asked(geometry, 1 << 23, 1 << 23, **fields))
    assert small.context_tokens < 1024
    assert "holds contexts of 1024 tokens" in small.alternatives[0].says
