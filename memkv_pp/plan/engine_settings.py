"""What the settings of another engine are made from, and what no other engine can be told."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memkv_pp.formats import Pair
from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.sizing import CacheOptions, Layout, layer_bytes_per_token
from memkv_pp.units import ceil_div

FRACTION = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """A command line of ``engine``; in sentences, what it means and what it cannot say.

    ``notes`` are whole sentences, ``cannot`` continues "ENGINE cannot".
    """

    engine: str
    environment: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    notes: tuple[str, ...]
    cannot: tuple[str, ...]

    @property
    def command(self) -> str:
        """The line for a POSIX shell, environment first."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join((*words, *(shlex.quote(word) for word in self.arguments)))

    @property
    def text(self) -> str:
        """The command under its notes and limits as shell comments."""
        lines = [f"# {note}" for note in self.notes]
        lines += [f"# {self.engine} cannot {limit}" for limit in self.cannot]
        return "\n".join((*lines, self.command)) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitRequest:
    """A plan and what it was made from.

    ``model`` is a folder or a ``.gguf``, empty where the plan was made from metadata alone.
    ``formats`` has a pair per layer, NextN layers behind the trunk; ``dtype`` is bf16, f16 or f32.
    ``cache_only`` says that the plan's stages are cache budgets, not devices.
    """

    model: str
    geometry: ModelGeometry
    formats: Sequence[Pair]
    options: CacheOptions
    dtype: str
    plan: CapacityPlan
    cache_only: bool

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.plan.stages)

    @property
    def sequences(self) -> int:
        """Sequences at a time, at least one."""
        return max(self.plan.sequences, 1)

    @property
    def layers_per_stage(self) -> list[int]:
        """Trunk layers of each stage."""
        return [end - start for start, end in pairwise(self.plan.fence)]

    @property
    def pool_tokens(self) -> int:
        """Tokens of all sequences together, each in whole blocks."""
        block = self.options.block_tokens
        return ceil_div(self.plan.context_tokens, block) * block * self.sequences

    @property
    def slides(self) -> bool:
        """Whether any layer has a window."""
        return any(layer.kind is LayerKind.SLIDING for layer in self.geometry.layers)

    def stored_pairs(self) -> dict[int, Pair]:
        """Formats of the trunk layers that store rows; a latent layer's V is part of its K."""
        stored: dict[int, Pair] = {}
        for index, layer in enumerate(self.geometry.layers):
            pair = self.formats[index]
            if any(layer_bytes_per_token(layer, pair)):
                latent = layer.kind is LayerKind.LATENT
                stored[index] = Pair(pair.k, pair.k) if latent else pair
        return stored

    def one_format(self) -> tuple[str, tuple[int, ...]] | None:
        """(the format of both sides of every layer, layers that have the compute dtype instead).

        None where K and V of a layer differ, or two formats beside the compute dtype are in use.
        """
        stored = self.stored_pairs()
        if any(pair.k is not pair.v for pair in stored.values()):
            return None
        others = {pair.k.name for pair in stored.values()} - {self.dtype}
        if len(others) > 1:
            return None
        if not others:
            return self.dtype, ()
        return others.pop(), tuple(i for i, pair in stored.items() if pair.k.name == self.dtype)

    def least_share(self, *fields: str) -> int:
        """The least share of a device that the ``fields`` of its stage take, in 1/FRACTION.

        Rounded down, so that no stage takes more than it was planned.
        """
        return min(
            FRACTION * sum(getattr(s, name) for name in fields) // max(s.device_bytes, 1)
            for s in self.plan.stages
        )

    def lacks_format(self, option: str, instead: str) -> str:
        """That the plan's formats have no value of ``option``, and what to plan with to see one."""
        pairs = sorted({str(pair) for pair in self.stored_pairs().values()})
        return (
            f"hold {', '.join(pairs)} in its cache: {option} is left out, and the capacity planned"
            f" is not its own; plan again with one pair that it has, such as --kv {instead}"
        )

    def limits(self) -> list[str]:
        """What none of the engines can be told."""
        options = self.options
        limits = ["promise the plan's bytes: it measures its own buffers when it starts"]
        if self.slides and options.ring:
            limits.append(
                f"keep the {options.rewind_slack} rows of --rewind-slack behind a sliding window"
            )
        if any(layer.kind.has_state for layer in self.geometry.layers):
            limits.append("keep two f32 states per sequence, current and spare; it sizes its own")
        if options.layout is Layout.FLAT:
            limits.append("lay out one record per sequence, as --layout flat does")
        if options.spec_tokens:
            limits.append(f"take --spec {options.spec_tokens} from here: its drafter is not named")
        return limits


def fraction_text(share: int) -> str:
    """A share in 1/FRACTION as a decimal."""
    return f"{share / FRACTION:.4f}"


def joined(values: Sequence[int]) -> str:
    """Numbers between commas."""
    return ",".join(str(value) for value in values)
