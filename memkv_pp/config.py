"""Frozen configurations, validated once; the only reader of the environment.

A knob is Python: the command line and launch files build these and hand them down.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales, fp8_sides
from memkv_pp.geometry import ModelGeometry
from memkv_pp.sizing import CacheOptions, Footprint, StageSizing, size_fence

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


class Backend(StrEnum):
    """``local``: one process, a thread per stage. ``ray``: an actor per stage."""

    LOCAL = "local"
    RAY = "ray"


class LinkKind(StrEnum):
    """What carries hidden states between the stages of the ray backend."""

    ZMQ = "zmq"
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """One pipeline: what it serves, how it is cut, what each stage holds.

    ``units`` is the size of each stage's three pools. ``devices`` has a torch device per stage.
    ``context_tokens`` bounds a sequence's rows. ``heartbeat_timeout_s``: a stage that is silent for
    so long is lost. ``resources`` has custom Ray resources per stage, such as ``{"A100": 1}``.
    """

    model: str
    geometry: ModelGeometry
    formats: tuple[Pair, ...]
    fence: Fence
    options: CacheOptions
    units: tuple[Footprint, ...]
    devices: tuple[str, ...]
    max_sequences: int
    waves: int
    context_tokens: int
    dtype: str = "bf16"
    threads: int = 1
    deterministic: bool = False
    fp8_scales: Fp8Scales = UNIT_SCALES
    backend: Backend = Backend.LOCAL
    link: LinkKind = LinkKind.ZMQ
    heartbeat_timeout_s: float = 5.0
    start_timeout_s: float = 300.0
    plan_deadline_s: float = 300.0
    resources: tuple[dict[str, float], ...] = field(default=())

    def __post_init__(self) -> None:
        stages = self.fence.num_stages
        for knob, values in (("--kv-bytes", self.units), ("--devices", self.devices)):
            if len(values) != stages:
                raise ConfigError(f"{knob}: {len(values)} values for {stages} stages")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype: {self.dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
        for knob, value in (("--threads", self.threads), ("--sequences", self.max_sequences)):
            if value < 1:
                raise ConfigError(f"{knob}: {value} is below 1")
        if self.deterministic and self.threads & (self.threads - 1):
            raise ConfigError(
                f"--threads: {self.threads} with --deterministic",
                "use a power of two: an uneven split of rows over threads changes vector tails",
            )
        if self.deterministic and self.fp8_scales.calibration_rows:
            raise ConfigError(
                "--fp8-scales calibrate with --deterministic: calibrated scales come from the first"
                " rows, whoever's they are",
                "use --fp8-scales checkpoint or one",
            )
        if self.link is LinkKind.NCCL and any(not d.startswith("cuda") for d in self.devices):
            raise ConfigError("--link nccl: every stage needs a cuda device", "use --link gloo")
        if self.resources and len(self.resources) != stages:
            raise ConfigError(f"resources: {len(self.resources)} entries for {stages} stages")

    @property
    def unscaled_layers(self) -> tuple[int, ...]:
        """Trunk layers with an fp8 side whose scale is 1.0: it clips values beyond 448."""
        if self.fp8_scales.calibration_rows:
            return ()
        trunk = self.formats[: self.geometry.num_layers]
        unscaled = (
            layer
            for layer, side in fp8_sides(trunk)
            if self.fp8_scales.of_layer(layer)[side == "v"] == 1.0
        )
        return tuple(dict.fromkeys(unscaled))

    @property
    def num_stages(self) -> int:
        """Stages."""
        return self.fence.num_stages

    def sizings(self) -> tuple[StageSizing, ...]:
        """The sizing of every stage."""
        return size_fence(self.geometry, self.formats, self.fence, self.options)


def units_for_rows(sizings: Sequence[StageSizing], rows: Sequence[int]) -> tuple[Footprint, ...]:
    """Pools that hold sequences of ``rows`` all at once, per stage."""
    totals: list[Footprint] = []
    for sizing in sizings:
        total = Footprint()
        for count in rows:
            total = total.plus(sizing.footprint(count))
        totals.append(total)
    return tuple(totals)


def units_for_sequences(
    sizings: Sequence[StageSizing], rows: int, sequences: int
) -> tuple[Footprint, ...]:
    """Pools that hold ``sequences`` of ``rows`` each, per stage."""
    return tuple(sizing.footprint(rows).times(sequences) for sizing in sizings)


def ray_address() -> str | None:
    """The Ray cluster the environment names (RAY_ADDRESS), or None to start one here."""
    return os.environ.get("RAY_ADDRESS") or None


def compiler() -> str | None:
    """The C++ compiler the environment names (CXX), or None to look for one."""
    return os.environ.get("CXX") or None


def cache_directory() -> Path:
    """Where compiled kernels are kept: under XDG_CACHE_HOME, else ``~/.cache``."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules have a relative path ignored.
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "memkv-pp" / "kernels"
