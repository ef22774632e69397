"""``memkv-pp bench``: every suite it names is there, and rows come out as the contract says."""

import importlib
import json

import pytest
import torch

from memkv_pp.bench import quality
from memkv_pp.cli import main
from memkv_pp.cli.bench import SUITES
from memkv_pp.testing.tiny_models import write_tiny_model


def test_every_suite_is_a_module_of_its_name():
    assert {"codec", "attend", "recurrent", "quality", "decode", "pipeline", "plan"} == set(SUITES)
    for suite in SUITES:
        assert callable(importlib.import_module(f"memkv_pp.bench.{suite}").run)


@pytest.mark.parametrize("suite", ["quality", "decode", "pipeline"])
def test_a_suite_that_needs_a_model_names_the_knob_when_there_is_none(suite, capsys):
    assert main(["bench", "--suite", suite, "--model", "absent.gguf", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["hint"][:15]) == ("ConfigError", "run `make model")
    assert "--model: absent.gguf" in error["message"]


@pytest.mark.slow
def test_rows_have_the_keys_of_the_contract(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "TEXT", quality.TEXT[:60])
    model = write_tiny_model(tmp_path, "llama", layers=1, head_size=64, heads=2, kv_heads=1)
    before = torch.get_num_threads()
    assert main(["bench", "--suite", "quality", "--model", str(model), "--json"]) == 0
    assert torch.get_num_threads() == before
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "memkv-pp/bench/1"
    keys = ["name", "ours", "unit", "peer", "peer_value", "ratio", "threads"]
    assert all(list(row) == keys for row in answer["rows"])
    assert answer["rows"][0]["name"] == "quality/f32:f32"
