"""Suite ``plan``: how long the search for the best fence takes.

Peers: ``every-fence`` evaluates all of them, for a model small enough; ``second`` is one second,
within which a model of 512 layers on 64 devices is to be planned.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from memkv_pp.bench.rows import Row, interleaved_medians, lower_is_better
from memkv_pp.clock import SystemClock
from memkv_pp.errors import InternalError
from memkv_pp.fence import Fence
from memkv_pp.formats import DEFAULT_PAIR, Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.optimise import best_fence
from memkv_pp.plan.planner import PlanRequest, evaluate
from memkv_pp.plan.profiles import load_profile
from memkv_pp.plan.request import OBJECTIVES, Budget
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.geometries import full_layer, recurrent_layer, sliding_layer
from memkv_pp.units import GIB

SMALL_LAYERS = 16
NUM_LAYERS, NUM_DEVICES = 512, 64

_THREADS = 1
_PROFILES = ("h100-80g", "l40s")


def run(
    *, rounds: int, num_layers: int = NUM_LAYERS, num_devices: int = NUM_DEVICES
) -> Iterator[Row]:
    """The suite's rows, one by one; InternalError if the search misses the best of every fence."""
    few = (24 * GIB, 16 * GIB, 12 * GIB, 24 * GIB)
    yield _beside_every_fence(_model(SMALL_LAYERS), _request(few), rounds)
    model = _model(num_layers)
    equal = (24 * GIB,) * num_devices
    uneven = tuple((16 + 4 * (i % 5)) * GIB + i for i in range(num_devices))
    for objective in OBJECTIVES:
        for devices, sizes in (("equal", equal), ("uneven", uneven)):
            name = f"plan/{num_layers}x{num_devices}/{objective}/{devices}"
            request = replace(_request(sizes), objective=objective)
            yield _beside_a_second(name, model, request, rounds)


def _beside_every_fence(model: ModelGeometry, request: PlanRequest, rounds: int) -> Row:
    layers, stages = model.num_layers, request.budget.num_stages
    formats = _formats(model)

    def searched() -> CapacityPlan:
        return evaluate(model, formats, request, best_fence(model, formats, request))

    def tried() -> CapacityPlan:
        fences = [
            Fence((0, *inner, layers)) for inner in combinations(range(1, layers), stages - 1)
        ]
        return min((evaluate(model, formats, request, fence) for fence in fences), key=_merit)

    if searched() != tried():
        raise InternalError(f"the search found {searched().fence}, the best is {tried().fence}")
    ours, peer = interleaved_medians([_seconds(searched), _seconds(tried)], rounds)
    name = f"plan/{layers}x{stages}/capacity"
    return lower_is_better(name, 1e3 * ours, "ms", "every-fence", 1e3 * peer, _THREADS)


def _beside_a_second(name: str, model: ModelGeometry, request: PlanRequest, rounds: int) -> Row:
    formats = _formats(model)
    (ours,) = interleaved_medians([_seconds(lambda: best_fence(model, formats, request))], rounds)
    return lower_is_better(name, ours, "s", "second", 1.0, _THREADS)


def _merit(plan: CapacityPlan) -> tuple[int, int, int, Sequence[int]]:
    largest = max(row.context_bytes for row in plan.stages)
    return -(plan.capacity_tokens or 0), plan.stranded_bytes, largest, plan.fence


def _seconds(call: Callable[[], object]) -> Callable[[], float]:
    clock = SystemClock()

    def timed() -> float:
        start = clock.now()
        call()
        return clock.now() - start

    return timed


def _request(device_bytes: tuple[int, ...]) -> PlanRequest:
    profiles = [load_profile(name) for name in _PROFILES]
    return PlanRequest(
        budget=Budget(stage_bytes=device_bytes, reserve_bytes=GIB),
        options=CacheOptions(),
        profiles=tuple(profiles[i % len(profiles)] for i in range(len(device_bytes))),
    )


def _model(num_layers: int) -> ModelGeometry:
    """Full, sliding and recurrent layers in turns, 400 MB of weights each, and a 128 k context."""
    kinds = (
        full_layer(8, 128),
        sliding_layer(8, 128, 1024),
        recurrent_layer(key_groups=16, value_heads=32, state_size=128),
        full_layer(3, 96),
    )
    return ModelGeometry(
        name="mixed",
        family="mixed",
        layers=tuple(
            replace(kinds[i % len(kinds)], weight_elements=200_000_000) for i in range(num_layers)
        ),
        context_tokens=131_072,
        hidden_size=8192,
        vocabulary_size=128_256,
        embedding_elements=8192 * 128_256,
        head_elements=8192 * 128_256,
        norm_elements=8192,
    )


def _formats(model: ModelGeometry) -> tuple[Pair, ...]:
    return (DEFAULT_PAIR,) * model.num_layers
