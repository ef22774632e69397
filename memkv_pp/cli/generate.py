"""``memkv-pp generate``: prompts through a pipeline, with every stage's bytes."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memkv_pp.cli import options
from memkv_pp.cli.output import Table, error_object, write_message, write_result
from memkv_pp.errors import ConfigError, ModelError
from memkv_pp.units import format_size, parse_size

if TYPE_CHECKING:
    from memkv_pp.admission.driver import Completion
    from memkv_pp.config import PipelineConfig
    from memkv_pp.model.tokenizer import Tokenizer
    from memkv_pp.serve.session import Report


def add_parser(commands: Any) -> None:
    """Add ``generate`` to the subcommands."""
    parser = commands.add_parser(
        "generate",
        help="run prompts through a pipeline and show every stage's bytes",
        description="Generate text from prompts that are served together on pipeline stages.",
        epilog="examples:\n"
        "  memkv-pp generate model.gguf --prompt 'Once upon a time' --stages 2\n"
        "  memkv-pp generate model.gguf --chat --prompt 'Why is the sky blue?' --stages 2"
        " --backend ray\n"
        "  memkv-pp generate folder/ --prompt-file prompts.txt --kv bf16 --fence 0,10,30 --json",
    )
    options.add_model(parser)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; repeat")
    add("--prompt-file", metavar="FILE", action="append", default=[], help="a prompt per line")
    add("--chat", action="store_true", help="each prompt is a user's turn in the chat template")
    add("--ctx", metavar="N", type=int, help="rows a sequence may hold (default: what is needed)")
    add("--sequences", metavar="N", type=int, help="sequences held at once (default: the prompts)")
    add("--kv-bytes", metavar="SIZE", action="append", help="cache bytes of a stage; repeat")
    add("--stages", metavar="N", type=int, help="pipeline stages (default 1, or what --fence says)")
    add("--backend", choices=("local", "ray"), default="local", help="threads or Ray actors")
    add("--link", choices=("zmq", "gloo", "nccl"), default="zmq", help="hidden states, with ray")
    add("--devices", metavar="LIST", help="torch devices of the stages, as in cpu,cuda:0")
    add("--waves", metavar="N", type=int, help="plans in flight (default: stages + 1)")
    add("--threads", metavar="N", type=int, default=1, help="torch threads per stage (default 1)")
    add("--max-new", metavar="N", type=int, default=64, help="most new tokens (default 64)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default 0)")
    add("--top-p", metavar="P", type=float, default=1.0, help="nucleus mass (default 1)")
    add("--seed", metavar="N", type=int, default=0, help="key of the draws (default 0)")
    add("--deterministic", action="store_true", help="every token the same in any company")
    add(
        "--fp8-scales",
        metavar="checkpoint|calibrate:N|one",
        help="scales of fp8 caches: the model folder's, from the first N rows of each layer (they"
        " depend on the first prompt), or 1.0 (default: the folder's where it has them, else 1.0)",
    )
    options.add_shared(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and write the answer."""
    prompts = _prompts(args)
    geometry = options.load_geometry(args)
    from memkv_pp.model.tokenizer import load_tokenizer
    from memkv_pp.serve.session import generate

    path = Path(args.model)
    if not path.exists() or path.suffix == ".json":
        raise ModelError(f"MODEL: {args.model} carries no weights", "give a .gguf or a folder")
    tokenizer = load_tokenizer(path)
    encoded = [_encode(tokenizer, prompt, chat=args.chat) for prompt in prompts]
    config = _config(args, geometry, encoded)
    if args.ctx is not None and args.ctx > config.context_tokens:
        write_message(
            f"warning: --ctx {args.ctx}: the model's own context is {config.context_tokens} tokens"
        )
    for warning in _fp8_warnings(args.fp8_scales, config):
        write_message(f"warning: {warning}")
    report = asyncio.run(generate(config, _requests(args, encoded, tokenizer)))
    failed = [c.error for c in report.completions if c.error is not None]
    if len(failed) == len(report.completions):
        raise failed[0]
    texts = [tokenizer.decode(completion.tokens) for completion in report.completions]
    write_result(
        "generate", _payload(report, texts), _tables(report, config, texts), as_json=args.json
    )
    return 1 if failed else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    for name in args.prompt_file:
        lines = Path(name).read_text("utf-8").splitlines()
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            "--prompt: there is no prompt", "give --prompt TEXT or --prompt-file FILE"
        )
    if args.max_new < 1:
        raise ConfigError(f"--max-new: {args.max_new} is below 1")
    if args.temperature < 0 or not 0 < args.top_p <= 1:
        raise ConfigError(
            f"--temperature {args.temperature} --top-p {args.top_p}: a temperature is at least 0,"
            " a nucleus mass above 0 and at most 1"
        )
    return prompts


