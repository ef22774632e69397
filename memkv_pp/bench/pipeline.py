"""Suite ``pipeline``: what the pipeline costs over its layers, and tokens beside transformers.

Peers: ``layers`` is the stages' own time in the same steps; ``transformers`` is ``generate`` of the
same weights in this process, in a left-padded batch where there are several prompts.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from memkv_pp.bench.rows import Row, higher_is_better, interleaved_medians, lower_is_better
from memkv_pp.clock import SystemClock
from memkv_pp.config import Backend
from memkv_pp.errors import InternalError
from memkv_pp.formats import parse_pair
from memkv_pp.kv_policy import layer_formats
from memkv_pp.model.hf_config import model_config
from memkv_pp.model.metadata import open_geometry
from memkv_pp.model.tokenizer import load_tokenizer
from memkv_pp.model.weights import open_weights
from memkv_pp.serve.build import Knobs, build_config
from memkv_pp.serve.session import Report, generate
from memkv_pp.sizing import CacheOptions
from memkv_pp.stage.runtime import TORCH_DTYPES
from memkv_pp.wire import Request

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "The quick brown fox jumps over",
    "In 1969, humans first walked on",
    "List the planets in order:",
    "A pipeline has stages because",
    "Hello",
)
_THREADS = 2


def run(model: Path, *, rounds: int) -> Iterator[Row]:
    """The suite's rows, one by one; InternalError if the two sides do not agree in f32."""
    bench = _Bench(model)
    for backend in (Backend.LOCAL, Backend.RAY):
        yield bench.orchestration(backend, rounds)
    for count, max_new in ((1, 64), (8, 32)):
        for dtype in ("f32", "bf16"):
            yield bench.tokens(count, max_new, dtype, rounds)


class _Bench:
    def __init__(self, model: Path) -> None:
        self._path = model
        self._geometry = open_geometry(model)
        tokenizer = load_tokenizer(model)
        self._prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        self._clock = SystemClock()

    def orchestration(self, backend: Backend, rounds: int) -> Row:
        """Milliseconds of a two-stage step over the layers' own, one wave of one sequence."""
        steps: list[tuple[float, float]] = []

        def over() -> float:
            report = self._generate(1, 48, "bf16", threads=1, stages=2, waves=1, backend=backend)
            plans = report.stages[0].plans_applied
            layers_s = sum(report.timing.compute_s)
            wall_s = report.timing.prefill_s + report.timing.decode_s
            steps.append(((wall_s - layers_s) / plans * 1e3, layers_s / plans * 1e3))
            return steps[-1][0]

        (ours,) = interleaved_medians([over], rounds)
        layers = sorted(layers for _, layers in steps)[len(steps) // 2]
        name = f"pipeline/orchestration/2-stages/{backend.value}"
        return lower_is_better(name, ours, "ms/step", "layers", layers, 1)

    def tokens(self, count: int, max_new: int, dtype: str, rounds: int) -> Row:
        """Tokens per second of ``count`` prompts served together on one stage."""
        peer = self._transformers(dtype)
        mine: list[list[int]] = []
        theirs: list[list[int]] = []

        def ours() -> float:
            report = self._generate(count, max_new, dtype, threads=_THREADS)
            mine[:] = [completion.tokens for completion in report.completions]
            return report.timing.tokens_per_s

        def transformers() -> float:
            torch.set_num_threads(_THREADS)
            started = self._clock.now()
            theirs[:] = _peer_tokens(peer, self._prompts[:count], max_new)
            return count * max_new / (self._clock.now() - started)

        ours_rate, peer_rate = interleaved_medians([ours, transformers], rounds)
        if dtype == "f32" and mine != theirs:
            raise InternalError(f"f32 tokens differ from transformers': {mine} != {theirs}")
        name = f"pipeline/generate/{count}x{max_new}/{dtype}"
        return higher_is_better(name, ours_rate, "tokens/s", "transformers", peer_rate, _THREADS)

    def _generate(
        self, count: int, max_new: int, dtype: str, *, threads: int, **knobs: Any
    ) -> Report:
        kv = parse_pair(dtype)
        prompts = self._prompts[:count]
        base = Knobs(
            model=str(self._path),
            geometry=self._geometry,
            formats=layer_formats(self._geometry, kv=kv),
            options=CacheOptions(),
            rows=tuple(len(prompt) + max_new - 1 for prompt in prompts),
            dtype=dtype,
            threads=threads,
            waves=1,
        )
        requests = [
            Request(request=index, prompt=tuple(prompt), max_new=max_new)
            for index, prompt in enumerate(prompts)
        ]
        return asyncio.run(generate(build_config(replace(base, **knobs)), requests))

    def _transformers(self, dtype: str) -> Any:
        config = model_config(self._path)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[dtype])
        source = open_weights(self._path)
        state = {name: source.tensor(name, TORCH_DTYPES[dtype]) for name in source.names()}
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model.eval()


def _peer_tokens(model: Any, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new,
        min_new_tokens=max_new,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[:, width:].tolist()
