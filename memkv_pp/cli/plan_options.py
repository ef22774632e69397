"""What ``plan`` says about devices: sizes, profiles, predicted times, other engines' settings."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memkv_pp.cli import options
from memkv_pp.cli.output import Table
from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.emit import ENGINES, emit
from memkv_pp.plan.engine_settings import EmitRequest, EngineSettings
from memkv_pp.plan.profiles import DeviceProfile, load_profile, shipped_profiles, stage_profiles
from memkv_pp.plan.request import Budget, PlanRequest
from memkv_pp.plan.times import PipelineTimes, predict
from memkv_pp.units import parse_size

ASSUMES = (
    "the profile's bandwidth and peak are reached, every weight is read once a step (all experts"
    " of a mixture), and sending does not overlap computing"
)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """``--device``, ``--kv-budget``, ``--device-profile``, ``--reserve`` and ``--emit``."""
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--device", metavar="SIZE", action="append", help="bytes of a stage's device; repeat"
    )
    room.add_argument(
        "--kv-budget", metavar="SIZE", action="append", help="cache bytes of a stage; repeat"
    )
    parser.add_argument(
        "--device-profile",
        metavar="NAME|FILE",
        action="append",
        help="what a stage's device is, once for all or once per stage: predicts times, and gives"
        " the bytes where --device does not; a .json, or one of"
        f" {', '.join(shipped_profiles())}",
    )
    parser.add_argument(
        "--reserve", metavar="SIZE", help="bytes left free per device (default 1GiB)"
    )
    parser.add_argument(
        "--emit",
        choices=ENGINES,
        help="print the settings that realise the plan in another engine, and what it cannot",
    )
    parser.set_defaults(usage_error=parser.error)


def stage_budget(args: argparse.Namespace) -> Budget:
    """What the stages have, from the sizes or, where none are given, from the profiles."""
    if args.kv_budget is not None:
        if args.reserve is not None:
            raise ConfigError(
                "--reserve: it is taken from a device, and --kv-budget is cache alone",
                "leave --reserve out, or give --device",
            )
        return Budget(
            stage_bytes=tuple(parse_size(text, "--kv-budget") for text in args.kv_budget),
            cache_only=True,
            dtype_bytes=options.dtype_bytes(args),
        )
    sizes = tuple(parse_size(text, "--device") for text in args.device or ())
    if not sizes:
        sizes = tuple(load_profile(text).memory_bytes for text in args.device_profile or ())
    if not sizes:
        args.usage_error("one of --device, --kv-budget and --device-profile is required")
    return Budget(
        stage_bytes=sizes,
        reserve_bytes=parse_size(args.reserve or "1GiB", "--reserve"),
        dtype_bytes=options.dtype_bytes(args),
    )


def profiles_of(args: argparse.Namespace, num_stages: int) -> tuple[DeviceProfile, ...]:
    """One profile per stage, in order; empty without ``--device-profile``."""
    if args.device_profile is None:
        return ()
    return stage_profiles([load_profile(text) for text in args.device_profile], num_stages)


def predicted_times(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest, plan: CapacityPlan
) -> PipelineTimes | None:
    """Times of decoding what ``plan`` holds, at its full context; None without profiles."""
    if not request.profiles:
        return None
    return predict(
        geometry,
        formats,
        Fence(plan.fence),
        request.profiles,
        context_tokens=plan.context_tokens,
        sequences=max(plan.sequences, 1),
        dtype_bytes=request.budget.dtype_bytes,
        options=request.options,
    )


def add_predicted(
    payload: dict[str, Any], times: PipelineTimes, profiles: Sequence[DeviceProfile]
) -> None:
    """Add ``predicted``, and to each stage ``predicted_step_seconds``, to the answer."""
    predicted = asdict(times)
    for stage, seconds in zip(payload["stages"], predicted.pop("stage_seconds"), strict=True):
        stage["predicted_step_seconds"] = seconds
    payload["predicted"] = {
        "profiles": [profile.name for profile in profiles],
        "context_tokens": payload["context_tokens"],
        "sequences": payload["sequences"],
        **predicted,
        "slowest_stage": times.slowest_stage,
        "assumes": ASSUMES,
    }


def predicted_table(times: PipelineTimes, profiles: Sequence[DeviceProfile]) -> Table:
    """The times of each stage for people."""
    columns = ("stage", "profile", "step ms", "of it link ms")
    return Table(
        title="predicted, every weight read once a step:"
        f" {1000 * times.token_seconds:.3f} ms per token of one sequence,"
        f" {times.tokens_per_s:.1f} tokens/s in {times.waves} wave(s) of {times.wave_sequences};"
        f" stage {times.slowest_stage} is slowest",
        columns=columns,
        rows=[
            (str(stage), profile.name, f"{1000 * step:.3f}", f"{1000 * link:.3f}")
            for stage, (profile, step, link) in enumerate(
                zip(profiles, times.stage_seconds, times.link_seconds, strict=True)
            )
        ],
        numbers=frozenset(columns) - {"profile"},
    )


def engine_settings(
    args: argparse.Namespace,
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    request: PlanRequest,
    plan: CapacityPlan,
) -> EngineSettings | None:
    """What ``--emit`` asks for; None without it."""
    if args.emit is None:
        return None
    path = Path(args.model)
    return emit(
        args.emit,
        EmitRequest(
            model=args.model if path.suffix == ".gguf" or path.is_dir() else "",
            geometry=geometry,
            formats=formats,
            options=request.options,
            dtype=args.dtype,
            plan=plan,
            cache_only=request.budget.cache_only,
        ),
    )


def settings_payload(settings: EngineSettings) -> dict[str, Any]:
    """``emit`` of the answer."""
    return {
        "engine": settings.engine,
        "command": settings.command,
        "environment": dict(settings.environment),
        "arguments": list(settings.arguments),
        "notes": list(settings.notes),
        "cannot": list(settings.cannot),
    }
