"""From a user's knobs to a PipelineConfig: the fence, the pools, the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memkv_pp.config import (
    DTYPE_BYTES,
    Backend,
    LinkKind,
    PipelineConfig,
    units_for_rows,
    units_for_sequences,
)
from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence, explicit
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.model.kv_scales import choose_fp8_scales
from memkv_pp.plan.fences import Budget, FenceChoice, choose_fence
from memkv_pp.sizing import CacheOptions, Footprint, StageSizing, size_fence


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What a user may say about a pipeline; None where nothing was said.

    ``rows``: the most rows each known request can hold (prompt + max_new - 1 + K); they size the
    pools where ``ctx``, ``sequences`` and ``kv_bytes`` do not. ``kv_bytes``: cache bytes per stage.
    ``fp8_scales``: see ``model.kv_scales.choose_fp8_scales``.
    """

    model: str
    geometry: ModelGeometry
    formats: tuple[Pair, ...]
    options: CacheOptions
    rows: tuple[int, ...]
    ctx: int | None = None
    sequences: int | None = None
    kv_bytes: tuple[int, ...] | None = None
    stages: int | None = None
    fence: FenceChoice = "even"
    devices: tuple[str, ...] | None = None
    waves: int | None = None
    threads: int = 1
    dtype: str = "bf16"
    deterministic: bool = False
    fp8_scales: str | None = None
    backend: Backend = Backend.LOCAL
    link: LinkKind = LinkKind.ZMQ


def build_config(knobs: Knobs) -> PipelineConfig:
    """The pipeline that ``knobs`` describe; ConfigError or FenceError names the knob at fault."""
    for knob, value in (
        ("--ctx", knobs.ctx),
        ("--sequences", knobs.sequences),
        ("--stages", knobs.stages),
        ("--waves", knobs.waves),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{knob}: {value} is below 1")
    fence = _fence(knobs)
    sizings = size_fence(knobs.geometry, knobs.formats, fence, knobs.options)
    limit = context_limit(knobs)
    rows = [count for count in knobs.rows if count <= limit] or [1]
    sequences = knobs.sequences or len(rows)
    return PipelineConfig(
        model=knobs.model,
        geometry=knobs.geometry,
        formats=knobs.formats,
        fence=fence,
        options=knobs.options,
        units=_units(knobs, sizings, rows, sequences),
        devices=_devices(knobs, fence.num_stages),
        max_sequences=max(sequences, len(knobs.rows), 1),
        waves=knobs.waves or fence.num_stages + 1,
        context_tokens=limit,
        dtype=knobs.dtype,
        threads=knobs.threads,
        deterministic=knobs.deterministic,
        fp8_scales=choose_fp8_scales(
            knobs.fp8_scales, Path(knobs.model), knobs.formats[: knobs.geometry.num_layers]
        ),
        backend=knobs.backend,
        link=knobs.link,
    )


def context_limit(knobs: Knobs) -> int:
    """The most rows of a sequence: ``--ctx`` and the model's own context, whichever is less."""
    limits = [n for n in (knobs.ctx, knobs.geometry.context_tokens, knobs.options.flat_rows) if n]
    return min(limits, default=max(knobs.rows, default=1))


def _fence(knobs: Knobs) -> Fence:
    if not isinstance(knobs.fence, str):
        return explicit(knobs.fence, knobs.geometry.num_layers, knobs.stages)
    stages = knobs.stages or 1
    equal = Budget(
        stage_bytes=knobs.kv_bytes or (1 << 62,) * stages,
        cache_only=knobs.kv_bytes is not None,
        dtype_bytes=DTYPE_BYTES.get(knobs.dtype, 2),
    )
    if equal.num_stages != stages:
        raise ConfigError(f"--kv-bytes: {equal.num_stages} values for {stages} stages")
    return choose_fence(knobs.fence, knobs.geometry, knobs.formats, knobs.options, equal)


def _units(
    knobs: Knobs, sizings: Sequence[StageSizing], rows: Sequence[int], sequences: int
) -> tuple[Footprint, ...]:
    if knobs.kv_bytes is not None:
        if len(knobs.kv_bytes) != len(sizings):
            raise ConfigError(f"--kv-bytes: {len(knobs.kv_bytes)} values for {len(sizings)} stages")
        return tuple(
            sizing.units_within(size, sequences)
            for sizing, size in zip(sizings, knobs.kv_bytes, strict=True)
        )
    if knobs.ctx is None and knobs.sequences is None:
        return units_for_rows(sizings, rows)
    return units_for_sequences(sizings, knobs.ctx or max(rows), sequences)


def _devices(knobs: Knobs, stages: int) -> tuple[str, ...]:
    devices = knobs.devices or ("cpu",)
    if len(devices) == 1:
        devices *= stages
    if len(devices) != stages:
        raise ConfigError(f"--devices: {len(devices)} values for {stages} stages")
    if knobs.backend is Backend.RAY:
        # Ray shows an actor only the GPU it was given, as its first.
        return tuple("cuda:0" if device.startswith("cuda") else device for device in devices)
    return devices
