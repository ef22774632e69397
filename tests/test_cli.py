"""The command line's contract: JSON keys, exit codes, the flags of every command."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from memkv_pp.cache.host_build import COMPILERS
from memkv_pp.cli import app, main
from memkv_pp.cli.doctor import compiler_check, declared_ranges, package_check, within
from memkv_pp.cli.options import parse_fence
from memkv_pp.errors import FenceError
from memkv_pp.geometry import ModelGeometry, uniform_geometry
from memkv_pp.model.geometry_file import to_json
from memkv_pp.testing.geometries import known_geometry

GIB = 2**30


@pytest.fixture
def written(tmp_path):
    def write(geometry: ModelGeometry) -> str:
        path = tmp_path / f"{geometry.name}.json"
        path.write_text(to_json(geometry))
        return str(path)

    return write


@pytest.fixture
def call(capsys):
    """Run a command line with ``--json``: its exit code and the one object on stdout."""

    def run(*words: str) -> tuple[int, dict]:
        code = main([*words, "--json"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert out.endswith("}\n")
        assert out.startswith('{"schema": "memkv-pp/')
        return code, json.loads(out)

    return run


def flags_of(command: str) -> set[str]:
    parser = app.build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return {flag for action in actions for flag in action.option_strings or [action.dest]}


SHARED = {
    "--kv", "--kv-layers", "--high-precision-layers", "--kv-policy", "--block-tokens",
    "--prefill-chunk", "--rewind-slack", "--ring", "--layout", "--dtype", "--spec", "--fence",
}  # fmt: skip
HELP = {"-h", "--help", "--json"}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("size", {"model", "--ctx"} | SHARED | HELP),
        (
            "plan",
            {"model", "--device", "--kv-budget", "--ctx", "--sequences", "--reserve"}
            | {"--explain", "--html", "--device-profile", "--emit"}
            | {"--objective", "--pin", "--max-stage-bytes"}
            | SHARED
            | HELP,
        ),
        (
            "generate",
            {"model", "--prompt", "--prompt-file", "--chat", "--ctx", "--sequences", "--kv-bytes"}
            | {"--stages", "--backend", "--link", "--devices", "--waves", "--threads", "--max-new"}
            | {"--temperature", "--top-p", "--seed", "--deterministic", "--fp8-scales"}
            | SHARED
            | HELP,
        ),
        ("doctor", HELP),
        ("bench", {"--suite", "--model", "--rounds"} | HELP),
    ],
)
def test_a_flag_comes_or_goes_only_on_purpose(command, flags):
    assert flags_of(command) == flags


def test_size_answers_with_the_keys_of_the_contract(call, written):
    code, answer = call("size", written(known_geometry("step-3.5-flash")), "--ctx", "131072")
    assert code == 0
    assert list(answer) == [
        "schema", "model", "context_tokens", "total_bytes", "bytes_per_token",
        "ring_bytes_per_token", "ring_rows", "bytes_per_sequence", "layers",
    ]  # fmt: skip
    assert answer["schema"] == "memkv-pp/size/1"
    assert (answer["model"], answer["context_tokens"]) == ("step-3.5-flash", 131_072)
    assert (answer["bytes_per_token"], answer["ring_bytes_per_token"]) == (22_272, 61_248)
    assert (answer["ring_rows"], answer["bytes_per_sequence"]) == (1120, 0)
    assert answer["total_bytes"] == 22_272 * 131_072 + 61_248 * 512
    assert answer["layers"][1] == {
        "layer": 1,
        "kind": "sliding_attention",
        "k_format": "q8_0",
        "v_format": "q5_1",
        "k_bytes_per_token": 1088,
        "v_bytes_per_token": 768,
        "context_bytes": 1856 * 512,
        "allocated_bytes": 1856 * 1120,
    }


def test_size_follows_the_shared_options(call, written):
    model = written(known_geometry("step-3.5-flash"))
    _, answer = call("size", model, "--ctx", "8192", "--ring", "off", "--kv", "q8_0:q4_0")
    assert (answer["bytes_per_token"], answer["ring_bytes_per_token"]) == (45 * 1664, 0)
    assert answer["ring_rows"] == 0
    _, answer = call(
        "size", model, "--ctx", "8192", "--prefill-chunk", "4096", "--rewind-slack", "0",
        "--layout", "flat", "--kv-layers", "0=bf16:bf16", "--spec", "2",
    )  # fmt: skip
    assert answer["ring_rows"] == 4639
    assert answer["layers"][0]["k_format"] == "bf16"
    assert len(answer["layers"]) == 46
    _, answer = call("size", model, "--ctx", "10", "--high-precision-layers", "1")
    assert [x["k_format"] for x in answer["layers"]] == ["bf16", *["q8_0"] * 43, "bf16"]


def test_plan_answers_with_the_keys_of_the_contract(call, written):
    model = written(uniform_geometry(64, kv_heads=4, head_size=128, name="even64"))
    code, answer = call(
        "plan", model, "--kv-budget", "5GiB", "--kv-budget", "5GiB", "--fence", "0,56,64",
        "--kv", "f16",
    )  # fmt: skip
    assert code == 0
    assert list(answer) == [
        "schema", "model", "fence", "block_tokens", "context_tokens", "capacity_tokens",
        "sequences", "binding_stage", "stranded_bytes", "stages", "alternatives", "warnings",
    ]  # fmt: skip
    assert answer["schema"] == "memkv-pp/plan/1"
    assert (answer["fence"], answer["block_tokens"]) == ([0, 56, 64], 16)
    assert (answer["capacity_tokens"], answer["context_tokens"]) == (46_800, 46_800)
    assert (answer["sequences"], answer["binding_stage"]) == (1, 0)
    assert answer["stages"][1] == {
        "stage": 1,
        "layers": [56, 64],
        "device_bytes": 5 * GIB,
        "weight_bytes": 0,
        "file_bytes": 0,
        "fixed_bytes": 0,
        "reserve_bytes": 0,
        "cache_budget_bytes": 5 * GIB,
        "bytes_per_token": 16_384,
        "ring_bytes_per_token": 0,
        "ring_rows": 0,
        "bytes_per_sequence": 0,
        "record_bytes": 262_144,
        "padding_bytes": 0,
        "context_bytes": 766_771_200,
        "capacity_tokens": 327_680,
        "sequences": 7,
        "stranded_bytes": 5 * GIB - 766_771_200,
    }
    (better,) = answer["alternatives"]
    assert list(better) == ["fence", "capacity_tokens", "sequences", "stranded_bytes", "says"]
    assert (better["fence"], better["capacity_tokens"]) == ([0, 32, 64], 81_920)
    assert answer["warnings"] == []


def test_plan_keeps_a_reserve_on_devices_and_balances_over_them(call, written):
    model = written(uniform_geometry(48, kv_heads=4, head_size=128))
    devices = ("--device", "21GiB", "--device", "9GiB")
    _, answer = call("plan", model, *devices, "--kv", "f16")
    assert answer["fence"] == [0, 34, 48]
    assert [row["reserve_bytes"] for row in answer["stages"]] == [GIB, GIB]
    _, answer = call("plan", model, *devices, "--reserve", "0", "--fence", "even")
    assert [row["reserve_bytes"] for row in answer["stages"]] == [0, 0]
    assert answer["fence"] == [0, 24, 48]


def test_a_stage_that_fits_any_number_of_tokens_says_null(call, written):
    model = written(known_geometry("qwen3.5-9b"))
    _, answer = call(
        "plan", model, "--kv-budget", "4GiB", "--kv-budget", "4GiB", "--fence", "0,3,32"
    )
    assert [row["capacity_tokens"] is None for row in answer["stages"]] == [True, False]
    assert answer["binding_stage"] == 1


def test_a_context_that_does_not_fit_exits_1_with_every_stages_have_and_need(call, written):
    model = written(uniform_geometry(48, kv_heads=4, head_size=128))
    code, answer = call(
        "plan", model, "--kv-budget", "3.18GiB", "--kv-budget", "8GiB", "--fence", "0,16,48",
        "--kv", "f16", "--ctx", "262144",
    )  # fmt: skip
    assert code == 1
    assert list(answer) == ["schema", "error"]
    assert answer["schema"] == "memkv-pp/error/1"
    error = answer["error"]
    assert list(error) == ["type", "message", "hint", "stages"]
    assert error["type"] == "CapacityError"
    assert error["stages"] == [
        {"stage": 0, "have_bytes": 3_414_499_000, "need_bytes": 8 * GIB},
        {"stage": 1, "have_bytes": 8 * GIB, "need_bytes": 16 * GIB},
    ]
    assert "--ctx 104192" in error["hint"]


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["size"], "UsageError", "MODEL"),
        (["--json"], "UsageError", "COMMAND"),
        (["measure", "MODEL"], "UsageError", "measure"),
        (["size", "MODEL"], "UsageError", "--ctx"),
        (["size", "MODEL", "--ctx", "many"], "UsageError", "--ctx"),
        (["size", "MODEL", "--ctx", "0"], "ConfigError", "--ctx"),
        (["size", "MODEL", "--ctx", "9", "--layer", "3"], "UsageError", "--layer"),
        (["size", "MODEL", "--ctx", "9", "--lay", "flat"], "UsageError", "--lay"),
        (["size", "MODEL", "--ctx", "9", "--kv", "q9_9"], "FormatError", "q9_9"),
        (["size", "MODEL", "--ctx", "9", "--fence", "0,2"], "FenceError", "--fence"),
        (["size", "MODEL", "--ctx", "9", "--block-tokens", "0"], "ConfigError", "--block-tokens"),
        (["size", "/no/such.gguf", "--ctx", "9"], "ConfigError", "/no/such.gguf"),
        (["plan", "MODEL"], "UsageError", "--device"),
        (["plan", "MODEL", "--device", "1GiB", "--kv-budget", "1GiB"], "UsageError", "--device"),
        (["plan", "MODEL", "--device", "much"], "ConfigError", "--device"),
        (["plan", "MODEL", "--kv-budget", "1GiB", "--reserve", "1"], "ConfigError", "--reserve"),
        (["plan", "MODEL", "--kv-budget", "1GiB", "--fence", "0,x"], "FenceError", "--fence"),
        (["plan", "MODEL", "--kv-budget", "1GiB", "--fence", "0,2,8"], "FenceError", "1 were"),
    ],
)
def test_wrong_usage_exits_2_with_the_same_error_object(call, written, words, kind, says):
    model = written(uniform_geometry(8, kv_heads=2, head_size=64))
    code, answer = call(*(model if word == "MODEL" else word for word in words))
    assert code == 2
    assert answer["schema"] == "memkv-pp/error/1"
    assert answer["error"]["type"] == kind
    assert says in answer["error"]["message"]
    assert answer["error"]["stages"] == []


def test_without_json_an_error_goes_to_stderr_and_stdout_stays_empty(capsys):
    assert main(["size", "/no/such.gguf", "--ctx", "9"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ConfigError: MODEL: '/no/such.gguf'")
    assert "hint:" in captured.err


def test_tables_go_to_stdout_in_plain_columns_and_to_stderr_beside_json(capsys, written):
    words = ["plan", written(known_geometry("qwen3.5-9b")), "--kv-budget", "4GiB"]
    assert main(words) == 0
    plain = capsys.readouterr()
    assert plain.err == ""
    assert plain.out.startswith("qwen3.5-9b: ")
    assert "\x1b" not in plain.out
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().err == plain.out


def test_a_size_table_has_a_line_per_layer(capsys, written):
    assert main(["size", written(known_geometry("qwen3.5-9b")), "--ctx", "100"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^ +\d+  (?:recurrent|full_attention) ", out, re.MULTILINE)) == 32


@pytest.mark.parametrize("words", [[], ["size"], ["plan"], ["doctor"]])
def test_every_help_text_carries_examples(capsys, words):
    assert main([*words, "--help"]) == 0
    assert f"examples:\n  memkv-pp {' '.join(words)}" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memkv-pp ")


@pytest.mark.slow
def test_doctor_reports_checks_and_a_missing_gpu_is_no_fault(call):
    code, answer = call("doctor")
    assert code == 0
    assert list(answer) == ["schema", "checks"]
    assert answer["schema"] == "memkv-pp/doctor/1"
    assert all(list(check) == ["check", "ok", "found", "hint"] for check in answer["checks"])
    checks = {check["check"]: check for check in answer["checks"]}
    assert {"python", "torch", "ray", "transformers", "c++ compiler", "cuda"} <= set(checks)
    assert checks["python"]["ok"]
    assert checks["cuda"]["ok"]
    assert all(check["hint"] for check in answer["checks"] if not check["ok"])


def test_doctor_names_the_compiler_that_the_environment_does(monkeypatch, tmp_path):
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler")
    own = tmp_path / "own-compiler"
    own.write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    own.chmod(0o700)
    monkeypatch.setenv("CXX", str(own))
    assert (compiler_check().ok, compiler_check().found) == (True, str(own))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not compiler_check().ok
    assert "'no-such-compiler' is not found" in compiler_check().found
    monkeypatch.delenv("CXX")
    assert compiler_check().found == shutil.which(next(filter(shutil.which, COMPILERS)))


def test_doctor_holds_packages_to_the_ranges_this_package_declares():
    assert declared_ranges()["ray"].startswith(">=")
    assert "pytest" not in declared_ranges()
    absent = package_check("no-such-package", "no_such", {"no-such-package": ">=1"})
    assert (absent.ok, absent.found) == (False, "not installed")
    assert absent.hint == "pip install 'no-such-package>=1'"
    assert not package_check("numpy", "no_such_module", {}).ok
    old = package_check("numpy", "numpy", {"numpy": "<1.0"})
    assert not old.ok
    assert "outside <1.0" in old.found
    assert package_check("numpy", "numpy", {"numpy": ">=1.0"}).ok


@pytest.mark.parametrize(
    ("version", "allowed", "fits"),
    [
        ("5.24.0", ">=5.24,<5.25", True),
        ("5.24.9", "<5.25,>=5.24", True),
        ("5.25.0", ">=5.24,<5.25", False),
        ("5.9", ">=5.24", False),
        ("2.13.0+cpu", ">=2.9", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, allowed, fits):
    assert within(version, allowed) is fits


def test_a_written_fence_is_even_balanced_or_cuts():
    assert parse_fence(" even ") == "even"
    assert parse_fence("balanced") == "balanced"
    assert parse_fence("0, 16,48") == (0, 16, 48)
    for text in ("", "0,,4", "0;4", "-1,4", "0,1e9", "0,9999999999"):
        with pytest.raises(FenceError, match="--fence"):
            parse_fence(text)


@pytest.mark.slow
def test_size_starts_without_torch_ray_or_transformers(written):
    model = written(known_geometry("qwen3.5-9b"))
    script = (
        "import sys; from memkv_pp.cli import main; code = main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'ray', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "size", model, "--ctx", "64"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_small_models_metadata_is_enough_to_size_and_plan_it(call, smollm2):
    code, answer = call("size", str(smollm2), "--ctx", "2048")
    assert code == 0
    assert answer["bytes_per_token"] == 30 * 3 * 64 * (34 + 24) // 32
    code, answer = call(
        "plan", str(smollm2), "--device", "1GiB", "--device", "1GiB", "--reserve", "0"
    )
    assert code == 0
    assert all(row["weight_bytes"] > 0 and row["file_bytes"] > 0 for row in answer["stages"])


def test_a_models_own_formats_stand_until_the_user_names_others(written, capsys):
    model = written(replace(uniform_geometry(4, kv_heads=2, head_size=64), default_kv="fp8:q4_0"))

    def formats(*words: str) -> tuple[set, str]:
        assert main(["size", model, "--ctx", "16", "--json", *words]) == 0
        said = capsys.readouterr()
        layers = json.loads(said.out)["layers"]
        return {(layer["k_format"], layer["v_format"]) for layer in layers}, said.err

    for words in ((), ("--kv", "fp8:q4_0")):
        found, said = formats(*words)
        assert found == {("fp8", "q4_0")}
        assert "warning" not in said
    found, said = formats("--kv", "q8_0:q5_1", "--kv-layers", "0=bf16")
    assert found == {("q8_0", "q5_1"), ("bf16", "bf16")}
    assert "--kv: q8_0:q5_1 is used, this model's own default is fp8:q4_0" in said
