"""What a plan is asked for: what the stages have, which fence, for what, and within which limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from memkv_pp.errors import ConfigError, FenceError
from memkv_pp.fence import Fence, even
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.profiles import DeviceProfile
from memkv_pp.sizing import CacheOptions, stage_fixed_bytes, stage_weight_elements

FenceChoice = Literal["even", "balanced"] | tuple[int, ...]

Objective = Literal["capacity", "sequences", "time"]

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the stages have.

    ``stage_bytes``: device bytes per stage, or cache bytes per stage with ``cache_only`` (then
    weights, buffers and reserve cost nothing). ``dtype_bytes`` is a weight element's size.
    """

    stage_bytes: tuple[int, ...]
    cache_only: bool = False
    reserve_bytes: int = 0
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if not self.stage_bytes:
            raise ConfigError(
                "--device: no stage has any bytes", "give --device or --kv-budget once per stage"
            )

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stage_bytes)

    def weight_bytes(
        self, geometry: ModelGeometry, fence: Fence, stage: int, options: CacheOptions
    ) -> int:
        """Weights of a stage in the compute dtype; 0 with ``cache_only``."""
        if self.cache_only:
            return 0
        return self.dtype_bytes * stage_weight_elements(
            geometry, fence, stage, spec=options.spec_tokens > 0
        )

    def fixed_bytes(
        self,
        geometry: ModelGeometry,
        fence: Fence,
        stage: int,
        options: CacheOptions,
        sequences: int,
    ) -> int:
        """Buffers of a stage for ``sequences``; 0 with ``cache_only``."""
        if self.cache_only:
            return 0
        return stage_fixed_bytes(
            geometry, fence, stage, options, dtype_bytes=self.dtype_bytes, sequences=sequences
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan for. ``ctx`` and ``sequences`` are None where the user gave none.

    ``objective`` is what the balanced fence makes the most of; ``time`` needs ``profiles``, one per
    stage. ``pins`` are (layer, stage). ``max_stage_bytes`` are (stage, bytes): the most that the
    weights, buffers and cache of that stage may take together, of what ``budget`` gives it.
    """

    budget: Budget
    options: CacheOptions
    fence: FenceChoice = "balanced"
    ctx: int | None = None
    sequences: int | None = None
    objective: Objective = "capacity"
    pins: tuple[tuple[int, int], ...] = ()
    max_stage_bytes: tuple[tuple[int, int], ...] = ()
    profiles: tuple[DeviceProfile, ...] = ()

    def __post_init__(self) -> None:
        for knob, value in (("--ctx", self.ctx), ("--sequences", self.sequences)):
            if value is not None and value < 1:
                raise ConfigError(f"{knob}: {value} is below 1")
        stages = self.budget.num_stages
        for stage, most in self.max_stage_bytes:
            if not 0 <= stage < stages:
                raise ConfigError(f"--max-stage-bytes: stage {stage} is not among {stages} stages")
            if most < 0:
                raise ConfigError(f"--max-stage-bytes: {most} bytes on stage {stage} are negative")
        for name in ("pins", "max_stage_bytes"):
            _check_once(name, getattr(self, name))
        if self.objective == "time" and len(self.profiles) != stages:
            raise ConfigError(
                f"--objective time: {len(self.profiles)} device profiles for {stages} stages",
                "give --device-profile once, or once per stage",
            )

    @property
    def copies(self) -> int:
        """Sequences that must fit together."""
        return self.sequences or 1

    def usable_bytes(self, stage: int) -> int:
        """Bytes for the weights, buffers and cache of ``stage``: less its reserve, at most its cap."""
        have = self.budget.stage_bytes[stage] - self.budget.reserve_bytes
        return min(have, dict(self.max_stage_bytes).get(stage, have))


def check_pins(
    pins: Sequence[tuple[int, int]], geometry: ModelGeometry, num_stages: int
) -> tuple[tuple[int, int], ...]:
    """The pins in layer order, with the first layer and the last one, which never move.

    A fence that honours them exists exactly if no two neighbours among them contradict; FenceError
    names the two that do, or the layer or stage that is not there.
    """
    num_layers = geometry.num_layers
    even(num_layers, num_stages)
    for layer, stage in pins:
        if not 0 <= layer < num_layers:
            raise FenceError(f"--pin: layer {layer} is not among {num_layers} layers")
        if not 0 <= stage < num_stages:
            raise FenceError(f"--pin: stage {stage} is not among {num_stages} stages")
    parted = parting_cuts(geometry)
    ordered = sorted({(0, 0), (num_layers - 1, num_stages - 1), *pins})
    for (layer, stage), (later, after) in pairwise(ordered):
        cuts = sum(cut not in parted for cut in range(layer + 1, later + 1))
        if 0 <= after - stage <= cuts:
            continue
        if not pins:
            raise FenceError(
                f"--fence: no cut into {num_stages} stages keeps shared layers with their sources",
                "use fewer stages",
            )
        raise FenceError(
            f"--pin: layer {layer} on stage {stage} and layer {later} on stage {after} contradict:"
            f" {cuts} cut(s) can be made between them, {after - stage} are needed",
            "stages follow the order of the layers, each owns at least one, and a shared layer"
            " stays with its source",
        )
    return tuple(ordered)


def check_pinned(fence: Fence, pins: Sequence[tuple[int, int]]) -> None:
    """Raise FenceError if ``fence`` puts a pinned layer on another stage."""
    for layer, stage in pins:
        if fence.stage_of(layer) != stage:
            raise FenceError(
                f"--pin: layer {layer} is to be on stage {stage}, but --fence"
                f" {list(fence.cuts)} has it on stage {fence.stage_of(layer)}",
                "leave one of the two out",
            )


def parting_cuts(geometry: ModelGeometry) -> set[int]:
    """Cuts that would part a shared layer from its source."""
    return {
        cut for source, reader in geometry.shared_edges() for cut in range(source + 1, reader + 1)
    }


def _check_once(name: str, pairs: Sequence[tuple[int, int]]) -> None:
    knob, what = ("--pin", "layer") if name == "pins" else ("--max-stage-bytes", "stage")
    given: dict[int, int] = {}
    for key, value in pairs:
        if given.setdefault(key, value) != value:
            raise ConfigError(f"{knob}: {what} {key} is given {given[key]} and {value}")
