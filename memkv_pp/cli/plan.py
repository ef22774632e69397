"""``memkv-pp plan``: will it fit, for how many tokens and sequences, and what lies idle."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memkv_pp.cli import options, plan_limits, plan_options
from memkv_pp.cli.output import write_message, write_result, write_text
from memkv_pp.cli.plan_tables import explained_tables, plan_bars, plan_table, sentences
from memkv_pp.errors import ConfigError
from memkv_pp.plan.changes import Question
from memkv_pp.plan.explain import explain
from memkv_pp.plan.mends import plan_or_mend
from memkv_pp.plan.page import render_page
from memkv_pp.plan.planner import PlanRequest
from memkv_pp.plan.pool_shares import stage_shares


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
        "  memkv-pp plan config.json --kv-budget 3.18GiB --kv-budget 8GiB --fence 0,16,48\n"
        "  memkv-pp plan qwen3.5-9b --device 24GiB --device 16GiB --explain --html plan.html\n"
        "  memkv-pp plan qwen3.5-27b --device-profile h100-80g --device-profile l40s --emit vllm",
    )
    options.add_model(parser)
    plan_options.add_devices(parser)
    parser.add_argument(
        "--ctx", metavar="N", type=int, help="tokens (default: the model's own, or what fits)"
    )
    parser.add_argument(
        "--sequences", metavar="N", type=int, help="sequences (default: as many as fit)"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say what binds and why, and what fences, formats and devices would change",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write the plan as one self-contained page, explained"
    )
    plan_limits.add_limits(parser)
    options.add_shared(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan MODEL and write the answer."""
    geometry = options.load_geometry(args)
    budget = plan_options.stage_budget(args)
    request = PlanRequest(
        budget=budget,
        options=options.cache_options(args, flat_rows=args.ctx or geometry.context_tokens),
        fence=options.parse_fence(args.fence or "balanced"),
        ctx=args.ctx,
        sequences=args.sequences,
        objective=args.objective,
        pins=plan_limits.parse_pins(args.pin),
        max_stage_bytes=plan_limits.parse_stage_sizes(args.max_stage_bytes),
        profiles=plan_options.profiles_of(args, budget.num_stages),
    )
    question = Question(
        geometry=geometry,
        request=request,
        pair=options.model_pair(args, geometry),
        formats_of=lambda pair: options.pairs_of(args, geometry, pair),
    )
    plan = plan_or_mend(question)
    formats = question.formats_of(question.pair)
    shares = stage_shares(geometry, formats, request, plan)
    tables = [plan_table(plan), plan_bars(plan, shares)]
    payload = asdict(plan)
    explanation = explain(question, plan) if args.explain or args.html else None
    if explanation is not None and args.explain:
        tables += explained_tables(explanation)
        described = asdict(explanation)
        payload |= {"alternatives": described.pop("alternatives"), "explanation": described}
    elif plan.alternatives:
        tables.append(sentences("better fences", "fence", plan.alternatives))
    if explanation is not None and args.html:
        command = shlex.join(("memkv-pp", *args.words))
        page = render_page(geometry, plan, explanation, command)
        _write_page(Path(args.html), page)
    times = plan_options.predicted_times(geometry, formats, request, plan)
    if times is not None:
        plan_options.add_predicted(payload, times, request.profiles)
        tables.append(plan_options.predicted_table(times, request.profiles))
    settings = plan_options.engine_settings(args, geometry, formats, request, plan)
    if settings is not None:
        payload["emit"] = plan_options.settings_payload(settings)
    write_result("plan", payload, tables, as_json=args.json)
    if settings is not None:
        write_text(settings.text, as_json=args.json)
    return 0


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {path} cannot be written: {error.strerror}") from error
    write_message(f"wrote {path}")
