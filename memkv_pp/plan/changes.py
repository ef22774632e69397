"""What could be changed about a question to the planner: fences, formats, rings, sequences, bytes.

Every change is a whole question again, and its answer is planned, never estimated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memkv_pp.errors import CapacityError, ConfigError
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.fences import requested_fence
from memkv_pp.plan.planner import evaluate, plan_capacity
from memkv_pp.plan.request import FenceChoice, PlanRequest
from memkv_pp.units import GIB, KIB, MIB

SMALLER_PAIRS = tuple(
    parse_pair(text) for text in ("fp8:fp8", "q8_0:q5_1", "q8_0:q4_0", "q4_0:q4_0")
)
MOST_ADDED_BYTES = 8 * GIB
MOST_STAGES = 8
MOST_CUTS_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request about a model. ``formats_of`` gives a pair per layer for the model's ``pair``.

    It raises ConfigError for a pair that the model's heads cannot be stored in.
    """

    geometry: ModelGeometry
    request: PlanRequest
    pair: Pair
    formats_of: Callable[[Pair], Sequence[Pair]]

    def plan(self) -> CapacityPlan:
        """The planner's answer; raises as ``plan_capacity`` does."""
        return plan_capacity(self.geometry, self.formats_of(self.pair), self.request)

    def evaluated(self) -> CapacityPlan:
        """The same without alternatives, which cost searches of their own."""
        formats = self.formats_of(self.pair)
        fence = requested_fence(self.geometry, formats, self.request)
        return evaluate(self.geometry, formats, self.request, fence)

    def try_plan(self) -> CapacityPlan | None:
        """What ``evaluated`` answers, or None where there is no answer."""
        try:
            return self.evaluated()
        except (CapacityError, ConfigError):
            return None

    def asking(
        self,
        *,
        fence: FenceChoice | None = None,
        ctx: int | None = None,
        sequences: int | None = None,
    ) -> "Question":
        """The same with another fence, context or number of sequences, where given."""
        request = self.request
        return replace(
            self,
            request=replace(
                request,
                fence=request.fence if fence is None else fence,
                ctx=request.ctx if ctx is None else ctx,
                sequences=request.sequences if sequences is None else sequences,
            ),
        )

    def with_stage_bytes(self, stage_bytes: Sequence[int]) -> "Question":
        """The same on other devices (or cache budgets)."""
        budget = replace(self.request.budget, stage_bytes=tuple(stage_bytes))
        return replace(self, request=replace(self.request, budget=budget))

    @property
    def size_knob(self) -> str:
        """The option that says what the stages have."""
        return "--kv-budget" if self.request.budget.cache_only else "--device"

    @property
    def stage_noun(self) -> str:
        """What has those bytes, in words."""
        return "stage" if self.request.budget.cache_only else "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The option that changes, and its new value as the command line takes it."""

    knob: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A question with one ``change``, and the change in words."""

    change: Change
    words: str
    question: Question


def fence_changes(question: Question, plan: CapacityPlan) -> Iterator[Changed]:
    """The balanced and the even fence, and those the planner found better."""
    fences: list[tuple[int, ...]] = [other.fence for other in plan.alternatives]
    for choice in ("balanced", "even"):
        other = question.asking(fence=choice).try_plan()
        if other is not None:
            fences.append(other.fence)
    for fence in dict.fromkeys(fences):
        if fence != plan.fence:
            yield Changed(
                change=Change(knob="--fence", value=written(fence)),
                words=cut_words(plan.fence, fence),
                question=question.asking(fence=fence),
            )


def format_changes(question: Question) -> Iterator[Changed]:
    """Pairs that are smaller on one side at least, and larger on none."""
    before = question.pair
    for pair in SMALLER_PAIRS:
        steps = [
            old.bits_per_element - new.bits_per_element
            for old, new in ((before.k, pair.k), (before.v, pair.v))
        ]
        if min(steps) < 0 or max(steps) == 0:
            continue
        yield Changed(
            change=Change(knob="--kv", value=str(pair)),
            words=_pair_words(before, pair),
            question=replace(question, pair=pair),
        )


def ring_changes(question: Question) -> Iterator[Changed]:
    """Rings on, where they are off and the model has sliding layers."""
    options = question.request.options
    slides = any(layer.kind is LayerKind.SLIDING for layer in question.geometry.layers)
    if slides and not options.ring:
        request = replace(question.request, options=replace(options, ring=True))
        yield Changed(
            change=Change(knob="--ring", value="on"),
            words="rings on (--ring on)",
            question=replace(question, request=request),
        )


def sequence_changes(question: Question, plan: CapacityPlan) -> Iterator[Changed]:
    """Half the sequences, each as long as then fits."""
    half = plan.sequences // 2
    if half >= 1 and question.request.options.flat_rows == 0:
        open_context = replace(question, request=replace(question.request, ctx=None))
        yield Changed(
            change=Change(knob="--sequences", value=str(half)),
            words=f"{half} of {plan.sequences} sequences (--sequences {half})",
            question=open_context.asking(sequences=half),
        )


def device_changes(question: Question, plan: CapacityPlan) -> Iterator[Changed]:
    """More bytes for one stage at a time: the binding stage first, at most ``MOST_STAGES``.

    The fence is kept; where the planner may choose it, the same with new cuts follows.
    """
    sizes = question.request.budget.stage_bytes
    stages = [plan.binding_stage]
    stages += [stage for stage in range(len(sizes)) if stage != plan.binding_stage]
    for stage in stages[:MOST_STAGES]:
        more = _more_bytes(sizes[stage])
        words = f"{_whole_size(more)} more on {question.stage_noun} {stage}"
        larger = [size + more if i == stage else size for i, size in enumerate(sizes)]
        changed = question.with_stage_bytes(larger)
        change = Change(knob=question.size_knob, value=",".join(str(size) for size in larger))
        kept = changed.asking(fence=plan.fence)
        yield Changed(change=change, words=words, question=kept)
        if isinstance(question.request.fence, str) and question.request.fence != "even":
            yield Changed(change=change, words=words, question=changed)


def cut_words(old: Sequence[int], new: Sequence[int]) -> str:
    """``cut 24 -> 34 (--fence 0,34,48)``; the new cuts alone where there are many."""
    if len(new) > MOST_CUTS_SHOWN + 2:
        return f"cut anew (--fence {written(new)})"
    name = "cut" if len(new) == 3 else "cuts"
    return f"{name} {written(old[1:-1])} -> {written(new[1:-1])} (--fence {written(new)})"


def written(cuts: Sequence[int]) -> str:
    """Cuts as ``--fence`` takes them."""
    return ",".join(str(cut) for cut in cuts)


def _pair_words(before: Pair, after: Pair) -> str:
    sides = [
        (side, new.name)
        for side, old, new in (("K", before.k, after.k), ("V", before.v, after.v))
        if old != new
    ]
    if len(sides) == 2 and after.k == after.v:
        words = f"K and V to {after.k.name}"
    else:
        words = ", ".join(f"{side} to {name}" for side, name in sides)
    return f"{words} (--kv {after})"


def _more_bytes(size: int) -> int:
    """The largest power of two that is at most half of ``size`` and ``MOST_ADDED_BYTES``."""
    return min(1 << max(size.bit_length() - 2, 0), MOST_ADDED_BYTES)


def _whole_size(power_of_two: int) -> str:
    for factor, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if power_of_two >= factor:
            return f"{power_of_two // factor} {name}"
    return f"{power_of_two} bytes"
