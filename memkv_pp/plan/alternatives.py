"""What each change to a question would give, in sentences with figures.

Every change was planned; nothing is estimated.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.changes import (
    Change,
    Changed,
    Question,
    cut_words,
    device_changes,
    fence_changes,
    format_changes,
    ring_changes,
    sequence_changes,
)
from memkv_pp.units import format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChange:
    """What a change would give; the first five fields are the contract's keys (CLI.md)."""

    fence: tuple[int, ...]
    capacity_tokens: int | None
    sequences: int
    stranded_bytes: int
    says: str
    context_tokens: int
    binding_stage: int
    change: Change


def planned_changes(question: Question, plan: CapacityPlan) -> tuple[PlannedChange, ...]:
    """The changes to ``question`` that fit, in groups by option, the best of a group first."""
    return tuple(_changes(question, plan))


def _changes(question: Question, plan: CapacityPlan) -> Iterator[PlannedChange]:
    yield from _best_first(question, plan, fence_changes(question, plan))
    yield from _best_first(question, plan, format_changes(question))
    yield from _best_first(question, plan, ring_changes(question))
    yield from _best_first(question, plan, sequence_changes(question, plan), idle=False)
    yield from _best_first(question, plan, device_changes(question, plan))


def _best_first(
    question: Question, plan: CapacityPlan, group: Iterable[Changed], *, idle: bool = True
) -> list[PlannedChange]:
    """The changes of ``group`` that fit and change something; without ``idle``, that hold more."""
    planned: list[tuple[tuple[int, int], PlannedChange]] = []
    seen: set[tuple[Change, tuple[int, ...]]] = set()
    for changed in group:
        other = changed.question.try_plan()
        if other is None or other.stages == plan.stages or (changed.change, other.fence) in seen:
            continue
        gain = _gain(question, changed.change, plan, other)
        if gain[0] <= 0 and not idle:
            continue
        seen.add((changed.change, other.fence))
        planned.append((gain, _planned_change(question, plan, changed, other)))
    planned.sort(key=lambda pair: pair[0], reverse=True)
    return [change for _, change in planned]


def _planned_change(
    question: Question, plan: CapacityPlan, changed: Changed, other: CapacityPlan
) -> PlannedChange:
    recut = changed.change.knob != "--fence" and other.fence != plan.fence
    words = f"{changed.words}, {cut_words(plan.fence, other.fence)}" if recut else changed.words
    return PlannedChange(
        fence=other.fence,
        capacity_tokens=other.capacity_tokens,
        sequences=other.sequences,
        stranded_bytes=other.stranded_bytes,
        says=f"{words}: {_effect(question, plan, other)}",
        context_tokens=other.context_tokens,
        binding_stage=other.binding_stage,
        change=changed.change,
    )


def _gain(
    question: Question, change: Change, plan: CapacityPlan, other: CapacityPlan
) -> tuple[int, int]:
    """How much more is held: first of what the request left open, or of what fewer share."""
    request = question.request
    tokens = (other.capacity_tokens or 0) - (plan.capacity_tokens or 0)
    context = other.context_tokens - plan.context_tokens
    sequences = other.sequences - plan.sequences
    if change.knob == "--sequences" or (request.ctx is None and request.sequences is not None):
        return context, tokens
    if request.objective == "sequences" or request.ctx is not None or not tokens:
        return sequences, tokens
    return tokens, sequences


def _effect(question: Question, plan: CapacityPlan, other: CapacityPlan) -> str:
    figures = [("tokens", plan.capacity_tokens, other.capacity_tokens)]
    if question.request.sequences is not None or other.sequences < plan.sequences:
        figures.append(("tokens of each sequence", plan.context_tokens, other.context_tokens))
    figures.append(("sequences", plan.sequences, other.sequences))
    parts = [
        _figure(what, before, after)
        for what, before, after in figures
        if before is not None and after is not None and before != after
    ]
    if not parts:
        what = "sequences" if plan.capacity_tokens is None else "tokens"
        parts = [f"+0 % {what}", f"stage {other.binding_stage} binds"]
    idle = other.stranded_bytes - plan.stranded_bytes
    if idle:
        parts.append(f"{format_size(abs(idle))} {'more' if idle > 0 else 'less'} stranded")
    return ", ".join(parts)


def _figure(what: str, before: int, after: int) -> str:
    percent = 100 * (after - before) / max(before, 1)
    digits = 0 if abs(percent) >= 1 else 2
    return f"{percent:+.{digits}f} % {what} ({before:,} -> {after:,})"
