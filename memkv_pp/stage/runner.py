"""The layer loop: a step's rows through this stage's layers.

With ``deterministic`` the rows go through in blocks of exactly ``FIXED_ROWS``: every matrix product
has one shape, so a row is bit for bit the same at every place and in any company. Blocks run in
order, each through all layers, so a row finds the earlier rows of its sequence in the cache.
"""

import torch

from memkv_pp.cache.batch import Batch
from memkv_pp.cache.kv import StageCache
from memkv_pp.cache.layers import Layers
from memkv_pp.cache.ops import FIXED_ROWS
from memkv_pp.model.adapters.base import StageModel
from memkv_pp.units import ceil_div

# torch's element-wise kernels give a thread at least so many elements, and take them in steps of
# two vectors of at most 64 bytes: 64 elements of 2 bytes. What is left over is computed apart.
GRAIN_ELEMENTS = 32768
STEP_ELEMENTS = 64
# The CUDA kernels hold 1, 2, 4 or 8 query vectors; more rows have those of 8.
_WARM_UP_ROWS = (1, 2, 4, 8)


def splits_evenly(width: int, threads: int) -> bool:
    """Whether an element-wise kernel over FIXED_ROWS rows of ``width`` has no vector tails.

    Elements of a tail may differ in the last bit from the same elements inside a vector.
    """
    elements = FIXED_ROWS * width
    parts = min(threads, ceil_div(elements, GRAIN_ELEMENTS))
    return ceil_div(elements, parts) % STEP_ELEMENTS == 0


class Runner:
    """Runs batches through the layers ``[lo, hi)`` of ``model`` over ``cache``."""

    def __init__(
        self, model: StageModel, cache: StageCache, layers: range, *, deterministic: bool
    ) -> None:
        self._model = model
        self._cache = cache
        self._layers = layers
        self._deterministic = deterministic

    def run(self, batch: Batch, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The layers' output for every row of ``batch``: [T, H]."""
        if not self._deterministic:
            return self._run_rows(batch, hidden_TH)
        out = torch.empty_like(hidden_TH)
        for first in range(0, len(hidden_TH), FIXED_ROWS):
            last = min(first + FIXED_ROWS, len(hidden_TH))
            block = self._cache.part(batch, first, last, FIXED_ROWS)
            out[first:last] = self._run_rows(block, _pad_rows(hidden_TH[first:last]))[
                : last - first
            ]
        return out

    def head(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """f32 logits [R, V] of the rows a token is drawn after."""
        if not self._deterministic:
            return self._model.head(hidden_RH)
        blocks = [
            self._model.head(_pad_rows(block))[: len(block)]
            for block in hidden_RH.split(FIXED_ROWS)
        ]
        return torch.cat(blocks)

    def find_uneven_rows(self, *, head: bool) -> str | None:
        """Where FIXED_ROWS equal rows come out unequal, or None: every layer is tried, and the head.

        Attention is left out: each row's values stand for its result. A library may split a
        product over threads so that a row's bits depend on its place; no size tells.
        """

        model = self._model
        row = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = row.to(model.device, model.dtype).repeat(FIXED_ROWS, 1)
        rotary = model.rotary(torch.full((FIXED_ROWS,), 7, device=model.device))
        for layer in self._layers:
            hidden = model.run_layer(layer, hidden, rotary, _NoCache())
            if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
                return f"layer {layer}"
        if head:
            logits = model.head(hidden)
            if not torch.equal(logits, logits[:1].expand_as(logits)):
                return "the head"
        return None

    def warm_up(self) -> None:
        """Run rows that are stored nowhere and see no key through every layer.

        Kernels that are compiled at their first use are compiled here, for every number of rows.
        """
        model, device = self._model, self._model.device
        for num_rows in _WARM_UP_ROWS:
            hidden = torch.zeros(num_rows, model.hidden_size, dtype=model.dtype, device=device)
            self._run_rows(self._cache.idle(num_rows), hidden)

    def _run_rows(self, batch: Batch, hidden_TH: torch.Tensor) -> torch.Tensor:
        rotary = self._model.rotary(batch.positions)
        step = _BoundCache(self._cache.layers, batch, fixed=self._deterministic)
        for layer in self._layers:
            hidden_TH = self._model.run_layer(layer, hidden_TH, rotary, step)
        self._cache.advance(batch)
        return hidden_TH


class _BoundCache:
    """The cache's side of one batch: ``StepCache``."""

    def __init__(self, layers: Layers, batch: Batch, *, fixed: bool) -> None:
        self._layers = layers
        self._batch = batch
        self._fixed = fixed

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._layers.attend(
            layer, self._batch, query, key, value, scale, fixed=self._fixed, cap=cap, sinks=sinks
        )

    def convolve(
        self,
        layer: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
    ) -> torch.Tensor:
        return self._layers.convolve(layer, self._batch, rows, weight, bias, silu=silu)

    def scan(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        return self._layers.scan(
            layer, self._batch, query, key, value, gate, beta, fixed=self._fixed
        )


class _NoCache:
    """A ``StepCache`` of nothing, that leaves every row to itself."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if value is None:
            return query
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def convolve(
        self,
        layer: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
    ) -> torch.Tensor:
        return rows

    def scan(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        return value


def _pad_rows(rows_TH: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows_TH, (0, 0, 0, FIXED_ROWS - len(rows_TH)))
