"""Will it fit, for how many tokens and sequences, and what lies idle: per stage, to the byte.

::

    device bytes   | weights | fixed | reserve | cache budget                |
    cache budget                               | context bytes | stranded    |

The context bytes come from ``sizing.py``, which the ledger and the allocation ask too. Cases of
other planners' faults that this one answers: ``field-lessons.md`` R1 and R2.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from memkv_pp.errors import CapacityError, ConfigError, FenceError, StageShortfall
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.capacity_plan import Alternative, CapacityPlan, StagePlan
from memkv_pp.plan.fences import requested_fence
from memkv_pp.plan.request import FenceChoice, PlanRequest
from memkv_pp.plan.times import predict
from memkv_pp.sizing import Layout, StageSizing, size_fence, stage_file_bytes

__all__ = ["PlanRequest", "evaluate", "plan_capacity"]


def plan_capacity(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest
) -> CapacityPlan:
    """Plan ``geometry`` on the stages of ``request``.

    Raises FenceError for a fence that does not fit the model, and CapacityError with every
    stage's have and need where weights, an explicit context or one first block does not fit.
    """
    fence = requested_fence(geometry, formats, request)
    others = _other_plans(geometry, formats, request, fence)
    try:
        plan = evaluate(geometry, formats, request, fence)
    except CapacityError as error:
        fitting = next(iter(others), None)
        better = f"--fence {_written(fitting.fence)} fits; or " if fitting else ""
        raise CapacityError(error.message, better + error.hint, error.stages) from None
    gain = _gain_of(geometry, formats, request)
    better = (other for other in others if gain(other) > gain(plan))
    return replace(
        plan,
        alternatives=tuple(
            _alternative(request, plan, other) for other in sorted(better, key=gain, reverse=True)
        ),
    )


def evaluate(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest, fence: Fence
) -> CapacityPlan:
    """The plan of ``request`` on ``fence``, whatever fence it names; without alternatives.

    Raises FenceError and CapacityError as ``plan_capacity`` does.
    """
    options, budget = request.options, request.budget
    sizings = size_fence(geometry, formats, fence, options)
    weights = [budget.weight_bytes(geometry, fence, s.stage, options) for s in sizings]
    fixed = [budget.fixed_bytes(geometry, fence, s.stage, options, request.copies) for s in sizings]
    spent = [weight + buffers for weight, buffers in zip(weights, fixed, strict=True)]
    budgets = [
        have - budget.reserve_bytes - taken
        for have, taken in zip(budget.stage_bytes, spent, strict=True)
    ]
    rooms = [request.usable_bytes(stage) - taken for stage, taken in enumerate(spent)]
    _check_weights(request, spent)
    load = _load(geometry, request, sizings, rooms)
    rows = tuple(
        StagePlan(
            stage=s.stage,
            layers=(s.lo, s.hi),
            device_bytes=budget.stage_bytes[s.stage],
            weight_bytes=weights[s.stage],
            file_bytes=stage_file_bytes(geometry, fence, s.stage),
            fixed_bytes=fixed[s.stage],
            reserve_bytes=budget.reserve_bytes,
            cache_budget_bytes=budgets[s.stage],
            bytes_per_token=s.bytes_per_token,
            ring_bytes_per_token=s.ring_bytes_per_token,
            ring_rows=s.ring_rows,
            bytes_per_sequence=s.bytes_per_sequence,
            record_bytes=s.record_bytes,
            padding_bytes=s.padding_bytes,
            context_bytes=s.context_bytes(load.rows, load.copies),
            capacity_tokens=s.capacity_tokens(rooms[s.stage]),
            sequences=s.sequences_within(load.context_tokens, rooms[s.stage]),
            stranded_bytes=budgets[s.stage] - s.context_bytes(load.rows, load.copies),
        )
        for s in sizings
    )
    return CapacityPlan(
        model=geometry.name,
        fence=fence.cuts,
        block_tokens=options.block_tokens,
        context_tokens=load.context_tokens,
        capacity_tokens=load.capacity_tokens,
        sequences=load.sequences,
        binding_stage=_binding_stage(rows),
        stranded_bytes=sum(row.stranded_bytes for row in rows),
        stages=rows,
        alternatives=(),
        warnings=geometry.warnings,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """``copies`` sequences of ``rows`` tokens are what the context bytes are for."""

    context_tokens: int
    capacity_tokens: int | None
    sequences: int
    rows: int
    copies: int


def _load(
    geometry: ModelGeometry,
    request: PlanRequest,
    sizings: Sequence[StageSizing],
    rooms: Sequence[int],
) -> _Load:
    capacity = _least(s.capacity_tokens(rooms[s.stage]) for s in sizings)
    if request.ctx is not None:
        context = request.ctx
        _check_fits(request, sizings, rooms, context, capacity)
    else:
        longest = _least(s.capacity_tokens(rooms[s.stage], request.copies) for s in sizings)
        if longest == 0:
            _check_fits(request, sizings, rooms, request.options.record_rows, capacity)
        context = min(filter(None, (geometry.context_tokens, longest)), default=0)
        if context == 0:
            raise ConfigError(
                "--ctx: the model names no context, and no layer grows with the tokens",
                "give --ctx",
            )
    fitting = _least(s.sequences_within(context, rooms[s.stage]) for s in sizings) or 0
    sequences = fitting if request.sequences is None else request.sequences
    alone = request.ctx is None and request.sequences is None
    return _Load(
        context_tokens=context,
        capacity_tokens=capacity,
        sequences=sequences,
        rows=(capacity or max(context, *(s.ring_rows for s in sizings))) if alone else context,
        copies=1 if alone else sequences,
    )


def _check_weights(request: PlanRequest, spent: Sequence[int]) -> None:
    stages = tuple(
        StageShortfall(
            stage=stage,
            have_bytes=request.budget.stage_bytes[stage],
            need_bytes=request.budget.stage_bytes[stage] - request.usable_bytes(stage) + taken,
        )
        for stage, taken in enumerate(spent)
    )
    if any(stage.need_bytes > stage.have_bytes for stage in stages):
        raise CapacityError(
            f"weights, buffers and reserve alone do not fit: {_says(stages)}",
            f"{_raised_caps(request)}give larger --device sizes or more of them, a smaller --dtype,"
            " or less --reserve",
            stages,
        )


def _check_fits(
    request: PlanRequest,
    sizings: Sequence[StageSizing],
    rooms: Sequence[int],
    rows: int,
    capacity: int | None,
) -> None:
    stages = tuple(
        StageShortfall(
            stage=s.stage,
            have_bytes=rooms[s.stage],
            need_bytes=s.context_bytes(rows, request.copies),
        )
        for s in sizings
    )
    if any(stage.need_bytes > stage.have_bytes for stage in stages):
        paged = sizings[0].options.layout is Layout.PAGED
        fewer = f"use --ctx {capacity} or less for one sequence, " if capacity and paged else ""
        raise CapacityError(
            f"--ctx {rows} --sequences {request.copies} does not fit: {_says(stages)}",
            f"{_raised_caps(request)}{fewer}a smaller --kv format, fewer --sequences, or more bytes"
            " per stage",
            stages,
        )


def _other_plans(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest, fence: Fence
) -> list[CapacityPlan]:
    """Plans of the balanced and the even fence that fit and differ from ``fence``."""
    plans: dict[tuple[int, ...], CapacityPlan] = {}
    choices: tuple[FenceChoice, ...] = ("balanced", "even")
    for choice in choices:
        if choice == request.fence:
            continue
        try:
            other = requested_fence(geometry, formats, replace(request, fence=choice))
            if other != fence:
                plans[other.cuts] = evaluate(geometry, formats, request, other)
        except (FenceError, CapacityError):
            continue
    return list(plans.values())


def _gain_of(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest
) -> Callable[[CapacityPlan], tuple[float, ...]]:
    """How good a plan is at the objective of ``request``: larger is better, then fewer stranded."""

    def gain(plan: CapacityPlan) -> tuple[float, ...]:
        if request.objective == "capacity":
            return plan.capacity_tokens is None, plan.capacity_tokens or 0, -plan.stranded_bytes
        if request.objective == "sequences":
            return plan.context_tokens, plan.sequences, -plan.stranded_bytes
        times = predict(
            geometry,
            formats,
            Fence(plan.fence),
            request.profiles,
            context_tokens=plan.context_tokens,
            sequences=request.copies,
            dtype_bytes=request.budget.dtype_bytes,
            options=request.options,
        )
        return plan.context_tokens, -times.step_seconds, -plan.stranded_bytes

    return gain


def _alternative(request: PlanRequest, plan: CapacityPlan, other: CapacityPlan) -> Alternative:
    idle = plan.stranded_bytes - other.stranded_bytes
    tokens = (other.capacity_tokens or 0) - (plan.capacity_tokens or 0)
    gains = {
        "capacity": f"holds {tokens} more tokens of one sequence",
        "sequences": f"holds {other.sequences - plan.sequences} more sequences",
        "time": "has a faster slowest stage",
    }
    if request.objective != "capacity" and other.context_tokens > plan.context_tokens:
        gains[request.objective] = f"holds contexts of {other.context_tokens} tokens"
    return Alternative(
        fence=other.fence,
        capacity_tokens=other.capacity_tokens,
        sequences=other.sequences,
        stranded_bytes=other.stranded_bytes,
        says=f"--fence {_written(other.fence)} {gains[request.objective]} and strands"
        f" {abs(idle)} {'fewer' if idle >= 0 else 'more'} bytes",
    )


def _binding_stage(rows: Sequence[StagePlan]) -> int:
    """The stage that allows the fewest tokens; the fewest sequences where tokens are free."""

    def tightness(row: StagePlan) -> tuple[bool, int, bool, int]:
        tokens, sequences = row.capacity_tokens, row.sequences
        return tokens is None, tokens or 0, sequences is None, sequences or 0

    return min(rows, key=tightness).stage


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _says(stages: Iterable[StageShortfall]) -> str:
    return "; ".join(
        f"stage {s.stage} needs {s.need_bytes} bytes and has {s.have_bytes}" for s in stages
    )


def _raised_caps(request: PlanRequest) -> str:
    return "raise --max-stage-bytes, " if request.max_stage_bytes else ""


def _written(cuts: Sequence[int]) -> str:
    return ",".join(str(cut) for cut in cuts)
