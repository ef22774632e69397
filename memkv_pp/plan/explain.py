"""Why a plan holds what it holds: the stage that binds, the bytes that lie idle, what would help."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from memkv_pp.fence import Fence
from memkv_pp.plan.alternatives import PlannedChange, planned_changes
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.changes import Question
from memkv_pp.plan.pool_shares import POOLS, Load, StageShares, charged_load, stage_shares
from memkv_pp.sizing import StageSizing, size_stage
from memkv_pp.units import align_up, format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """What ends the growth: ``stage``'s ``pool`` when one more step is asked of it.

    A step is a block of tokens more for every sequence, or one sequence more (``grows_by``).
    ``next_bytes`` is what the stage would need for it, of ``have_bytes``.
    """

    stage: int
    pool: str
    grows_by: str
    have_bytes: int
    used_bytes: int
    next_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The sentences, and the figures behind them."""

    binding: Binding
    stages: tuple[StageShares, ...]
    says: tuple[str, ...]
    alternatives: tuple[PlannedChange, ...]


def explain(question: Question, plan: CapacityPlan) -> Explanation:
    """Explain ``plan``, the planner's answer to ``question``."""
    request = question.request
    shares = stage_shares(question.geometry, question.formats_of(question.pair), request, plan)
    load = charged_load(request, plan)
    binding = _binding(question, plan, shares, load)
    says = chain(
        (_binding_words(plan, binding),),
        _sequence_words(plan, binding),
        _stranded_words(plan, shares),
    )
    return Explanation(
        binding=binding,
        stages=shares,
        says=tuple(says),
        alternatives=planned_changes(question, plan),
    )


def _binding(
    question: Question, plan: CapacityPlan, shares: Sequence[StageShares], load: Load
) -> Binding:
    stage = plan.binding_stage
    grows_by = shares[stage].grows_by
    sizing = _sizing(question, plan, stage)
    now = sizing.footprint(load.rows).times(load.copies)
    if grows_by == "tokens":
        block = question.request.options.record_rows
        following = sizing.footprint(align_up(load.rows, block) + block).times(load.copies)
    else:
        following = sizing.footprint(load.rows).times(load.copies + 1)
    unit_bytes = (sizing.record_bytes, sizing.window_record_bytes, sizing.slot_bytes)
    added = [units * size for units, size in zip(following.minus(now), unit_bytes, strict=True)]
    return Binding(
        stage=stage,
        pool=POOLS[added.index(max(added))],
        grows_by=grows_by,
        have_bytes=plan.stages[stage].cache_budget_bytes - shares[stage].withheld_bytes,
        used_bytes=sizing.bytes_of(now),
        next_bytes=sizing.bytes_of(following),
    )


def _sizing(question: Question, plan: CapacityPlan, stage: int) -> StageSizing:
    return size_stage(
        question.geometry,
        question.formats_of(question.pair),
        Fence(plan.fence),
        stage,
        question.request.options,
    )


def _binding_words(plan: CapacityPlan, binding: Binding) -> str:
    row = plan.stages[binding.stage]
    step = (
        f"{plan.block_tokens} tokens more"
        if binding.grows_by == "tokens"
        else f"one more sequence of {plan.context_tokens:,} tokens"
    )
    lack = binding.next_bytes - binding.have_bytes
    ends = (
        f"{step} would need {lack:,} bytes that it does not have"
        if lack > 0
        else f"{-lack:,} bytes would stay free after {step}"
    )
    held = format_size(binding.have_bytes)
    device = format_size(row.device_bytes)
    spent = row.weight_bytes + row.fixed_bytes + row.reserve_bytes
    taken = f" ({format_size(spent)} of {device} are not cache)" if spent else ""
    costs = (
        (row.bytes_per_token, "per token"),
        (row.ring_bytes_per_token, f"per token in rings of {row.ring_rows:,} rows"),
        (row.bytes_per_sequence, "per sequence in states"),
    )
    asks = ", ".join(f"{size:,} bytes {of}" for size, of in costs if size)
    verb = "binds" if lack > 0 else "would bind first"
    return (
        f"stage {binding.stage} {verb} in its {binding.pool}: layers [{row.layers[0]},"
        f" {row.layers[1]}) take {asks or 'nothing'}, of {held} of cache{taken}; {ends}"
    )


def _sequence_words(plan: CapacityPlan, binding: Binding) -> Iterator[str]:
    """Where another stage than the binding one ends the number of sequences."""
    known = [row for row in plan.stages if row.sequences is not None]
    if not known:
        return
    fewest = min(known, key=lambda row: row.sequences or 0)
    if fewest.sequences != plan.stages[binding.stage].sequences:
        yield (
            f"stage {fewest.stage} ends the number of sequences: {fewest.sequences:,} of"
            f" {plan.context_tokens:,} tokens fit there"
        )


def _stranded_words(plan: CapacityPlan, shares: Iterable[StageShares]) -> Iterator[str]:
    for share in shares:
        row = plan.stages[share.stage]
        if not row.stranded_bytes:
            continue
        parts = [
            f"{pool.stranded_units:,} {pool.pool} of {pool.unit_bytes:,} bytes"
            for pool in share.pools
            if pool.stranded_units
        ]
        alone = ""
        if parts:
            could = (
                f"{row.capacity_tokens:,} tokens in one sequence"
                if share.grows_by == "tokens" and row.capacity_tokens is not None
                else f"{row.sequences:,} sequences"
            )
            alone = f"; alone it would hold {could}"
        if share.withheld_bytes:
            parts.append(f"{share.withheld_bytes:,} bytes beyond --max-stage-bytes")
        if share.loose_bytes:
            parts.append(f"{share.loose_bytes:,} bytes too few for a step")
        yield (
            f"stage {share.stage} strands {format_size(row.stranded_bytes)}:"
            f" {', '.join(parts)}{alone}"
        )
