"""The layer loop: a step's rows through this stage's layers.

With ``deterministic`` the rows go through in blocks of exactly ``FIXED_ROWS``: every matrix product
has one shape, so a row is bit for bit the same at every place and in any company. Blocks run in
order, each through all layers, so a row finds the earlier rows of its sequence in the cache.
"""

import torch

from memkv_pp.cache.kv import Batch, StageCache
from memkv_pp.cache.ops import FIXED_ROWS
from memkv_pp.model.adapters.base import StageModel


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
            block = self._cache.sub_batch(batch, first, last, FIXED_ROWS)
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

    def _run_rows(self, batch: Batch, hidden_TH: torch.Tensor) -> torch.Tensor:
        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scale: float,
        ) -> torch.Tensor:
            return self._cache.append_and_attend(
                layer, batch, query, key, value, scale, fixed=self._deterministic
            )

        rotary = self._model.rotary(batch.positions)
        for layer in self._layers:
            hidden_TH = self._model.run_layer(layer, hidden_TH, rotary, attend)
        return hidden_TH


def _pad_rows(rows_TH: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows_TH, (0, 0, 0, FIXED_ROWS - len(rows_TH)))
