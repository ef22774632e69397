"""``memkv-pp generate``: the object of the contract, refusals, and books that must agree."""

import asyncio
import json
from typing import Any

import pytest

from memkv_pp.cli import app
from memkv_pp.errors import InternalError
from memkv_pp.formats import parse_pair
from memkv_pp.kv_policy import layer_formats
from memkv_pp.model.metadata import open_geometry
from memkv_pp.serve.build import Knobs, build_config
from memkv_pp.serve.session import Pipeline
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.tiny_models import write_tiny_gguf, write_tiny_model
from memkv_pp.wire import Request


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture
def call(tiny, capsys):
    def run(*words, model=tiny):
        code = app.main(["generate", str(model), "--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_generate_answers_with_the_keys_of_the_contract(call):
    code, answer = call("--prompt", "the cat", "--prompt", "a", "--stages", 2, "--max-new", 5)
    assert code == 0
    assert next(iter(answer)) == "schema"
    assert answer["schema"] == "memkv-pp/generate/1"
    assert set(answer) == {
        *("schema", "text", "tokens", "completions", "stages", "speculation", "prefix", "swap"),
        "timing",
    }
    assert answer["completions"][0] == {
        "text": answer["text"],
        "tokens": answer["tokens"],
        "finish_reason": "length",
        "error": None,
    }
    assert [len(c["tokens"]) for c in answer["completions"]] == [5, 5]
    assert [stage["layers"] for stage in answer["stages"]] == [[0, 2], [2, 5]]
    for stage in answer["stages"]:
        assert set(stage) == {
            *("stage", "layers", "pid", "weight_bytes", "allocated_bytes", "promised_bytes"),
            *("peak_bytes", "plans_applied", "layers_run"),
        }
        assert stage["allocated_bytes"] == stage["promised_bytes"]
    assert set(answer["timing"]) == {
        *("load_s", "prefill_s", "decode_s", "tokens_per_s", "orchestration_s")
    }


def test_the_plan_of_the_same_options_names_the_bytes_that_generate_allocates(call, tiny, capsys):
    cut = ("--ctx", "90", "--sequences", "3", "--fence", "0,1,4,5", "--kv", "q5_0:q4_1")
    _, answer = call("--prompt", "the", "--max-new", 3, *cut)
    budgets = ["--kv-budget", "1MiB"] * 3
    assert app.main(["plan", str(tiny), "--json", *budgets, *cut]) == 0
    plan = json.loads(capsys.readouterr().out)
    planned = [stage["context_bytes"] for stage in plan["stages"]]
    assert planned == [stage["allocated_bytes"] for stage in answer["stages"]]


@pytest.mark.parametrize("layout", ["paged", "flat"])
@pytest.mark.parametrize("block", ["16", "24"])
def test_layouts_and_blocks_change_bytes_and_no_token(call, layout, block):
    words = ("--prompt", "the end of the line", "--max-new", 20, "--kv", "q8_0:q5_1")
    _, usual = call(*words)
    code, other = call(*words, "--layout", layout, "--block-tokens", block, "--stages", 3)
    assert code == 0
    assert other["tokens"] == usual["tokens"]


def test_one_prompt_too_long_is_refused_with_every_stages_bytes_and_the_rest_finish(call):
    code, answer = call(
        *("--prompt", "a", "--prompt", "a" * 200, "--prompt", "b"),
        *("--stages", 2, "--max-new", 4, "--kv-bytes", "12KiB", "--kv-bytes", "64KiB"),
    )
    assert code == 1
    first, refused, last = answer["completions"]
    assert first["finish_reason"] == last["finish_reason"] == "length"
    assert refused["finish_reason"] == "refused"
    assert refused["error"]["type"] == "CapacityError"
    assert "stage 0" in refused["error"]["message"]
    assert "stage 1" in refused["error"]["message"]
    have = [stage["have_bytes"] for stage in refused["error"]["stages"]]
    need = [stage["need_bytes"] for stage in refused["error"]["stages"]]
    assert have[0] < need[0]
    assert have[1] > have[0]


def test_a_single_refused_prompt_is_the_commands_own_error(call):
    code, answer = call("--prompt", "a" * 60, "--max-new", 8, "--ctx", 40)
    assert code == 1
    assert answer["schema"] == "memkv-pp/error/1"
    assert "--ctx" in answer["error"]["hint"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--prompt", "a", "--kv", "int8"), "--kv"),
        (("--prompt", "a", "--kv", "turbo4"), "turbo4"),
        (("--prompt", "a", "--stages", "9"), "--stages"),
        (("--prompt", "a", "--fence", "0,2"), "--fence"),
        (("--prompt", "a", "--fence", "0,2,5", "--stages", "3"), "--fence"),
        (("--prompt", "a", "--waves", "0"), "--waves"),
        (("--prompt", "a", "--threads", "0"), "--threads"),
        (("--prompt", "a", "--max-new", "0"), "--max-new"),
        (("--prompt", "a", "--top-p", "0"), "--top-p"),
        (("--prompt", "a", "--devices", "cpu,cpu"), "--devices"),
        (("--prompt", "a", "--devices", "cuda:0"), "--devices"),
        (("--prompt", "a", "--kv-bytes", "1KiB"), "--kv-bytes"),
        (("--prompt", "a", "--link", "nccl"), "--link"),
        (("--prompt", "a", "--deterministic", "--threads", "3"), "--threads"),
        ((), "--prompt"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--prompt", "a", "--bogus"), "--bogus"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_knob(call, words, named):
    code, answer = call(*words)
    assert (code, answer["schema"]) == (2, "memkv-pp/error/1")
    assert named in answer["error"]["message"]


def test_a_model_without_weights_is_refused_by_name(call, tiny):
    code, answer = call("--prompt", "a", model=tiny / "config.json")
    assert code == 2
    assert answer["error"]["type"] == "ModelError"


def test_a_gguf_and_its_folder_give_the_same_tokens(call, tmp_path):
    folder = write_tiny_model(tmp_path / "folder", "llama")
    gguf = write_tiny_gguf(tmp_path / "file", "llama")
    words = ("--prompt", "the cat in the", "--max-new", 12, "--dtype", "f32", "--stages", 2)
    assert call(*words, model=gguf)[1]["tokens"] == call(*words, model=folder)[1]["tokens"]


@pytest.fixture
def config(tiny):
    geometry = open_geometry(tiny)
    return build_config(
        Knobs(
            model=str(tiny),
            geometry=geometry,
            formats=layer_formats(geometry, kv=parse_pair("q8_0:q5_1")),
            options=CacheOptions(),
            rows=(20,),
            stages=2,
        )
    )


def corrupt_sizing(pipeline):
    ledger = pipeline.coordinator.ledger
    ledger.capacities = (ledger.capacities[0].plus(ledger.capacities[0]), ledger.capacities[1])


def corrupt_allocation(pipeline):
    arena = pipeline.stages._runtimes[1]._cache.arena
    arena._bytes = arena._bytes[:-256].clone()


def corrupt_use(pipeline):
    pipeline.stages._runtimes[0]._cache.arena.full.allocate(1)


def corrupt_charge(pipeline):
    pipeline.coordinator.ledger._held[0] = pipeline.coordinator.ledger.capacities[0]


@pytest.mark.parametrize(
    "corrupt", [None, corrupt_sizing, corrupt_allocation, corrupt_use, corrupt_charge]
)
def test_corrupting_any_one_of_the_books_makes_the_check_raise_with_the_equation(config, corrupt):
    async def scenario():
        async with Pipeline(config) as pipeline:
            stages: Any = pipeline.stages
            request = Request(request=0, prompt=(1, 2, 3), max_new=4)
            completion = pipeline.driver.submit(request)
            await pipeline.start()
            await pipeline.driver.wait([completion])
            if corrupt is not None:
                corrupt(pipeline)
            try:
                return await pipeline.statistics()
            except InternalError as error:
                for runtime in stages._runtimes.values():
                    runtime._cache.arena._bytes = None
                return str(error)

    outcome = asyncio.run(scenario())
    if corrupt is None:
        assert len(outcome) == 2
    else:
        assert "==" in outcome or "!=" in outcome
