"""The fence that makes the most of an objective, of all fences that fit.

Each objective is a figure of the plan that a fence gets (``planner.evaluate``):

==========  =======================================================================
capacity    the longest that each of ``sequences`` (one, where not given) can grow
sequences   how many of the context fit
time        seconds of the slowest stage for a step of one wave at the context
==========  =======================================================================

``sequences`` and ``time`` look only at fences that hold the longest context that any fence holds,
up to ``--ctx`` or else the model's own. Fences of equal figures are told apart by the contract
(CLI.md): least total stranded bytes, then the smallest largest stage in cache bytes, then the
smallest cuts.

A figure is found by bisection: is there any fence left that fits so much? As a stage never takes
less for more layers, that is one pass over the cuts. The rest is one dynamic programme over the
fences left. Where nothing fits, the least overfull fence is the answer, for the refusal to name.
"""

from collections.abc import Callable, Sequence

import numpy as np

from memkv_pp.fence import Fence, even
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.cuts import Lowest, best_cuts, lowest_within, pinned_cuts, reached_cuts
from memkv_pp.plan.ranges import SATURATED_BYTES, RangeSizes
from memkv_pp.plan.ranges import Table as Bytes
from memkv_pp.plan.request import PlanRequest, check_pins, parting_cuts
from memkv_pp.plan.stage_times import StageTimes
from memkv_pp.sizing import Layout
from memkv_pp.units import ceil_div

# A stage of this much is as good as unbounded, and strands nothing. Sums of stages stay exact.
UNBOUNDED_BYTES = 1 << 50

# Bytes of a load, whose size is a level: blocks of tokens, or sequences. More never takes less.
_Load = Callable[[int], Bytes]


def best_fence(geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest) -> Fence:
    """The best fence for ``request``; FenceError where pins or shared layers leave none."""
    return _Search(geometry, formats, request).best()


