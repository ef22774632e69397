"""``memkv-pp size``: what one sequence takes, layer by layer."""

import argparse
from dataclasses import asdict
from typing import Any

from memkv_pp.cli import options
from memkv_pp.cli.output import Table, write_result
from memkv_pp.fence import explicit
from memkv_pp.plan.model_size import ModelSize, size_model
from memkv_pp.units import format_size


def add_parser(commands: Any) -> None:
    """Add ``size`` to the subcommands."""
    parser = commands.add_parser(
        "size",
        help="what one sequence takes, layer by layer",
        description="Size one sequence of N tokens on one unsplit stage, from metadata alone.",
        epilog="examples:\n"
        "  memkv-pp size qwen3.5-9b --ctx 131072\n"
        "  memkv-pp size model.gguf --ctx 8192 --kv q8_0:q4_0 --json\n"
        "  memkv-pp size config.json --ctx 32768 --ring off",
    )
    options.add_model(parser)
    parser.add_argument("--ctx", metavar="N", type=int, required=True, help="tokens")
    options.add_shared(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Size MODEL and write the answer."""
    options.at_least_one("--ctx", args.ctx)
    geometry = options.load_geometry(args)
    choice = options.parse_fence(args.fence or "even")
    if not isinstance(choice, str):
        explicit(choice, geometry.num_layers)
    size = size_model(
        geometry,
        options.layer_pairs(args, geometry),
        options.cache_options(args, flat_rows=args.ctx),
        args.ctx,
    )
    write_result("size", asdict(size), _tables(size), as_json=args.json)
    return 0


def _tables(size: ModelSize) -> list[Table]:
    columns = ("layer", "kind", "k", "v", "bytes/token", "live bytes", "allocated bytes")
    return [
        Table(
            title=f"{size.model}: {size.context_tokens} tokens, {format_size(size.total_bytes)}",
            columns=columns,
            rows=[
                (
                    str(layer.layer),
                    layer.kind,
                    layer.k_format or "-",
                    layer.v_format or "-",
                    str(layer.k_bytes_per_token + layer.v_bytes_per_token),
                    str(layer.context_bytes),
                    str(layer.allocated_bytes),
                )
                for layer in size.layers
            ],
            numbers=frozenset(columns) - {"kind", "k", "v"},
        ),
        Table(
            title="",
            columns=("figure", "value"),
            rows=[
                ("bytes per token", str(size.bytes_per_token)),
                ("ring bytes per token", str(size.ring_bytes_per_token)),
                ("ring rows", str(size.ring_rows)),
                ("bytes per sequence", str(size.bytes_per_sequence)),
                ("total bytes", str(size.total_bytes)),
            ],
            numbers=frozenset({"value"}),
        ),
    ]
