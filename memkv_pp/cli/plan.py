"""``memkv-pp plan``: will it fit, for how many tokens and sequences, and what lies idle."""

import argparse
from dataclasses import asdict
from typing import Any

from memkv_pp.cli import options
from memkv_pp.cli.output import Table, write_result
from memkv_pp.errors import ConfigError
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan
from memkv_pp.plan.fences import Budget
from memkv_pp.plan.planner import PlanRequest, plan_capacity
from memkv_pp.units import format_size, parse_size


def add_parser(commands: Any) -> None:
    """Add ``plan`` to the subcommands."""
    parser = commands.add_parser(
        "plan",
        help="capacity on given devices, per stage and to the byte",
        description="Plan MODEL on pipeline stages: the fence, the longest sequence, how many"
        " sequences,\nand the bytes of each stage that lie idle. Metadata alone is enough.",
        epilog="examples:\n"
        "  memkv-pp plan qwen3.5-27b --device 24GiB --device 16GiB\n"
        "  memkv-pp plan model.gguf --device 80GiB --device 80GiB --ctx 131072 --sequences 4\n"
        "  memkv-pp plan config.json --kv-budget 3.18GiB --kv-budget 8GiB --fence 0,16,48",
    )
    options.add_model(parser)
    room = parser.add_mutually_exclusive_group(required=True)
    room.add_argument(
        "--device", metavar="SIZE", action="append", help="bytes of a stage's device; repeat"
    )
    room.add_argument(
        "--kv-budget", metavar="SIZE", action="append", help="cache bytes of a stage; repeat"
    )
    parser.add_argument(
        "--ctx", metavar="N", type=int, help="tokens (default: the model's own, or what fits)"
    )
    parser.add_argument(
        "--sequences", metavar="N", type=int, help="sequences (default: as many as fit)"
    )
    parser.add_argument(
        "--reserve", metavar="SIZE", help="bytes left free per device (default 1GiB)"
    )
    options.add_shared(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan MODEL and write the answer."""
    geometry = options.load_geometry(args)
    request = PlanRequest(
        budget=_budget(args),
        options=options.cache_options(args, flat_rows=args.ctx or geometry.context_tokens),
        fence=options.parse_fence(args.fence or "balanced"),
        ctx=args.ctx,
        sequences=args.sequences,
    )
    plan = plan_capacity(geometry, options.layer_pairs(args, geometry), request)
    write_result("plan", asdict(plan), _tables(geometry, plan), as_json=args.json)
    return 0


def _budget(args: argparse.Namespace) -> Budget:
    if args.device is None:
        if args.reserve is not None:
            raise ConfigError(
                "--reserve: it is taken from a device, and --kv-budget is cache alone",
                "leave --reserve out, or give --device",
            )
        return Budget(
            stage_bytes=tuple(parse_size(text, "--kv-budget") for text in args.kv_budget),
            cache_only=True,
        )
    return Budget(
        stage_bytes=tuple(parse_size(text, "--device") for text in args.device),
        reserve_bytes=parse_size(args.reserve or "1GiB", "--reserve"),
        dtype_bytes=options.dtype_bytes(args),
    )


def _tables(geometry: ModelGeometry, plan: CapacityPlan) -> list[Table]:
    columns = (
        "stage", "layers", "device", "weights", "cache budget", "context", "stranded",
        "capacity tokens", "sequences",
    )  # fmt: skip
    capacity = "any number of" if plan.capacity_tokens is None else plan.capacity_tokens
    tables = [
        Table(
            title=f"{geometry.name}: {capacity} tokens in one sequence,"
            f" {plan.sequences} sequence(s) of {plan.context_tokens};"
            f" stage {plan.binding_stage} binds, {format_size(plan.stranded_bytes)} stranded",
            columns=columns,
            rows=[
                (
                    str(row.stage),
                    f"[{row.layers[0]}, {row.layers[1]})",
                    *(
                        format_size(size)
                        for size in (
                            row.device_bytes,
                            row.weight_bytes,
                            row.cache_budget_bytes,
                            row.context_bytes,
                            row.stranded_bytes,
                        )
                    ),
                    _or_any(row.capacity_tokens),
                    _or_any(row.sequences),
                )
                for row in plan.stages
            ],
            numbers=frozenset(columns) - {"layers"},
        )
    ]
    if plan.alternatives:
        tables.append(
            Table(
                title="better fences",
                columns=("fence",),
                rows=[(alternative.says,) for alternative in plan.alternatives],
            )
        )
    return tables


def _or_any(value: int | None) -> str:
    return "any" if value is None else str(value)
