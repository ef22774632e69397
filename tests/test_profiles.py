import json
import re
from dataclasses import asdict, replace

import pytest

from memkv_pp.cli import main
from memkv_pp.errors import ConfigError
from memkv_pp.model.geometry_file import to_json
from memkv_pp.plan.profiles import (
    SCHEMA,
    DeviceProfile,
    load_profile,
    shipped_profiles,
    stage_profiles,
)
from memkv_pp.testing.geometries import known_geometry
from memkv_pp.units import GIB

L4 = load_profile("l4")


@pytest.fixture
def saved(tmp_path):
    def save(**changes: object) -> str:
        document = {"schema": SCHEMA, **asdict(replace(L4, name="mine")), **changes}
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
        return str(path)

    return save


@pytest.fixture
def plan(capsys, tmp_path):
    def run(*words: str) -> tuple[int, dict]:
        path = tmp_path / "model.json"
        path.write_text(to_json(known_geometry("qwen3.5-9b")))
        code = main(["plan", str(path), *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("profile", shipped_profiles().values(), ids=lambda p: p.name)
def test_a_shipped_profile_names_its_source_with_a_year(profile):
    assert re.search(r"\b20\d\d\b", profile.source)
    assert shipped_profiles()[profile.name] is profile
    assert re.fullmatch(r"[a-z0-9-]+", profile.name)
    assert profile.single_flops_per_s < profile.half_flops_per_s
    assert profile.link_bytes_per_s < profile.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("name", "gib", "gb_per_s", "teraflops", "link_gb_per_s"),
    [
        ("rtx-3090", 24, 936, 71, 31.5),
        ("rtx-4090", 24, 1008, 165.2, 31.5),
        ("a100-80g", 80, 2039, 312, 300),
        ("h100-80g", 80, 3350, 989.5, 450),
        ("mi300x", 192, 5300, 1307.4, 64),
    ],
)
def test_well_known_devices_have_their_datasheets_figures(
    name, gib, gb_per_s, teraflops, link_gb_per_s
):
    profile = load_profile(name)
    assert profile.memory_bytes == gib * GIB
    assert profile.bandwidth_bytes_per_s == gb_per_s * 10**9
    assert profile.half_flops_per_s == teraflops * 10**12
    assert profile.link_bytes_per_s == link_gb_per_s * 10**9


def test_a_card_that_stores_ecc_in_its_memory_has_that_much_less():
    assert L4.memory_bytes == 24 * GIB * 15 // 16


def test_the_peak_follows_the_compute_type():
    assert L4.peak(2) == L4.half_flops_per_s
    assert L4.peak(4) == L4.single_flops_per_s


def test_a_file_of_the_same_form_is_a_profile(saved):
    assert load_profile(saved(bandwidth_bytes_per_s=1.5)) == replace(
        L4, name="mine", bandwidth_bytes_per_s=1.5
    )
    assert load_profile(saved(link_latency_s=None)).link_latency_s == 1e-5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "other"}, "schema is 'other'"),
        ({"colour": "red"}, "'colour' is unknown"),
        ({"source": None}, "source is missing"),
        ({"source": ""}, "source of 'mine' must be text"),
        ({"memory_bytes": 1.5}, "memory_bytes of 'mine' must be a whole number"),
        ({"memory_bytes": True}, "memory_bytes of 'mine' must be a whole number"),
        ({"half_flops_per_s": "many"}, "half_flops_per_s of 'mine' must be a number"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s of 'mine' is 0, not finite and ab"),
        ({"link_bytes_per_s": float("inf")}, "link_bytes_per_s of 'mine' is inf"),
        ({"link_latency_s": -1}, "link_latency_s of 'mine' is -1, not finite and not negative"),
    ],
)
def test_a_damaged_file_is_refused_by_its_field(saved, changes, says):
    with pytest.raises(ConfigError) as refused:
        load_profile(saved(**changes))
    assert refused.value.message.startswith("--device-profile: ")
    assert says in refused.value.message


def test_what_is_no_name_and_no_profile_file_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        load_profile("h1000")
    assert "--device-profile: 'h1000' is no file" in refused.value.message
    assert "h100-80g" in refused.value.hint
    broken = tmp_path / "broken.json"
    for text, says in (
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        (" " * (1 << 20) + "{}", "is larger than"),
    ):
        broken.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_profile(str(broken))
    broken.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_profile(str(broken))
    with pytest.raises(ConfigError, match="is no file"):
        load_profile("bad\0name")


def test_one_profile_stands_for_every_stage_and_several_for_one_each():
    other = load_profile("l40s")
    assert stage_profiles([L4], 3) == (L4, L4, L4)
    assert stage_profiles([L4, other], 2) == (L4, other)
    with pytest.raises(ConfigError, match="--device-profile: 2 profiles for 3 stages"):
        stage_profiles([L4, other], 3)


def test_a_profile_gives_the_bytes_where_no_device_does(plan):
    code, answer = plan("--device-profile", "h100-80g", "--device-profile", "l4")
    assert code == 0
    assert [row["device_bytes"] for row in answer["stages"]] == [80 * GIB, L4.memory_bytes]
    _, answer = plan("--device", "20GiB", "--device", "10GiB", "--device-profile", "l4")
    assert [row["device_bytes"] for row in answer["stages"]] == [20 * GIB, 10 * GIB]
    assert answer["predicted"]["profiles"] == ["l4", "l4"]


def test_plan_predicts_times_only_where_profiles_are_given(plan):
    words = ("--kv-budget", "4GiB", "--kv-budget", "4GiB", "--ctx", "4096", "--sequences", "6")
    _, without = plan(*words)
    _, answer = plan(*words, "--device-profile", "l4", "--device-profile", "h100-80g")
    steps = [row.pop("predicted_step_seconds") for row in answer["stages"]]
    predicted = answer.pop("predicted")
    assert answer == without
    assert steps[0] > steps[1] > 0
    assert predicted["step_seconds"] == steps[0]
    assert (predicted["slowest_stage"], predicted["waves"], predicted["wave_sequences"]) == (
        0,
        2,
        3,
    )
    assert (predicted["context_tokens"], predicted["sequences"]) == (4096, 6)
    assert predicted["tokens_per_s"] == pytest.approx(6 / (2 * steps[0]))
    assert predicted["link_seconds"][1] == 0


def test_plan_refuses_what_the_profiles_cannot_mean(plan):
    code, answer = plan()
    assert (code, answer["error"]["type"]) == (2, "UsageError")
    assert "--device-profile" in answer["error"]["message"]
    code, answer = plan("--device", "20GiB", "--device-profile", "l4", "--device-profile", "l4")
    assert (code, answer["error"]["type"]) == (2, "ConfigError")
    assert "2 profiles for 1 stages" in answer["error"]["message"]
    code, answer = plan("--device-profile", "nothing")
    assert (code, answer["error"]["type"]) == (2, "ConfigError")


def test_a_profile_made_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="memory_bytes of 'x' is 0"):
        DeviceProfile(
            name="x",
            memory_bytes=0,
            bandwidth_bytes_per_s=1.0,
            half_flops_per_s=1.0,
            single_flops_per_s=1.0,
            link="none",
            link_bytes_per_s=1.0,
            source="made up",
        )
