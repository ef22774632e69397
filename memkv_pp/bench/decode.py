"""Suite ``decode``: tokens per second of a whole model, its cached rows attended where they lie.

Peers, over the same rows: ``gather`` unpacks every layer's rows before each step, and hands them to
torch; ``torch`` does so without compiled code, as a stage does where there is no compiler.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from memkv_pp.bench.quality import TEXT
from memkv_pp.bench.rows import Row, higher_is_better, interleaved_medians
from memkv_pp.cache import host_attention, host_kernels, ops
from memkv_pp.cache.attention import segment_table
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.host_attention import HostAttention
from memkv_pp.cache.kv import StageCache
from memkv_pp.clock import SystemClock
from memkv_pp.config import units_for_rows
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.fence import even
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.model.adapters import load_stage
from memkv_pp.model.adapters.base import StageModel
from memkv_pp.model.metadata import open_geometry
from memkv_pp.model.tokenizer import load_tokenizer
from memkv_pp.sizing import CacheOptions, size_fence
from memkv_pp.stage.runner import Runner
from memkv_pp.wire import Rows

PAIRS = ("bf16", "q8_0:q5_1", "q4_0")
CONTEXTS = {"256": 256, "2k": 2048, "8k": 8192}

_THREADS = 2
_STEPS = 4
_TEXT_ROWS = 256
# bf16 sums in another order move logits by up to this share of their spread over rows that repeat.
_AGREEMENT = 0.5
_UNREAD = "suite decode: the model has layers that do not keep K and V of every row"


def run(model: Path, *, rounds: int, contexts: Mapping[str, int] = CONTEXTS) -> Iterator[Row]:
    """The suite's rows, one by one; ``contexts`` are cached rows by their name.

    ConfigError without a compiler, InternalError if two sides do not have the same logits.
    """
    if host_kernels.load() is None:
        status = host_kernels.status()
        raise ConfigError(f"suite decode: no host kernels: {status.found}", status.hint)
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        text = _read(model)
        for name, context in contexts.items():
            for pair in PAIRS:
                yield from _contest(
                    f"decode/{name}/{parse_pair(pair)}", text, pair, context, rounds
                )
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """A model, and every layer's rows of a text: K [rows, H, D] and V [rows, H, E].

    Rows of noise will not do: a model that attends to noise answers a rounding with other logits.
    """

    geometry: ModelGeometry
    stage: StageModel
    tokens: list[int]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def _read(model: Path) -> _Text:
    geometry = open_geometry(model)
    every = range(geometry.num_layers)
    stage = load_stage(model, layers=every, first=True, last=True, dtype=torch.bfloat16)
    tokens = load_tokenizer(model).encode(TEXT)[:_TEXT_ROWS]
    listener = _Listener()
    hidden = stage.embed(torch.tensor(tokens))
    rotary = stage.rotary(torch.arange(len(tokens)))
    for layer in every:
        hidden = stage.run_layer(layer, hidden, rotary, listener)
    return _Text(geometry=geometry, stage=stage, tokens=tokens, layers=listener.layers)


class _Listener:
    """A ``StepCache`` of one text that keeps what every layer stores."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        if key is None or value is None:
            raise ConfigError(_UNREAD)
        self.layers[layer] = key, value
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        return ops.attend(query, key, value, scale, cap=cap, sinks_Q=sinks)

    def convolve(self, layer: int, *_: object, **__: object) -> NoReturn:
        raise ConfigError(_UNREAD)

    def scan(self, layer: int, *_: object, **__: object) -> NoReturn:
        raise ConfigError(_UNREAD)


class _Decoder:
    """A sequence of ``context`` rows, the text's over and over, and room for ``most_steps`` more."""

    def __init__(
        self, text: _Text, pair: str, context: int, most_steps: int, attention: HostAttention | None
    ) -> None:
        geometry = text.geometry
        formats = (parse_pair(pair),) * geometry.num_layers
        fence = even(geometry.num_layers, 1)
        (sizing,) = sizings = size_fence(geometry, formats, fence, CacheOptions())
        self._cache = StageCache(
            TorchDevice("cpu"),
            geometry,
            sizing,
            units_for_rows(sizings, [context + most_steps])[0],
            max_sequences=1,
            attention=attention,
        )
        self._runner = Runner(text.stage, self._cache, fence.layers_of(0), deterministic=False)
        self._text, self._length = text, context
        self._fill()

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """The logits [1, V] after the text's next token."""
        batch = self._cache.extend([Rows(0, self._length, 1, sample=True)])
        token = self._text.tokens[self._length % len(self._text.tokens)]
        self._length += 1
        hidden = self._text.stage.embed(torch.tensor([token]))
        return self._runner.head(self._runner.run(batch, hidden))

    @torch.inference_mode()
    def _fill(self) -> None:
        self._cache.open(0)
        batch = self._cache.extend([Rows(0, 0, self._length, sample=False)])
        # Rows of no segment are stored and not attended.
        assert batch.full is not None
        nobody = replace(batch.full, segments=(), gathers=(), table=segment_table([], 1))
        batch = replace(batch, full=nobody)
        at = torch.arange(self._length) % len(self._text.tokens)
        for layer, (key, value) in self._text.layers.items():
            own = self._text.geometry.layers[layer]
            query = key.new_zeros(self._length, own.query_heads, own.key_head_size)
            self._cache.layers.attend(layer, batch, query, key[at], value[at], 1.0, fixed=False)


class _Contender:
    """A decoder, and what holds while it steps."""

    def __init__(
        self, decoder: _Decoder, around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._decoder, self._around = decoder, around
        self._clock = SystemClock()

    def logits(self) -> torch.Tensor:
        """Those of one step."""
        with self._around():
            return self._decoder.step()

    def rate(self) -> float:
        """Tokens per second of a few steps."""
        started = self._clock.now()
        for _ in range(_STEPS):
            self.logits()
        return _STEPS / (self._clock.now() - started)


def _contest(name: str, text: _Text, pair: str, context: int, rounds: int) -> Iterator[Row]:
    def decoder(attention: HostAttention | None) -> _Decoder:
        return _Decoder(text, pair, context, 1 + rounds * _STEPS, attention)

    ours = _Contender(decoder(host_attention.loaded()), nullcontext)
    peers = {
        "gather": _Contender(decoder(None), nullcontext),
        "torch": _Contender(decoder(None), host_kernels.set_aside),
    }
    logits = ours.logits()
    for peer, contender in peers.items():
        theirs = contender.logits()
        error = ((logits - theirs).std() / theirs.std()).item()
        if not error <= _AGREEMENT:
            raise InternalError(f"{name}: logits differ from {peer}'s by {error} of their spread")
    rates = interleaved_medians([c.rate for c in (ours, *peers.values())], rounds)
    for peer, rate in zip(peers, rates[1:], strict=True):
        yield higher_is_better(name, rates[0], "tokens/s", peer, rate, _THREADS)
