"""Which cuts a fence may have, whether any fence is left, and the best of those left.

A fence is a path through the cuts ``0 = c0 < c1 < … < cS = n``; stage s takes the step from ``cs``
to ``c(s+1)``. Every limit on a stage's bytes or seconds is one on how far it may reach back::

    lowest[s, hi]    stage s may own [lo, hi) exactly for lowest[s, hi] <= lo < hi

because a stage never takes less for owning more layers. Tables are [hi, lo], as in ``ranges.py``.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64] | NDArray[np.float64]
Lowest = NDArray[np.int64]

_NOTHING = -1


def lowest_within(table: Table, limits: Sequence[float]) -> Lowest:
    """How far back each stage may reach when ``table`` may not pass its limit there."""
    distinct, stages = np.unique(np.asarray(limits, dtype=table.dtype), return_inverse=True)
    his = np.broadcast_to(np.arange(table.shape[0]), (len(distinct), table.shape[0]))
    low, high = np.zeros_like(his), his
    for _ in range(table.shape[0].bit_length()):
        middle = (low + high) // 2
        fits = (table[his, middle] <= distinct[:, None]) | (low >= high)
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
    return high[stages]


def pinned_cuts(
    num_layers: int, pins: Sequence[tuple[int, int]], num_stages: int, parting: set[int]
) -> NDArray[np.bool_]:
    """[stages + 1, layers + 1]: whether cut s may lie before a layer.

    ``pins`` are (layer, stage) in order, ``parting`` the cuts that part a shared layer from its
    source.
    """
    allowed = np.ones((num_stages + 1, num_layers + 1), dtype=np.bool_)
    allowed[:, sorted(parting)] = False
    for layer, stage in pins:
        allowed[: stage + 1, layer + 1 :] = False
        allowed[stage + 1 :, : layer + 1] = False
    allowed[0], allowed[-1] = False, False
    allowed[0, 0] = allowed[-1, -1] = True
    return allowed


def reached_cuts(allowed: NDArray[np.bool_], lowest: Lowest) -> NDArray[np.bool_]:
    """The ``allowed`` cuts that the stages before them can make; no fence is left if none is last."""
    reached = np.zeros_like(allowed)
    reached[0] = allowed[0]
    below = np.zeros(allowed.shape[1] + 1, dtype=np.int64)
    for stage in range(allowed.shape[0] - 1):
        np.cumsum(reached[stage], out=below[1:])
        # below[hi] counts the starts under hi; those under lowest[stage, hi] are too far back.
        starts = below[:-1] > below[lowest[stage]]
        np.logical_and(starts, allowed[stage + 1], out=reached[stage + 1])
        if not reached[stage + 1].any():
            break
    return reached


def best_cuts(
    allowed: NDArray[np.bool_],
    lowest: Lowest,
    cost_of: Callable[[int], Table],
    gain: Table | None = None,
) -> tuple[int, float, tuple[int, ...]] | None:
    """(gain, cost, cuts) of the best fence left, None if none is.

    Best is the greatest sum of ``gain`` over the stages (without one all are equal), then the least
    largest ``cost_of(stage)``, then the smallest cuts. Dynamic programming from the last stage back.
    """
    reached = reached_cuts(allowed, lowest)
    num_stages, last = allowed.shape[0] - 1, allowed.shape[1] - 1
    if not reached[-1, last]:
        return None
    widest = (np.arange(last + 1) - lowest).max(axis=1)
    # gains[s, c], costs[s, c]: the best that the stages s and up can make of the layers from c on.
    gains = np.full(allowed.shape, _NOTHING, dtype=np.int64)
    costs = np.full(allowed.shape, np.inf)
    gains[-1, last], costs[-1, last] = 0, -np.inf
    # Of each stage, from the last: its first start, and the costs of its best steps [start, width].
    steps: list[tuple[int, NDArray[np.float64]]] = []
    for stage in reversed(range(num_stages)):
        where = np.flatnonzero(reached[stage])
        los = np.arange(where[0], where[-1] + 1)[:, None]
        his = los + np.arange(1, widest[stage] + 1)
        fits = reached[stage, los] & (his <= last)
        his = np.minimum(his, last)
        after = gains[stage + 1, his]
        fits &= (lowest[stage, his] <= los) & (after > _NOTHING)
        cells = his * (last + 1) + los
        sums = np.where(fits, after if gain is None else after + gain.take(cells), _NOTHING)
        best = sums.max(axis=1, keepdims=True)
        peaks = np.maximum(cost_of(stage).take(cells), costs[stage + 1, his])
        peaks = np.where(fits & (sums == best), peaks, np.inf)
        gains[stage, los] = best
        costs[stage, los] = peaks.min(axis=1, keepdims=True)
        steps.append((int(where[0]), peaks))
    cuts = [0]
    for first, peaks in reversed(steps):
        fitting = peaks[cuts[-1] - first] <= costs[0, 0]
        cuts.append(cuts[-1] + 1 + int(fitting.argmax()))
    return int(gains[0, 0]), float(costs[0, 0]), tuple(cuts)
