"""Suite ``quality``: what a (K, V) pair costs a real model's answers, beside f16.

A fixed text is shown to the model in chunks, its own next token at every row whatever the model
would have said. Every row attends to packed rows, those of its own chunk among them, so the
figures hold what the cache holds; weights and arithmetic are f32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memkv_pp.bench.rows import Row, higher_is_better, lower_is_better
from memkv_pp.cache import host_attention, host_kernels
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.config import units_for_rows
from memkv_pp.errors import InternalError
from memkv_pp.fence import even
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.model.adapters import load_stage
from memkv_pp.model.metadata import open_geometry
from memkv_pp.model.tokenizer import load_tokenizer
from memkv_pp.sizing import CacheOptions, size_fence
from memkv_pp.stage.runner import Runner
from memkv_pp.wire import Rows

PEER = "f16"
PAIRS = (
    *("f32", "f16", "bf16", "fp8"),
    *("q8_0", "q8_0:q5_1", "q8_0:q4_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    *("nvfp4", "nvfp4e"),
    *("turbo8", "turbo8e", "turbo4", "turbo4e", "turbo4:turbo3", "turbo4e:turbo3e"),
    *("turbo3", "turbo3e", "turbo2", "turbo2e"),
)
CHUNK_ROWS = 64

_THREADS = 1
# Nats per token by which f32 and f16 rows may differ: a wrong cache differs by far more.
_AGREEMENT = 2e-3

TEXT = """\
The lighthouse stood at the end of a long stone pier, and for more than a hundred years its keeper \
had climbed the stairs every evening to light the lamp. There were two hundred and four steps. The \
first keeper counted them in his diary, and so did the last one, who wrote that on winter nights \
there seemed to be twice as many.

Ships came into the harbour with coal, timber and salt, and left with barrels of fish. When the fog \
was thick, the keeper rang a bell once every thirty seconds, so that a captain who could not see the \
light could still hear where the rocks were. A good captain listened to the bell, counted the \
seconds, and turned the ship slowly until the sound was on his left. A careless captain did not \
listen, and the names of his crew were cut into a stone beside the church.

In the spring of 1921 an engineer arrived from the city with a lamp that needed no oil. It was a \
small glass bulb, no larger than an apple, and it was connected by a cable to a generator in the \
cellar. The engineer explained that electricity flows through a wire in much the same way that water \
flows through a pipe: the pressure is called voltage, the flow is called current, and a thin wire \
resists the flow just as a narrow pipe does. When the current is strong enough, the wire becomes so \
hot that it glows.

The keeper asked what would happen if the generator stopped. The engineer smiled and said that it \
would not stop. The keeper nodded, thanked him for the explanation, and went down to the cellar, \
where he filled the old oil lamp, trimmed its wick, and put it on a shelf beside the door.

That autumn a storm broke the cable. The light went out at ten minutes past nine, and at a quarter \
past nine it was burning again. No ship was lost. When the engineer came back to repair the cable, \
he found the old lamp on the shelf, still warm, and he did not smile. He wrote in his report that \
the new lamp was brighter, cheaper and easier to clean, and that the old lamp should be kept.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Of every token after the first: its log-likelihood, f32 [T - 1], and the likeliest, int64."""

    log_likelihoods: torch.Tensor
    choices: torch.Tensor

    def loss(self) -> float:
        """The mean negative log-likelihood in nats per token."""
        return -self.log_likelihoods.double().mean().item()

    def agreement(self, other: "Reading") -> float:
        """The share of rows whose likeliest token is the other's too."""
        return (self.choices == other.choices).double().mean().item()


class Reader:
    """The whole of ``model`` on one CPU stage, in f32."""

    def __init__(self, model: Path) -> None:
        host_kernels.load()
        self._geometry = open_geometry(model)
        self._layers = range(self._geometry.num_layers)
        with torch.inference_mode():
            self._model = load_stage(
                model, layers=self._layers, first=True, last=True, dtype=torch.float32
            )

    @torch.inference_mode()
    def read(
        self,
        tokens: Sequence[int],
        pair: Pair,
        *,
        chunk_rows: int = CHUNK_ROWS,
        packed: bool = True,
    ) -> Reading:
        """``tokens`` as the model expects them from a cache of ``pair`` on every layer.

        Without ``packed`` rows are unpacked before they are attended. The sequence's records are
        given back.
        """
        formats = (pair,) * len(self._layers)
        fence = even(len(self._layers), 1)
        (sizing,) = sizings = size_fence(self._geometry, formats, fence, CacheOptions())
        cache = StageCache(
            TorchDevice("cpu"),
            self._geometry,
            sizing,
            units_for_rows(sizings, [len(tokens)])[0],
            max_sequences=1,
            attention=host_attention.loaded() if packed else None,
        )
        runner = Runner(self._model, cache, self._layers, deterministic=False)
        ids = torch.tensor(tokens)
        cache.open(0)
        likelihoods: list[torch.Tensor] = []
        choices: list[torch.Tensor] = []
        for start in range(0, len(tokens) - 1, chunk_rows):
            chunk = ids[:-1][start : start + chunk_rows]
            batch = cache.extend([Rows(0, start, len(chunk), sample=False)])
            logits = runner.head(runner.run(batch, self._model.embed(chunk)))
            wanted = ids[start + 1 : start + 1 + len(chunk), None]
            likelihoods.append(logits.log_softmax(-1).gather(1, wanted)[:, 0])
            choices.append(logits.argmax(-1))
        cache.release()
        return Reading(torch.cat(likelihoods), torch.cat(choices))


def run(
    model: Path, *, pairs: Sequence[str] = PAIRS, tokens: Sequence[int] | None = None
) -> Iterator[Row]:
    """Two rows a pair, one by one: the loss beside f16's, and the share of equal choices.

    ``tokens`` are those of ``TEXT`` unless given. InternalError if f32 and f16 do not agree.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        reader = Reader(model)
        ids = load_tokenizer(model).encode(TEXT) if tokens is None else tokens
        peer, exact = (reader.read(ids, parse_pair(name)) for name in (PEER, "f32"))
        if not abs(peer.loss() - exact.loss()) <= _AGREEMENT:
            raise InternalError(
                f"suite quality: {exact.loss()} nats/token of f32 rows, {peer.loss()} of f16 rows"
            )
        known = {PEER: peer, "f32": exact}
        for pair in pairs:
            found = known.get(pair) or reader.read(ids, parse_pair(pair))
            name = f"quality/{parse_pair(pair)}"
            yield lower_is_better(name, found.loss(), "nats/token", PEER, peer.loss(), _THREADS)
            yield higher_is_better(
                f"{name}/same-choice", found.agreement(peer), "share", PEER, 1.0, _THREADS
            )
    finally:
        torch.set_num_threads(before)
