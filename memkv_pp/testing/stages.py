"""The stages of a model in one process, without threads or plans: for logits of every row."""

from collections.abc import Sequence
from pathlib import Path

import torch

from memkv_pp.cache.attention import PackedAttention
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.fence import explicit
from memkv_pp.formats import parse_pair
from memkv_pp.model.adapters import load_stage
from memkv_pp.model.metadata import open_geometry
from memkv_pp.sizing import CacheOptions, size_fence
from memkv_pp.stage.runner import Runner
from memkv_pp.wire import Rows

_POISON = 0xFF


class Stages:
    """``path`` cut at ``cuts``, in f32: weights, cache and runner of each stage.

    Pools hold ``sequences`` of ``rows`` tokens; their bytes are NaN at first in every format that
    has one.
    """

    def __init__(
        self,
        path: Path,
        cuts: Sequence[int],
        *,
        attention: PackedAttention | None = None,
        options: CacheOptions | None = None,
        kv: str = "f32",
        deterministic: bool = False,
        sequences: int = 6,
        rows: int = 64,
    ) -> None:
        geometry = open_geometry(path)
        formats = (parse_pair(kv),) * (geometry.num_layers + len(geometry.nextn_layers))
        fence = explicit(cuts, geometry.num_layers)
        self.caches: list[StageCache] = []
        self._runners: list[Runner] = []
        for sizing in size_fence(geometry, formats, fence, options or CacheOptions()):
            layers, last = fence.layers_of(sizing.stage), sizing.stage == fence.num_stages - 1
            with torch.inference_mode():
                model = load_stage(
                    path, layers=layers, first=sizing.stage == 0, last=last, dtype=torch.float32
                )
            cache = StageCache(
                TorchDevice(),
                geometry,
                sizing,
                sizing.footprint(rows).times(sequences),
                max_sequences=sequences,
                attention=attention,
            )
            cache.arena.storage.fill_(_POISON)
            if sizing.stage == 0:
                self._embed = model.embed
            self.caches.append(cache)
            self._runners.append(Runner(model, cache, layers, deterministic=deterministic))

    def open(self, sequence: int) -> None:
        """Begin an empty sequence on every stage."""
        for cache in self.caches:
            cache.open(sequence)

    def close(self, sequence: int) -> None:
        """Give back all that a sequence holds."""
        for cache in self.caches:
            cache.close(sequence)

    @torch.inference_mode()
    def step(self, rows: Sequence[Rows], tokens: torch.Tensor) -> torch.Tensor:
        """The f32 logits [T, V] of every row of ``tokens``, int64 [T]; every cache is checked."""
        hidden = self._embed(tokens)
        for cache, runner in zip(self.caches, self._runners, strict=True):
            hidden = runner.run(cache.extend(rows), hidden)
            cache.check()
        return self._runners[-1].head(hidden)
