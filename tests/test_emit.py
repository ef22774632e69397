import json
from bisect import bisect_right
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.cli import main
from memkv_pp.errors import ConfigError
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import ModelGeometry, uniform_geometry
from memkv_pp.model.geometry_file import to_json
from memkv_pp.plan.emit import ENGINES, emit
from memkv_pp.plan.engine_settings import EmitRequest, EngineSettings
from memkv_pp.plan.planner import PlanRequest, plan_capacity
from memkv_pp.plan.request import Budget
from memkv_pp.sizing import CacheOptions, Layout
from memkv_pp.testing.geometries import full_layer, known_geometry, latent_layer, recurrent_layer
from memkv_pp.units import GIB

MODEL = uniform_geometry(48, kv_heads=4, head_size=128, name="m")


def settings(engine: str, **wanted) -> EngineSettings:
    return emit(engine, planned(**wanted))


def planned(
    *,
    geometry: ModelGeometry = MODEL,
    pair: str = "bf16",
    pairs: dict[int, str] | None = None,
    stage_bytes: tuple[int, ...] = (4 * GIB, 8 * GIB),
    cache_only: bool = False,
    reserve_bytes: int = GIB,
    cuts: tuple[int, ...] | None = (0, 16, 48),
    ctx: int = 1000,
    sequences: int = 3,
    options: CacheOptions | None = None,
    dtype: str = "bf16",
    model: str = "folder",
) -> EmitRequest:
    own = {index: parse_pair(text) for index, text in (pairs or {}).items()}
    count = geometry.num_layers + len(geometry.nextn_layers)
    formats: tuple[Pair, ...] = tuple(own.get(i, parse_pair(pair)) for i in range(count))
    options = options or CacheOptions()
    budget = Budget(
        stage_bytes=stage_bytes,
        cache_only=cache_only,
        reserve_bytes=0 if cache_only else reserve_bytes,
    )
    plan = plan_capacity(
        geometry,
        formats,
        PlanRequest(
            budget=budget, options=options, fence=cuts or "even", ctx=ctx, sequences=sequences
        ),
    )
    return EmitRequest(
        model=model,
        geometry=geometry,
        formats=formats,
        options=options,
        dtype=dtype,
        plan=plan,
        cache_only=cache_only,
    )


def value_of(answer: EngineSettings, option: str) -> str | None:
    words = answer.arguments
    return words[words.index(option) + 1] if option in words else None


def says(sentences: tuple[str, ...], text: str) -> bool:
    return any(text in sentence for sentence in sentences)


def test_vllm_gets_layers_per_stage_and_the_plans_lengths():
    answer = settings("vllm")
    assert answer.command == (
        "VLLM_PP_LAYER_PARTITION=16,32 vllm serve folder --dtype bfloat16"
        " --pipeline-parallel-size 2 --max-model-len 1000 --max-num-seqs 3"
        " --enable-chunked-prefill --max-num-batched-tokens 512 --block-size 16"
        " --kv-cache-dtype auto --gpu-memory-utilization 0.7500"
    )
    assert says(answer.cannot, f"beyond it lie 0 bytes of stage 0, {GIB} bytes of stage 1")
    assert says(answer.cannot, "the stage that holds the fewest")


def test_sglang_gets_layers_per_stage_and_a_pool_in_whole_pages():
    answer = settings("sglang")
    assert answer.environment == (("SGLANG_PP_LAYER_PARTITION", "16,32"),)
    assert value_of(answer, "--pp-size") == "2"
    assert value_of(answer, "--context-length") == "1000"
    assert value_of(answer, "--max-running-requests") == "3"
    assert value_of(answer, "--max-total-tokens") == str(3 * 1008)
    assert value_of(answer, "--page-size") == "16"
    assert value_of(answer, "--kv-cache-dtype") == "auto"
    assert value_of(answer, "--mem-fraction-static") == "0.7499"


def test_llama_cpp_gets_proportions_that_count_the_head_and_one_context_for_all_slots():
    answer = settings("llama.cpp", pair="q8_0:q5_1", model="m.gguf")
    assert answer.command == (
        "llama-server -m m.gguf -ngl all -fit off -sm layer -ts 16,33 -c 3000 -np 3 -ub 512"
        " -ctk q8_0 -ctv q5_1 -fa on"
    )
    assert says(answer.notes, "proportions, not bytes")
    assert says(answer.notes, "GGML_CUDA_FA_ALL_QUANTS")
    assert says(answer.cannot, "limit the bytes of a GPU")
    drafted = replace(MODEL, nextn_layers=(full_layer(4, 128),))
    assert value_of(settings("llama.cpp", geometry=drafted), "-ts") == "16,34"


