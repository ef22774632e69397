"""Which fence: the user's own cuts, even by layers, or the best for what the stages have."""

from collections.abc import Sequence

from memkv_pp.fence import Fence, even, explicit
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.request import Budget, FenceChoice, PlanRequest, check_pinned, check_pins
from memkv_pp.sizing import CacheOptions

__all__ = ["Budget", "FenceChoice", "choose_fence", "requested_fence"]


def choose_fence(
    choice: FenceChoice,
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    options: CacheOptions,
    budget: Budget,
    *,
    sequences: int | None = None,
) -> Fence:
    """The fence that ``choice`` means here; ``balanced`` is the one of the greatest capacity.

    FenceError where the cuts do not agree with the model or with the number of stages.
    """
    request = PlanRequest(budget=budget, options=options, fence=choice, sequences=sequences)
    return requested_fence(geometry, formats, request)


def requested_fence(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest
) -> Fence:
    """The fence that ``request`` names, or asks to be found.

    FenceError where it does not agree with the model, the number of stages or the pins.
    """
    num_stages = request.budget.num_stages
    if request.fence == "balanced":
        # Arrays come in only where a search needs them: every command imports this module.
        from memkv_pp.plan.optimise import best_fence

        return best_fence(geometry, formats, request)
    if request.fence == "even":
        fence = even(geometry.num_layers, num_stages)
    else:
        fence = explicit(request.fence, geometry.num_layers, num_stages)
    if request.pins:
        check_pins(request.pins, geometry, num_stages)
        check_pinned(fence, request.pins)
    return fence
