"""``plan --objective --pin --max-stage-bytes`` from the command line."""

import json

import pytest

from memkv_pp.cli import main
from memkv_pp.cli.plan_limits import parse_pins, parse_stage_sizes
from memkv_pp.errors import ConfigError
from memkv_pp.model.geometry_file import to_json
from memkv_pp.testing.geometries import known_geometry
from memkv_pp.units import GIB

MODEL = known_geometry("qwen3.5-9b")


@pytest.fixture
def answer(tmp_path, capsys):
    """The exit code and the JSON answer of ``plan`` with more arguments."""
    path = tmp_path / "model.json"
    path.write_text(to_json(MODEL))

    def call(*more: str) -> tuple[int, dict]:
        budgets = ("--kv-budget", "8GiB", "--kv-budget", "4GiB", "--kv-budget", "8GiB")
        code = main(["plan", str(path), *budgets, *more, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_pins_and_caps_are_read_as_pairs():
    assert parse_pins("") == ()
    assert parse_pins(" 0=0 , 40=2 ") == ((0, 0), (40, 2))
    assert parse_stage_sizes("1=3.5GiB,0=7") == ((1, 7 * GIB // 2), (0, 7))


@pytest.mark.parametrize("text", ["4", "4=", "=4", "a=1", "-1=0", "1=0,", "1=0=2", "²=1"])
def test_a_pin_that_is_no_pair_names_its_knob(text):
    with pytest.raises(ConfigError, match="--pin"):
        parse_pins(text)


@pytest.mark.parametrize("text", ["4GiB", "1=", "x=4GiB", "1=big", "1=-4"])
def test_a_cap_that_is_no_pair_names_its_knob(text):
    with pytest.raises(ConfigError, match="--max-stage-bytes"):
        parse_stage_sizes(text)


def test_the_fence_honours_pins_and_caps(answer):
    code, free = answer()
    assert code == 0
    code, limited = answer("--pin", "12=1", "--max-stage-bytes", "2=1GiB")
    assert code == 0
    assert limited["fence"][1] <= 12 < limited["fence"][2]
    assert limited["stages"][2]["context_bytes"] <= GIB
    assert limited["capacity_tokens"] <= free["capacity_tokens"]


def test_pins_that_contradict_are_wrong_usage(answer):
    code, refused = answer("--pin", "10=2,20=1")
    assert code == 2
    assert refused["error"]["type"] == "FenceError"
    assert "layer 10 on stage 2 and layer 20 on stage 1" in refused["error"]["message"]


def test_most_sequences_and_least_time_are_asked_for_by_name(answer):
    code, most = answer("--objective", "sequences", "--ctx", "32768")
    assert code == 0
    _, longest = answer("--objective", "capacity", "--ctx", "32768")
    assert most["sequences"] >= longest["sequences"]
    code, refused = answer("--objective", "time")
    assert code == 2
    assert "--device-profile" in refused["error"]["hint"]
    code, quick = answer("--objective", "time", "--device-profile", "l40s")
    assert code == 0
    assert len(quick["fence"]) == 4