ONE_STAGE = planned(
    geometry=uniform_geometry(120, kv_heads=1, head_size=32), stage_bytes=(4 * GIB,), cuts=None
)


@given(st.sets(st.integers(1, 119), min_size=1, max_size=9))
def test_llama_cpps_rule_makes_the_plans_cuts_of_the_proportions(inner):
    cuts = (0, *sorted(inner), 120)
    plan = replace(ONE_STAGE.plan, fence=cuts, stages=ONE_STAGE.plan.stages * (len(cuts) - 1))
    written = value_of(emit("llama.cpp", replace(ONE_STAGE, plan=plan)), "-ts")
    assert written is not None
    shares = [int(share) for share in written.split(",")]
    splits = (np.cumsum(shares, dtype=np.float32) / np.float32(sum(shares))).tolist()
    owners = [bisect_right(splits, float(np.float32(i) / np.float32(121))) for i in range(121)]
    assert owners == [*(bisect_right(cuts, i) - 1 for i in range(120)), len(shares) - 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_stage_needs_no_partition(engine):
    answer = settings(engine, stage_bytes=(8 * GIB,), cuts=None)
    assert answer.environment == ()
    assert not {"--pipeline-parallel-size", "--pp-size", "-ts"} & set(answer.arguments)


@pytest.mark.parametrize(
    ("engine", "option", "pair", "value"),
    [
        ("vllm", "--kv-cache-dtype", "fp8", "fp8_e4m3"),
        ("vllm", "--kv-cache-dtype", "nvfp4", "nvfp4"),
        ("vllm", "--kv-cache-dtype", "f16", None),
        ("vllm", "--kv-cache-dtype", "q8_0", None),
        ("vllm", "--kv-cache-dtype", "fp8:bf16", None),
        ("sglang", "--kv-cache-dtype", "fp8", "fp8_e4m3"),
        ("sglang", "--kv-cache-dtype", "nvfp4", None),
        ("sglang", "--kv-cache-dtype", "turbo4k3v", None),
        ("llama.cpp", "-ctk", "q4_0", "q4_0"),
        ("llama.cpp", "-ctk", "f32:q4_1", "f32"),
        ("llama.cpp", "-ctk", "fp8", None),
        ("llama.cpp", "-ctk", "q8_0:turbo4", None),
    ],
)
def test_a_format_without_an_equivalent_is_left_out_and_named(engine, option, pair, value):
    answer = settings(engine, pair=pair)
    assert value_of(answer, option) == value
    assert says(answer.cannot, f"hold {parse_pair(pair)} in its cache") == (value is None)


def test_the_compute_dtype_is_the_engines_own_format():
    answer = settings("vllm", pair="f16", dtype="f16")
    assert value_of(answer, "--dtype") == "float16"
    assert value_of(answer, "--kv-cache-dtype") == "auto"
    answer = settings("sglang", pair="bf16", dtype="f16")
    assert value_of(answer, "--kv-cache-dtype") == "bf16"


def test_layers_in_the_compute_dtype_can_be_skipped_by_vllm_alone():
    pairs = {0: "bf16", 47: "bf16"}
    answer = settings("vllm", pair="fp8", pairs=pairs)
    at = answer.arguments.index("--kv-cache-dtype")
    assert answer.arguments[at : at + 5] == (
        "--kv-cache-dtype", "fp8_e4m3", "--kv-cache-dtype-skip-layers", "0", "47",
    )  # fmt: skip
    for engine in ("sglang", "llama.cpp"):
        assert says(settings(engine, pair="fp8", pairs=pairs).cannot, "hold bf16:bf16, fp8:fp8")
    mixed = settings("vllm", pair="fp8", pairs={0: "nvfp4"})
    assert says(mixed.cannot, "hold fp8:fp8, nvfp4:nvfp4")


def test_only_layers_that_store_rows_have_a_say_in_the_format():
    recurrent = recurrent_layer(key_groups=1, value_heads=1, state_size=64)
    hybrid = ModelGeometry(name="h", family="f", layers=(recurrent, full_layer(1, 64)))
    answer = settings("vllm", geometry=hybrid, pair="q8_0", pairs={1: "fp8"}, cuts=(0, 1, 2))
    assert value_of(answer, "--kv-cache-dtype") == "fp8_e4m3"
    assert says(answer.cannot, "two f32 states per sequence")
    latent = ModelGeometry(name="l", family="f", layers=(latent_layer(64, 64),) * 2)
    answer = settings("vllm", geometry=latent, pair="fp8:q4_0", cuts=(0, 1, 2))
    assert value_of(answer, "--kv-cache-dtype") == "fp8_e4m3"


def test_cache_budgets_become_bytes_where_every_stage_has_the_same():
    same = settings("vllm", stage_bytes=(2 * GIB, 2 * GIB), cache_only=True)
    assert value_of(same, "--kv-cache-memory-bytes") == str(2 * GIB)
    assert value_of(same, "--gpu-memory-utilization") is None
    unlike = settings("vllm", stage_bytes=(2 * GIB, 3 * GIB), cache_only=True)
    assert value_of(unlike, "--kv-cache-memory-bytes") is None
    assert says(unlike.cannot, "its own --kv-cache-memory-bytes")
    sglang = settings("sglang", stage_bytes=(2 * GIB, 2 * GIB), cache_only=True)
    assert value_of(sglang, "--mem-fraction-static") is None


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("vllm", "--disable-hybrid-kv-cache-manager"),
        ("sglang", "--disable-hybrid-swa-memory"),
        ("llama.cpp", "--swa-full"),
    ],
)
def test_rings_off_has_an_option_and_their_slack_has_none(engine, option):
    gemma = known_geometry("gemma4-26b")
    whole = settings(engine, geometry=gemma, cuts=(0, 15, 30), options=CacheOptions(ring=False))
    assert option in whole.arguments
    assert not says(whole.cannot, "--rewind-slack")
    rings = settings(engine, geometry=gemma, cuts=(0, 15, 30))
    assert option not in rings.arguments
    assert says(rings.cannot, "the 64 rows of --rewind-slack")


