"""``memkv-pp bench``: our figures beside a peer's, as ratios of one run."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memkv_pp.cli import options
from memkv_pp.cli.output import Table, write_message, write_result
from memkv_pp.errors import ConfigError

if TYPE_CHECKING:
    from memkv_pp.bench.rows import Row

SUITES = ("codec", "attend", "recurrent", "quality", "decode", "pipeline", "plan")
_WITH_MODEL = frozenset({"quality", "decode", "pipeline"})
DEFAULT_MODEL = ".models/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the subcommands."""
    parser = commands.add_parser(
        "bench",
        help="speed and quality as ratios: above 1 ours is better",
        description="Measure ours and a peer in one run, in turns, once both give the same answer."
        " Suite quality is the mean negative log-likelihood of a fixed text, beside f16 rows.",
        epilog="examples:\n  memkv-pp bench --suite codec\n  memkv-pp bench --suite quality\n"
        "  memkv-pp bench --suite pipeline --rounds 5 --json",
    )
    parser.add_argument(
        "--suite", choices=SUITES, default=None, help="one suite (default: all of them)"
    )
    parser.add_argument(
        "--model", metavar="MODEL", default=DEFAULT_MODEL, help="weights (default %(default)s)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="rounds (default 3)")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the suites and write their rows."""
    options.at_least_one("--rounds", args.rounds)
    suites = SUITES if args.suite is None else (args.suite,)
    if _WITH_MODEL.intersection(suites) and not Path(args.model).exists():
        raise ConfigError(
            f"--model: {args.model} does not exist", "run `make model`, or name a model"
        )
    rows: list[dict[str, Any]] = []
    for row in _rows(suites, Path(args.model), args.rounds):
        write_message(f"{row.name}: {row.ours:.3f} {row.unit}, ratio to {row.peer} {row.ratio:.2f}")
        rows.append(asdict(row))
    columns = ("name", "ours", "unit", "peer", "peer value", "ratio", "threads")
    table = Table(
        title="",
        columns=columns,
        rows=[
            (
                row["name"],
                f"{row['ours']:.3f}",
                row["unit"],
                row["peer"],
                f"{row['peer_value']:.3f}",
                f"{row['ratio']:.2f}",
                str(row["threads"]),
            )
            for row in rows
        ],
        numbers=frozenset({"ours", "peer value", "ratio", "threads"}),
    )
    write_result("bench", {"rows": rows}, [table], as_json=args.json)
    return 0


def _rows(suites: tuple[str, ...], model: Path, rounds: int) -> Iterator["Row"]:
    if "codec" in suites:
        from memkv_pp.bench import codec

        yield from codec.run(rounds=rounds)
    if "attend" in suites:
        from memkv_pp.bench import attend

        yield from attend.run(rounds=rounds)
    if "recurrent" in suites:
        from memkv_pp.bench import recurrent

        yield from recurrent.run(rounds=rounds)
    if "quality" in suites:
        from memkv_pp.bench import quality

        yield from quality.run(model)
    if "decode" in suites:
        from memkv_pp.bench import decode

        yield from decode.run(model, rounds=rounds)
    if "pipeline" in suites:
        from memkv_pp.bench import pipeline

        yield from pipeline.run(model, rounds=rounds)
    if "plan" in suites:
        from memkv_pp.bench import plan

        yield from plan.run(rounds=rounds)
