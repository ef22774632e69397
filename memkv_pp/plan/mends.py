"""A refusal that says what would help: every mend it names was planned, and fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from memkv_pp.errors import CapacityError
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.changes import Question, format_changes, ring_changes, written
from memkv_pp.sizing import Layout
from memkv_pp.units import MIB, ceil_div

MOST_ROUNDS = 8
MOST_NAMED = 3


def plan_or_mend(question: Question) -> CapacityPlan:
    """The answer to ``question``; CapacityError whose hint begins with the cheapest mend.

    From the cheapest: another fence, the limits that the request sets itself, rings, smaller
    weights, smaller formats, fewer sequences, fewer tokens, less reserve, more bytes.
    """
    try:
        return question.plan()
    except CapacityError as error:
        mends = tuple(_mends(question, error))
        hint = "; or ".join(mends) or error.hint
        raise CapacityError(error.message, hint, error.stages) from None


def _mends(question: Question, error: CapacityError) -> Iterator[str]:
    for choice in ("balanced", "even"):
        plan = question.asking(fence=choice).try_plan()
        if plan is not None:
            yield f"--fence {written(plan.fence)} fits"
            break
    yield from _without_limits(question)
    for changed in ring_changes(question):
        yield from _fits(changed.question, "--ring on")
    yield from _smaller_weights(question)
    yield from _smaller_format(question)
    yield from _fewer_sequences(question)
    yield from _fewer_tokens(question)
    yield from _less_reserve(question, error)
    yield from _more_bytes(question, error)


def _fits(question: Question, words: str) -> Iterator[str]:
    """``words fits``, with the balanced fence where only that one does."""
    if question.try_plan() is not None:
        yield f"{words} fits"
        return
    if question.request.fence != "balanced":
        plan = question.asking(fence="balanced").try_plan()
        if plan is not None:
            yield f"{words} --fence {written(plan.fence)} fits"


def _without_limits(question: Question) -> Iterator[str]:
    request = question.request
    if request.max_stage_bytes:
        free = replace(question, request=replace(request, max_stage_bytes=()))
        yield from _fits(free, "leaving out --max-stage-bytes")
    if request.pins:
        yield from _fits(replace(question, request=replace(request, pins=())), "leaving out --pin")


def _smaller_weights(question: Question) -> Iterator[str]:
    budget = question.request.budget
    if not budget.cache_only and budget.dtype_bytes > 2:
        request = replace(question.request, budget=replace(budget, dtype_bytes=2))
        yield from _fits(replace(question, request=request), "--dtype bf16")


def _smaller_format(question: Question) -> Iterator[str]:
    for changed in format_changes(question):
        said = next(_fits(changed.question, f"--kv {changed.change.value}"), None)
        if said is not None:
            yield said
            return


def _fewer_sequences(question: Question) -> Iterator[str]:
    asked = question.request.sequences or 1

    def fits(count: int) -> bool:
        return question.asking(sequences=count).try_plan() is not None

    if asked > 1 and fits(1):
        most = _largest(fits, asked)
        yield "--sequences 1 fits" if most == 1 else f"--sequences {most} or fewer fit"


def _fewer_tokens(question: Question) -> Iterator[str]:
    request = question.request
    if request.ctx is None or request.options.layout is Layout.FLAT:
        return
    block = request.options.block_tokens

    def fits(blocks: int) -> bool:
        return question.asking(ctx=blocks * block).try_plan() is not None

    if request.ctx > block and fits(1):
        most = block * _largest(fits, ceil_div(request.ctx, block))
        yield f"--ctx {most} or less fits"


def _largest(fits: Callable[[int], bool], too_many: int) -> int:
    """The largest count below ``too_many`` that fits; 1 does."""
    low, high = 1, too_many
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _less_reserve(question: Question, error: CapacityError) -> Iterator[str]:
    request = question.request
    left = request.budget.reserve_bytes
    for _ in range(MOST_ROUNDS):
        left -= max(stage.need_bytes - stage.have_bytes for stage in error.stages)
        if left < 0 or request.budget.cache_only:
            return
        budget = replace(request.budget, reserve_bytes=left)
        try:
            replace(question, request=replace(request, budget=budget)).evaluated()
        except CapacityError as short:
            error = short
            continue
        yield f"--reserve {left} fits"
        return


def _more_bytes(question: Question, error: CapacityError) -> Iterator[str]:
    """Whole MiB for the stages that are short; weights that fit may uncover a cache that does not."""
    have = question.request.budget.stage_bytes
    sizes = list(have)
    for _ in range(MOST_ROUNDS):
        for stage in error.stages:
            lack = stage.need_bytes - stage.have_bytes
            sizes[stage.stage] += ceil_div(max(lack, 0), MIB) * MIB
        try:
            question.with_stage_bytes(sizes).evaluated()
        except CapacityError as short:
            error = short
            continue
        added = {
            stage: (size - before) // MIB
            for stage, (size, before) in enumerate(zip(sizes, have, strict=True))
            if size > before
        }
        yield _more_bytes_words(added, question.stage_noun)
        return


def _more_bytes_words(added: dict[int, int], noun: str) -> str:
    """``added`` is MiB by stage."""
    if len(added) > MOST_NAMED:
        return f"{max(added.values())} MiB more on each of {len(added)} {noun}s fit"
    words = " and ".join(f"{more} MiB more on {noun} {stage}" for stage, more in added.items())
    return f"{words} {'fits' if len(added) == 1 else 'fit'}"
