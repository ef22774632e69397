"""Predicted seconds of every run of layers on every stage, for searches that weigh many fences.

The work of a stage is a sum over its layers, so the figures are those of ``times.stage_seconds``
from sums taken once. Tables are float64 of shape [hi, lo], as in ``ranges.py``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.request import PlanRequest
from memkv_pp.plan.times import link_seconds, linked, stage_work
from memkv_pp.units import ceil_div


class StageTimes:
    """One wave's decode step at ``context_tokens``: ``request.copies`` in a wave per stage."""

    def __init__(
        self,
        geometry: ModelGeometry,
        formats: Sequence[Pair],
        request: PlanRequest,
        context_tokens: int,
    ) -> None:
        self._geometry, self._request = geometry, request
        self._chain = linked(request.profiles)
        stages = request.budget.num_stages
        self._sequences = ceil_div(request.copies, min(request.copies, stages))

        def work(layers: range, *, first: bool = False, last: bool = False) -> tuple[int, int]:
            return stage_work(
                geometry,
                formats,
                layers,
                first=first,
                last=last,
                context_tokens=context_tokens,
                sequences=self._sequences,
                dtype_bytes=request.budget.dtype_bytes,
                options=request.options,
            )

        each = np.array([work(range(i, i + 1)) for i in range(geometry.num_layers)], dtype=float)
        below = np.vstack([np.zeros((1, 2)), each.cumsum(axis=0)])
        # [2, hi, lo]; whole numbers below 2**53 are exact in float64.
        self._work = (below[:, None] - below[None, :]).transpose(2, 0, 1)
        self._tables: dict[tuple[float, float, bool, bool], NDArray[np.float64]] = {}
        self._first, self._last = work(range(0), first=True), work(range(0), last=True)

    def seconds(self, stage: int) -> NDArray[np.float64]:
        """``stage_seconds`` of ``stage`` for every run of layers."""
        profile, last = self._chain[stage], stage == len(self._chain) - 1
        dtype_bytes = self._request.budget.dtype_bytes
        rates = profile.bandwidth_bytes_per_s, profile.peak(dtype_bytes)
        seconds = self._computing(*rates, stage == 0, last)
        if last:
            return seconds
        rows = self._sequences * (1 + self._request.options.spec_tokens)
        return seconds + link_seconds(self._geometry, profile, rows, dtype_bytes)

    def _computing(
        self, bytes_per_s: float, operations_per_s: float, first: bool, last: bool
    ) -> NDArray[np.float64]:
        """Seconds of a stage of these rates, without its link."""
        key = (bytes_per_s, operations_per_s, first, last)
        if key not in self._tables:
            work = self._work
            for extra, at_this_end in ((self._first, first), (self._last, last)):
                if at_this_end:
                    work = work + np.array(extra, dtype=float)[:, None, None]
            self._tables[key] = np.maximum(work[0] / bytes_per_s, work[1] / operations_per_s)
        return self._tables[key]
