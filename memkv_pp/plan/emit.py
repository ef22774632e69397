"""A plan as the settings of other engines: what they can be told, and what they cannot.

Names and values of options as the engines' own pages and sources had them in 2026: vLLM
``vllm/config/cache.py`` and ``engine/arg_utils.py``; llama.cpp ``tools/server/README.md`` and
``docs/multi-gpu.md``; SGLang ``docs/advanced_features/server_arguments.md``. Both
``VLLM_PP_LAYER_PARTITION`` and ``SGLANG_PP_LAYER_PARTITION`` are layers per stage.
"""

from collections.abc import Callable, Mapping

from memkv_pp.errors import ConfigError
from memkv_pp.formats import Family
from memkv_pp.plan.engine_settings import (
    FRACTION,
    EmitRequest,
    EngineSettings,
    fraction_text,
    joined,
)
from memkv_pp.sizing import Layout

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_GGML_TYPES = frozenset(("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"))
_BUILT_IN_PAIRS = frozenset(("f16:f16", "bf16:bf16", "q8_0:q8_0", "q4_0:q4_0"))
_USED = ("weight_bytes", "fixed_bytes", "cache_budget_bytes")
_SMALLEST_BLOCK = (
    "give each stage a pool of its own size: all get the blocks of the stage that holds the fewest"
)


def emit(engine: str, request: EmitRequest) -> EngineSettings:
    """The settings of ``engine`` for a plan; ConfigError naming --emit for an unknown one."""
    if engine not in _WRITERS:
        raise ConfigError(f"--emit: {engine[:64]!r} is no engine", f"known: {', '.join(ENGINES)}")
    return _WRITERS[engine](request)


def _vllm(request: EmitRequest) -> EngineSettings:
    plan, options = request.plan, request.options
    words = ["vllm", "serve", request.model or "MODEL", "--dtype", _DTYPES[request.dtype]]
    notes, cannot = _placeholder(request), request.limits()
    if request.model.endswith(".gguf"):
        notes.append("vLLM reads a .gguf through its vllm-gguf-plugin, and wants --tokenizer.")
    environment = _partition(request, "VLLM_PP_LAYER_PARTITION")
    if request.num_stages > 1:
        words += ["--pipeline-parallel-size", str(request.num_stages)]
        cannot.append(_SMALLEST_BLOCK)
    words += ["--max-model-len", str(plan.context_tokens)]
    words += ["--max-num-seqs", str(request.sequences)]
    step_rows = max(options.prefill_chunk, request.sequences * (1 + options.spec_tokens))
    words += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(step_rows)]
    if options.layout is Layout.PAGED:
        words += ["--block-size", str(options.block_tokens)]
    if request.slides and not options.ring:
        words.append("--disable-hybrid-kv-cache-manager")
    name, skipped = request.one_format() or ("", ())
    value = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4", request.dtype: "auto"}.get(name)
    if value is None:
        cannot.append(request.lacks_format("--kv-cache-dtype", "fp8"))
    else:
        words += ["--kv-cache-dtype", value]
        if skipped:
            words += ["--kv-cache-dtype-skip-layers", *map(str, skipped)]
        if value == "nvfp4":
            notes.append("--kv-cache-dtype nvfp4 needs a Blackwell GPU and a backend that has it.")
    if request.cache_only:
        budgets = {stage.cache_budget_bytes for stage in plan.stages}
        if len(budgets) == 1:
            words += ["--kv-cache-memory-bytes", str(budgets.pop())]
        else:
            cannot.append("give each stage its own --kv-cache-memory-bytes; it is left out")
    else:
        share = request.least_share(*_USED)
        words += ["--gpu-memory-utilization", fraction_text(share)]
        notes.append("--gpu-memory-utilization is a share of the --device bytes planned with.")
        if len({stage.device_bytes for stage in plan.stages}) > 1:
            idle = (
                (
                    s.stage,
                    sum(getattr(s, name) for name in _USED) - s.device_bytes * share // FRACTION,
                )
                for s in plan.stages
            )
            cannot.append(
                "give each GPU its own --gpu-memory-utilization: the least is set, and beyond it"
                f" lie {', '.join(f'{left} bytes of stage {stage}' for stage, left in idle)}"
            )
    return _settings("vllm", environment, words, notes, cannot)