class _Search:
    def __init__(
        self, geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest
    ) -> None:
        budget, options = request.budget, request.options
        stages = budget.num_stages
        pins = check_pins(request.pins, geometry, stages)
        self._geometry, self._formats, self._request = geometry, formats, request
        self._allowed = pinned_cuts(geometry.num_layers, pins, stages, parting_cuts(geometry))
        self._sizes = RangeSizes(geometry, formats, options)
        most = SATURATED_BYTES // geometry.num_layers
        self._weights = self._sizes.weight_bytes(
            [
                0 if budget.cache_only else min(budget.dtype_bytes * layer.weight_elements, most)
                for layer in geometry.layers
            ]
        )
        self._rooms = _rooms(geometry, request)
        self._bounded = all(size < UNBOUNDED_BYTES for size in budget.stage_bytes)

    def best(self) -> Fence:
        request, sizes = self._request, self._sizes
        block, copies = request.options.record_rows, request.copies

        def each(blocks: int) -> Bytes:
            return sizes.context_bytes(blocks * block, copies)

        def alone(blocks: int) -> Bytes:
            return sizes.context_bytes(blocks * block, 1)

        def counted(count: int) -> Bytes:
            return sizes.context_bytes(context, count)

        block_bytes = sizes.least_bytes(block, 1)
        blocks = self._largest(each, block_bytes * copies, most=self._most_blocks)
        if blocks == 0:
            return self._least_overfull(each(1))
        context = self._context_tokens(blocks)
        context_bytes = sizes.least_bytes(context, 1)
        holding = self._within(counted(copies))
        if request.objective == "capacity" or not self._any(holding):
            fitting = self._within(each(blocks))
            if request.ctx is None and request.sequences is None:
                return self._tied(fitting, alone(blocks))
        elif request.objective == "sequences":
            count = self._largest(counted, context_bytes)
            fitting = self._within(counted(count))
            if request.ctx is not None and request.sequences is None:
                return self._tied(fitting, counted(count))
        else:
            fitting = np.maximum(holding, self._fastest(holding, context))
        if request.sequences is not None:
            return self._tied(fitting, counted(copies))
        if request.ctx is not None:
            return self._most_used(fitting, counted, context_bytes)
        return self._most_used(fitting, alone, block_bytes, self._most_blocks)

    @property
    def _most_blocks(self) -> int | None:
        """Blocks beyond which no sequence takes more; None where it does not end."""
        if self._request.options.layout is Layout.FLAT:
            return 1
        if self._sizes.grows:
            return None
        return ceil_div(self._sizes.ring_rows, self._request.options.record_rows) + 1

    def _context_tokens(self, most_blocks: int) -> int:
        """The context to hold: what was asked, or the model's own as far as any fence holds it.

        Where the model does not grow, ``most_blocks`` is as good as any longer context.
        """
        if self._request.ctx is not None:
            return self._request.ctx
        longest = most_blocks * self._request.options.record_rows
        return min(self._geometry.context_tokens or longest, longest)

    def _within(self, cache_bytes: Bytes) -> Lowest:
        """The reach of each stage when its layers' weights and so many cache bytes must fit."""
        return lowest_within(cache_bytes + self._weights, self._rooms)

    def _any(self, lowest: Lowest) -> bool:
        return bool(reached_cuts(self._allowed, lowest)[-1, -1])

    def _largest(
        self,
        load: _Load,
        least_bytes: int,
        fitting: Lowest | None = None,
        most: int | None = None,
    ) -> int:
        """The greatest level of ``load`` for which a fence fits, 0 if none; at most ``most``.

        All stages together take at least ``least_bytes`` for each level.
        """

        def fits(level: int) -> bool:
            lowest = self._within(load(level))
            return self._any(lowest if fitting is None else np.maximum(lowest, fitting))

        low, high = 0, 1
        if least_bytes:
            room = sum(max(room, 0) for room in self._rooms) - int(self._weights[-1, 0])
            high = max(room, 0) // least_bytes + 1
            high = high if most is None else min(high, most + 1)
        else:
            while (most is None or high <= most) and fits(high):
                low, high = high, high * 2
            high = high if most is None else min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _fastest(self, fitting: Lowest, context_tokens: int) -> Lowest:
        """The reach of each stage when none may be slower than the best fence's slowest."""
        times = StageTimes(self._geometry, self._formats, self._request, context_tokens)
        found = best_cuts(self._allowed, fitting, times.seconds)
        assert found is not None
        _, slowest, _ = found
        return np.stack(
            [lowest_within(times.seconds(stage), [slowest])[0] for stage in range(len(self._rooms))]
        )

    def _tied(self, fitting: Lowest, load: Bytes) -> Fence:
        """Of the fences left, the one that the contract prefers when all carry ``load``."""
        found = best_cuts(self._allowed, fitting, lambda _: load, load if self._bounded else None)
        assert found is not None
        return Fence(found[2])

    def _most_used(
        self, fitting: Lowest, load: _Load, least_bytes: int, most: int | None = None
    ) -> Fence:
        """As ``_tied``, where each fence carries the greatest level of ``load`` that fits it.

        Branch and bound over the levels: what the levels of [low, high] use is no more than what
        ``high`` would use of the fences that fit ``low``.
        """
        top = self._largest(load, least_bytes, fitting, most)
        if top == 0:
            return self._tied(fitting, load(1))

        def used(low: int, high: int) -> tuple[int, float, tuple[int, ...]]:
            """(bytes used, largest stage, cuts) at ``high`` of the fences that fit ``low``."""
            table = load(high)
            lowest = np.maximum(fitting, self._within(load(low)))
            found = best_cuts(
                self._allowed, lowest, lambda _: table, table if self._bounded else None
            )
            assert found is not None
            return found

        def rank(found: tuple[int, float, tuple[int, ...]]) -> tuple[int, float, tuple[int, ...]]:
            return -found[0], found[1], found[2]

        best = used(top, top)
        ranges = [(1, top - 1)] if self._bounded else []
        while ranges:
            low, high = ranges.pop()
            if low > high:
                continue
            bound = used(low, high)
            if bound[0] < best[0]:
                continue
            if low == high:
                best = min(best, bound, key=rank)
                continue
            middle = (low + high) // 2
            ranges += [(low, middle), (middle + 1, high)]
        return Fence(best[2])

    def _least_overfull(self, load: Bytes) -> Fence:
        """The fence whose fullest stage is least overfull, relative to its room."""
        asked = (load + self._weights).astype(np.float64)
        anything = np.zeros((len(self._rooms), asked.shape[0]), dtype=np.int64)
        found = best_cuts(self._allowed, anything, lambda stage: asked / max(self._rooms[stage], 1))
        assert found is not None
        return Fence(found[2])


def _rooms(geometry: ModelGeometry, request: PlanRequest) -> list[int]:
    """Bytes each stage offers its trunk layers, whatever the cuts."""
    budget, options = request.budget, request.options
    sample = even(geometry.num_layers, budget.num_stages)
    rooms: list[int] = []
    for stage in range(budget.num_stages):
        of_layers = sum(geometry.layers[i].weight_elements for i in sample.layers_of(stage))
        weights = budget.weight_bytes(geometry, sample, stage, options)
        others = 0 if budget.cache_only else weights - of_layers * budget.dtype_bytes
        fixed = budget.fixed_bytes(geometry, sample, stage, options, request.copies)
        room = request.usable_bytes(stage) - others - fixed
        rooms.append(max(min(room, UNBOUNDED_BYTES), -1))
    return rooms
