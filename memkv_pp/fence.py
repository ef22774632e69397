"""The fence map: which stage owns which layers.

A fence is ``(0, c1, …, n)`` over the n trunk layers; stage s owns ``[fence[s], fence[s + 1])``::

    layers   0 … c1-1 | c1 … c2-1 | … | c(S-1) … n-1
    stage        0    |     1     | … |     S-1

NextN layers have indices from n up and belong to the last stage.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memkv_pp.errors import FenceError


@dataclass(frozen=True, slots=True)
class Fence:
    """A complete, disjoint, ordered cut of the trunk; every stage owns at least one layer."""

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) < 2 or self.cuts[0] != 0:
            raise FenceError(
                f"--fence: {list(self.cuts)} must start at 0 and name at least one stage"
            )
        if any(a >= b for a, b in zip(self.cuts, self.cuts[1:], strict=False)):
            raise FenceError(
                f"--fence: {list(self.cuts)} is not strictly increasing",
                "every stage owns at least one layer",
            )

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.cuts) - 1

    @property
    def num_layers(self) -> int:
        """Trunk layers."""
        return self.cuts[-1]

    def layers_of(self, stage: int) -> range:
        """The trunk layers of ``stage``."""
        if not 0 <= stage < self.num_stages:
            raise FenceError(f"stage {stage} is not among {self.num_stages} stages")
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stage_of(self, layer: int) -> int:
        """The stage that owns ``layer``; the last stage for NextN layers, which follow the trunk."""
        if layer < 0:
            raise FenceError(f"layer {layer} is negative")
        return min(bisect_right(self.cuts, layer) - 1, self.num_stages - 1)

    def check_edges(self, edges: Iterable[tuple[int, int]]) -> None:
        """Raise FenceError if a cut parts a shared layer from its source.

        ``edges`` are (source layer, reading layer), as ``ModelGeometry.shared_edges`` gives them.
        """
        for source, reader in edges:
            if self.stage_of(source) != self.stage_of(reader):
                raise FenceError(
                    f"--fence: layer {reader} reads the cache of layer {source}, but"
                    f" {list(self.cuts)} puts them on stages {self.stage_of(reader)} and"
                    f" {self.stage_of(source)}",
                    "move the cut so that both are on one stage",
                )


def even(num_layers: int, num_stages: int) -> Fence:
    """Cuts at ``floor(s * n / S)``: sizes differ by at most one layer.

    >>> even(32, 3).cuts
    (0, 10, 21, 32)
    """
    _check_stages(num_layers, num_stages)
    return Fence(tuple(s * num_layers // num_stages for s in range(num_stages + 1)))


def explicit(cuts: Sequence[int], num_layers: int, num_stages: int | None = None) -> Fence:
    """The fence a user wrote, checked against the model's layers and the number of stages."""
    fence = Fence(tuple(cuts))
    if fence.num_layers != num_layers:
        raise FenceError(
            f"--fence: {list(cuts)} ends at {fence.num_layers}, the model has {num_layers} layers",
            f"the last cut must be {num_layers}",
        )
    if num_stages is not None and fence.num_stages != num_stages:
        raise FenceError(
            f"--fence: {list(cuts)} makes {fence.num_stages} stages, {num_stages} were asked for"
        )
    return fence


def _check_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise FenceError(
            f"--stages: {num_layers} layers cannot make {num_stages} stages",
            f"use 1 to {num_layers} stages",
        )