def _encode(tokenizer: "Tokenizer", prompt: str, *, chat: bool) -> list[int]:
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def _config(args: argparse.Namespace, geometry: Any, encoded: list[list[int]]) -> "PipelineConfig":
    from memkv_pp.config import Backend, LinkKind
    from memkv_pp.serve.build import Knobs, build_config

    rows = tuple(len(ids) + args.max_new - 1 + args.spec for ids in encoded)
    kv_bytes = args.kv_bytes and tuple(parse_size(text, "--kv-bytes") for text in args.kv_bytes)
    return build_config(
        Knobs(
            model=str(Path(args.model).resolve()),
            geometry=geometry,
            formats=options.layer_pairs(args, geometry),
            options=options.cache_options(args, flat_rows=args.ctx or max(rows)),
            rows=rows,
            ctx=args.ctx,
            sequences=args.sequences,
            kv_bytes=kv_bytes or None,
            stages=args.stages,
            fence=options.parse_fence(args.fence or "even"),
            devices=tuple(args.devices.split(",")) if args.devices else None,
            waves=args.waves,
            threads=args.threads,
            dtype=args.dtype,
            deterministic=args.deterministic,
            fp8_scales=args.fp8_scales,
            backend=Backend(args.backend),
            link=LinkKind(args.link),
        )
    )


def _fp8_warnings(choice: str | None, config: "PipelineConfig") -> list[str]:
    from memkv_pp.fp8_scales import fp8_sides

    warnings: list[str] = []
    if choice is not None and not fp8_sides(config.formats):
        warnings.append(f"--fp8-scales {choice}: no layer's cache is fp8")
    if config.unscaled_layers:
        layers = ", ".join(map(str, config.unscaled_layers))
        warnings.append(
            f"fp8 caches of layers {layers} use a scale of 1.0: values beyond 448 are clipped"
            " (--fp8-scales calibrate:N)"
        )
    return warnings


def _requests(
    args: argparse.Namespace, encoded: list[list[int]], tokenizer: "Tokenizer"
) -> list[Any]:
    from memkv_pp.wire import Request, Sampling

    return [
        Request(
            request=index,
            prompt=tuple(ids),
            max_new=args.max_new,
            sampling=Sampling(
                temperature=args.temperature,
                top_p=args.top_p,
                seed=args.seed,
                prompt_index=index,
            ),
            end_ids=tokenizer.end_ids,
        )
        for index, ids in enumerate(encoded)
    ]


def _payload(report: "Report", texts: list[str]) -> dict[str, Any]:
    """CLI.md's object without its schema; no speculation, prefix cache or disk is in use."""
    return {
        "text": texts[0],
        "tokens": report.completions[0].tokens,
        "completions": [
            _completion(completion, text)
            for completion, text in zip(report.completions, texts, strict=True)
        ],
        "stages": [
            {
                "stage": stage.stage,
                "layers": list(stage.layers),
                "pid": stage.pid,
                "weight_bytes": stage.weight_bytes,
                "allocated_bytes": stage.allocated_bytes,
                "promised_bytes": promised,
                "peak_bytes": stage.peak_bytes,
                "plans_applied": stage.plans_applied,
                "layers_run": stage.layers_run,
            }
            for stage, promised in zip(report.stages, report.promised_bytes, strict=True)
        ],
        "speculation": {"windows": 0, "drafted": 0, "accepted": 0},
        "prefix": {"lookups": 0, "hit_tokens": 0},
        "swap": {
            "stages": [
                {
                    "stage": stage.stage,
                    "written_bytes": 0,
                    "read_bytes": 0,
                    "records": 0,
                    "extents": 0,
                    "corrupt": 0,
                }
                for stage in report.stages
            ]
        },
        "timing": {
            "load_s": report.timing.load_s,
            "prefill_s": report.timing.prefill_s,
            "decode_s": report.timing.decode_s,
            "tokens_per_s": report.timing.tokens_per_s,
            "orchestration_s": report.timing.orchestration_s,
        },
    }


def _completion(completion: "Completion", text: str) -> dict[str, Any]:
    error = None if completion.error is None else error_object(completion.error)
    return {
        "text": text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "error": error,
    }


def _tables(report: "Report", config: "PipelineConfig", texts: list[str]) -> list[Table]:
    columns = ("stage", "layers", "pid", "weights", "cache", "cache bytes", "peak", "layers run")
    timing = report.timing
    return [
        Table(
            title="",
            columns=("prompt", "end", "text"),
            rows=[
                (str(i), completion.finish_reason, text.strip())
                for i, (completion, text) in enumerate(zip(report.completions, texts, strict=True))
            ],
        ),
        Table(
            title=f"{config.geometry.name} on {config.num_stages} stages ({config.backend.value}),"
            f" {timing.tokens_per_s:.1f} tokens/s; allocated = promised on every stage",
            columns=columns,
            rows=[
                (
                    str(stage.stage),
                    f"{stage.layers[0]}-{stage.layers[1] - 1}",
                    str(stage.pid),
                    format_size(stage.weight_bytes),
                    format_size(stage.allocated_bytes),
                    str(stage.allocated_bytes),
                    format_size(stage.peak_bytes),
                    str(stage.layers_run),
                )
                for stage in report.stages
            ],
            numbers=frozenset(columns) - {"layers"},
        ),
    ]