def _sglang(request: EmitRequest) -> EngineSettings:
    plan, options = request.plan, request.options
    words = ["python", "-m", "sglang.launch_server", "--model-path", request.model or "MODEL"]
    words += ["--dtype", _DTYPES[request.dtype]]
    notes, cannot = _placeholder(request), request.limits()
    environment = _partition(request, "SGLANG_PP_LAYER_PARTITION")
    if request.num_stages > 1:
        words += ["--pp-size", str(request.num_stages)]
        cannot.append(_SMALLEST_BLOCK)
    words += ["--context-length", str(plan.context_tokens)]
    words += ["--max-running-requests", str(request.sequences)]
    words += ["--max-total-tokens", str(request.pool_tokens)]
    words += ["--chunked-prefill-size", str(options.prefill_chunk)]
    if options.layout is Layout.PAGED:
        words += ["--page-size", str(options.block_tokens)]
    if request.slides and not options.ring:
        words.append("--disable-hybrid-swa-memory")
    name, skipped = request.one_format() or ("", ())
    value = {"fp8": "fp8_e4m3", "bf16": "bf16"}.get(name)
    if name == request.dtype:
        value = "auto"
    if value is None or skipped:
        cannot.append(request.lacks_format("--kv-cache-dtype", "fp8"))
    else:
        words += ["--kv-cache-dtype", value]
    if not request.cache_only:
        share = request.least_share("weight_bytes", "cache_budget_bytes")
        words += ["--mem-fraction-static", fraction_text(share)]
        notes.append("--mem-fraction-static is weights and cache over the --device bytes.")
    return _settings("sglang", environment, words, notes, cannot)


def _llama_cpp(request: EmitRequest) -> EngineSettings:
    own = request.model.endswith(".gguf")
    words = ["llama-server", "-m", request.model if own else "MODEL.gguf"]
    words += ["-ngl", "all", "-fit", "off"]
    notes, cannot = [], request.limits()
    if not own:
        notes.append("Put the model, converted to GGUF, in place of MODEL.gguf.")
    if request.num_stages > 1:
        shares = request.layers_per_stage
        shares[-1] += len(request.geometry.nextn_layers) + 1
        words += ["-sm", "layer", "-ts", joined(shares)]
        notes.append(
            "-ts takes proportions, not bytes: a layer goes to the first GPU whose summed share of"
            f" {sum(shares)} lies above its number. Layers per stage therefore make the plan's cuts;"
            " the last GPU has one more for the output head, and one for each NextN layer."
        )
    else:
        words += ["-sm", "none"]
    words += ["-c", str(request.plan.context_tokens * request.sequences)]
    words += ["-np", str(request.sequences)]
    if request.sequences > 1:
        notes.append(f"-c is shared in equal parts by the {request.sequences} slots of -np.")
    words += ["-ub", str(request.options.prefill_chunk)]
    if request.slides and not request.options.ring:
        words.append("--swa-full")
    pairs = set(request.stored_pairs().values())
    pair = next(iter(pairs)) if len(pairs) == 1 else None
    if pair and {pair.k.name, pair.v.name} <= _GGML_TYPES:
        words += ["-ctk", pair.k.name, "-ctv", pair.v.name]
        if pair.v.family is Family.GGML:
            words += ["-fa", "on"]
        if Family.GGML in (pair.k.family, pair.v.family) and str(pair) not in _BUILT_IN_PAIRS:
            notes.append(f"{pair} may need a CUDA build with GGML_CUDA_FA_ALL_QUANTS=ON.")
    elif pairs:
        cannot.append(request.lacks_format("-ctk and -ctv", "q8_0:q5_1"))
    cannot.append("limit the bytes of a GPU: what does not fit fails when it is allocated")
    cannot.append(
        f"run weights from {request.dtype} as planned: they keep the file's types (file_bytes, not"
        " weight_bytes), and the embedding stays in host memory"
    )
    return _settings("llama.cpp", (), words, notes, cannot)


def _partition(request: EmitRequest, variable: str) -> tuple[tuple[str, str], ...]:
    return ((variable, joined(request.layers_per_stage)),) if request.num_stages > 1 else ()


def _placeholder(request: EmitRequest) -> list[str]:
    return [] if request.model else ["Put the model's folder or repository in place of MODEL."]


def _settings(
    engine: str,
    environment: tuple[tuple[str, str], ...],
    words: list[str],
    notes: list[str],
    cannot: list[str],
) -> EngineSettings:
    return EngineSettings(
        engine=engine,
        environment=environment,
        arguments=tuple(words),
        notes=tuple(notes),
        cannot=tuple(cannot),
    )


_WRITERS: Mapping[str, Callable[[EmitRequest], EngineSettings]] = {
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "sglang": _sglang,
}
ENGINES = tuple(_WRITERS)
