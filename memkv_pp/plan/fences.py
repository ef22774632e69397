"""Which fence: the user's own cuts, even by layers, or balanced by what each layer asks for.

Balanced is by bytes: the longest context is searched for which some cut still fits every stage;
of the cuts that fit it, the one whose largest stage takes the fewest cache bytes is taken, and of
those the smallest. A layer asks for its weights (with devices) and for its cache; a stage offers
its bytes less reserve, buffers, embedding or head, and NextN cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, count
from math import inf
from typing import Literal

from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence, even, explicit, minimax
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.sizing import (
    CacheOptions,
    Layout,
    StageSizing,
    size_layers,
    stage_fixed_bytes,
    stage_weight_elements,
)

FenceChoice = Literal["even", "balanced"] | tuple[int, ...]

MOST_TOKENS = 1 << 34

_Cost = Callable[[int, int, int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the stages have.

    ``stage_bytes``: device bytes per stage, or cache bytes per stage with ``cache_only`` (then
    weights, buffers and reserve cost nothing). ``dtype_bytes`` is a weight element's size.
    """

    stage_bytes: tuple[int, ...]
    cache_only: bool = False
    reserve_bytes: int = 0
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if not self.stage_bytes:
            raise ConfigError(
                "--device: no stage has any bytes", "give --device or --kv-budget once per stage"
            )

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stage_bytes)

    def weight_bytes(
        self, geometry: ModelGeometry, fence: Fence, stage: int, options: CacheOptions
    ) -> int:
        """Weights of a stage in the compute dtype; 0 with ``cache_only``."""
        if self.cache_only:
            return 0
        return self.dtype_bytes * stage_weight_elements(
            geometry, fence, stage, spec=options.spec_tokens > 0
        )

    def fixed_bytes(
        self,
        geometry: ModelGeometry,
        fence: Fence,
        stage: int,
        options: CacheOptions,
        sequences: int,
    ) -> int:
        """Buffers of a stage for ``sequences``; 0 with ``cache_only``."""
        if self.cache_only:
            return 0
        return stage_fixed_bytes(
            geometry, fence, stage, options, dtype_bytes=self.dtype_bytes, sequences=sequences
        )


def choose_fence(
    choice: FenceChoice,
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    options: CacheOptions,
    budget: Budget,
    *,
    sequences: int = 1,
) -> Fence:
    """The fence that ``choice`` means here.

    FenceError where the cuts do not agree with the model or with the number of stages.
    """
    if choice == "even":
        return even(geometry.num_layers, budget.num_stages)
    if choice == "balanced":
        return _balanced_by_bytes(geometry, formats, options, budget, sequences)
    return explicit(choice, geometry.num_layers, budget.num_stages)


def _balanced_by_bytes(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    options: CacheOptions,
    budget: Budget,
    sequences: int,
) -> Fence:
    weights = [
        0 if budget.cache_only else budget.dtype_bytes * layer.weight_elements
        for layer in geometry.layers
    ]
    weights_below = (0, *accumulate(weights))
    rooms = _rooms(geometry, options, budget, sequences)
    edges = geometry.shared_edges()
    drafts = options.spec_tokens > 0

    @cache
    def sizing(lo: int, hi: int, with_nextn: bool) -> StageSizing:
        return size_layers(geometry, formats, range(lo, hi), options, with_nextn=with_nextn)

    def demand(blocks: int) -> tuple[_Cost, _Cost]:
        """(cache bytes, bytes asked for over bytes offered) of a stage at so many blocks."""
        rows = blocks * options.record_rows

        @cache
        def cache_of(lo: int, hi: int, with_nextn: bool) -> int:
            return sizing(lo, hi, with_nextn).context_bytes(rows, sequences)

        def cache_bytes(stage: int, lo: int, hi: int) -> int:
            return cache_of(lo, hi, drafts and stage == budget.num_stages - 1)

        def fullness(stage: int, lo: int, hi: int) -> float:
            asked = cache_bytes(stage, lo, hi) + weights_below[hi] - weights_below[lo]
            return asked / max(rooms[stage], 1)

        return cache_bytes, fullness

    def thriftiest(blocks: int) -> Fence | None:
        cache_bytes, fullness = demand(blocks)

        def cost(stage: int, lo: int, hi: int) -> float:
            return cache_bytes(stage, lo, hi) if fullness(stage, lo, hi) <= 1 else inf

        fence = minimax(geometry.num_layers, budget.num_stages, cost, edges)
        stages = zip(count(), fence.cuts, fence.cuts[1:], strict=False)
        return fence if all(fullness(*stage) <= 1 for stage in stages) else None

    grows = options.layout is Layout.PAGED and sizing(0, geometry.num_layers, drafts).grows
    most = MOST_TOKENS // options.record_rows if grows else 1
    least_overfull = minimax(geometry.num_layers, budget.num_stages, demand(1)[1], edges)
    return _largest(thriftiest, most) or least_overfull


def _largest(cut: Callable[[int], Fence | None], most: int) -> Fence | None:
    """The cut of the largest demand in ``[1, most]`` that fits; None if not even 1 does."""
    best = cut(1)
    if best is None:
        return None
    low, high = 1, 1
    fence: Fence | None = best
    while fence is not None and high < most:
        best, low, high = fence, high, min(high * 2, most)
        fence = cut(high)
    if fence is not None:
        return fence
    while high - low > 1:
        middle = (low + high) // 2
        fence = cut(middle)
        if fence is None:
            high = middle
        else:
            best, low = fence, middle
    return best


def _rooms(
    geometry: ModelGeometry, options: CacheOptions, budget: Budget, sequences: int
) -> list[int]:
    """Bytes each stage offers its trunk layers, whatever the cuts."""
    sample = even(geometry.num_layers, budget.num_stages)
    rooms: list[int] = []
    for stage, have in enumerate(budget.stage_bytes):
        of_layers = sum(geometry.layers[i].weight_elements for i in sample.layers_of(stage))
        weights = budget.weight_bytes(geometry, sample, stage, options)
        others = 0 if budget.cache_only else weights - of_layers * budget.dtype_bytes
        fixed = budget.fixed_bytes(geometry, sample, stage, options, sequences)
        rooms.append(have - budget.reserve_bytes - others - fixed)
    return rooms
