"""``memkv-pp generate`` over every kind of cache format: cut anywhere, the same tokens."""

import json

import pytest

from memkv_pp.cli import app
from memkv_pp.testing.tiny_models import write_tiny_model


@pytest.fixture(scope="module", params=[64, 128])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"heads-of-{request.param}")
    return write_tiny_model(folder, "llama", head_size=request.param, layers=3)


@pytest.fixture
def call(capsys):
    def run(model, *words):
        code = app.main(["generate", str(model), "--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv", ["turbo4:turbo4", "turbo4e", "nvfp4", "nvfp4e:q5_1", "turbo8", "turbo4k3v", "bf16k2v"]
)
def test_split_is_unsplit_on_groups_of_sixteen(call, tiny, kv):
    deterministic = ("--deterministic",) if tiny.name.startswith("heads-of-128") else ()
    prompts = ("--prompt", "the cat and the hat", "--prompt", "a")
    words = (*prompts, "--max-new", 20, "--kv", kv, *deterministic)
    code, whole = call(tiny, *words)
    assert code == 0
    assert sum(len(c["tokens"]) for c in whole["completions"]) > 20
    _, cut = call(tiny, *words, "--stages", 3, "--waves", 2)
    assert cut["completions"] == whole["completions"]
    for stage in cut["stages"]:
        assert stage["allocated_bytes"] == stage["promised_bytes"] > 0


@pytest.mark.slow
def test_nine_bits_an_element_draw_the_tokens_of_a_whole_cache(call, tiny):
    words = ("--prompt", "the end of the line", "--max-new", 12, "--kv")
    _, exact = call(tiny, *words, "f32")
    _, packed = call(tiny, *words, "turbo8e")
    same = [a == b for a, b in zip(exact["tokens"], packed["tokens"], strict=True)]
    assert all(same[:4])
    assert packed["stages"][0]["allocated_bytes"] < 0.3 * exact["stages"][0]["allocated_bytes"]