def test_flat_records_and_drafting_are_named_as_ours():
    options = CacheOptions(layout=Layout.FLAT, flat_rows=1000, spec_tokens=200)
    answer = settings("vllm", options=options)
    assert value_of(answer, "--block-size") is None
    assert value_of(answer, "--max-num-batched-tokens") == str(3 * 201)
    assert says(answer.cannot, "--layout flat")
    assert says(answer.cannot, "take --spec 200")


def test_the_text_is_a_script_whose_notes_are_comments():
    answer = settings("vllm", model="my model")
    *comments, command, end = answer.text.split("\n")
    assert end == ""
    assert command == answer.command
    assert "vllm serve 'my model'" in command
    assert all(line.startswith("# ") for line in comments)
    assert len(comments) == len(answer.notes) + len(answer.cannot)
    assert "# vllm cannot promise the plan's bytes" in answer.text


def test_metadata_alone_leaves_a_place_for_the_model():
    assert "vllm serve MODEL" in settings("vllm", model="").command
    assert says(settings("sglang", model="").notes, "in place of MODEL")
    assert "-m MODEL.gguf" in settings("llama.cpp", model="folder").command
    assert says(settings("vllm", model="a.gguf").notes, "vllm-gguf-plugin")


def test_an_unknown_engine_is_refused_by_name():
    with pytest.raises(ConfigError, match="--emit: 'exllama' is no engine"):
        settings("exllama")


def test_plan_prints_the_command_last_and_json_carries_its_parts(capsys, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(to_json(MODEL))
    words = ["plan", str(path), "--device", "8GiB", "--device", "8GiB", "--emit", "llama.cpp"]
    words += ["--ctx", "1000", "--sequences", "2"]
    assert main(words) == 0
    command = (
        "llama-server -m MODEL.gguf -ngl all -fit off -sm layer -ts 24,25 -c 2000 -np 2 -ub 512"
        " -ctk q8_0 -ctv q5_1 -fa on"
    )
    assert capsys.readouterr().out.split("\n")[-2] == command
    assert main([*words, "--json"]) == 0
    out = capsys.readouterr()
    emitted = json.loads(out.out)["emit"]
    assert list(emitted) == [
        "engine", "command", "environment", "arguments", "notes", "cannot",
    ]  # fmt: skip
    assert (emitted["engine"], emitted["command"]) == ("llama.cpp", command)
    assert out.err.endswith(command + "\n")
    assert main(["plan", str(path), "--device", "8GiB", "--emit", "exllama", "--json"]) == 2
