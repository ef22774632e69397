"""What binds and why, what lies idle in which pool, and what would change: all of it planned."""

import json
from dataclasses import replace

import pytest

from memkv_pp.cli import main
from memkv_pp.cli.output import Bars, Table, bar_cells, write_result
from memkv_pp.errors import CapacityError
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import ModelGeometry, uniform_geometry
from memkv_pp.model.geometry_file import to_json
from memkv_pp.plan.alternatives import PlannedChange
from memkv_pp.plan.changes import Question
from memkv_pp.plan.explain import Explanation, explain
from memkv_pp.plan.mends import plan_or_mend
from memkv_pp.plan.planner import plan_capacity
from memkv_pp.plan.pool_shares import stage_parts, stage_shares
from memkv_pp.plan.request import Budget, PlanRequest
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.geometries import full_layer, known_geometry, recurrent_layer, sliding_layer
from memkv_pp.units import GIB, MIB, parse_size


def asked(
    geometry: ModelGeometry,
    *stage_bytes: int,
    pair: str = "f16",
    options: CacheOptions | None = None,
    budget: dict | None = None,
    **request,
) -> Question:
    layers = geometry.num_layers + len(geometry.nextn_layers)
    return Question(
        geometry=geometry,
        pair=parse_pair(pair),
        formats_of=lambda pair: (pair,) * layers,
        request=PlanRequest(
            budget=Budget(stage_bytes=stage_bytes, **({"cache_only": True} | (budget or {}))),
            options=options or CacheOptions(),
            **request,
        ),
    )


def explained(question: Question) -> Explanation:
    return explain(question, question.plan())


def of_knob(explanation: Explanation, knob: str) -> list[PlannedChange]:
    return [one for one in explanation.alternatives if one.change.knob == knob]


def layers_of_2048_bytes(num_layers: int) -> ModelGeometry:
    return uniform_geometry(num_layers, kv_heads=4, head_size=128)


def windowed(num_layers: int = 8) -> ModelGeometry:
    layers = tuple(
        sliding_layer(2, 64, 128) if i % 2 else full_layer(2, 64) for i in range(num_layers)
    )
    return ModelGeometry(name="windowed", family="windowed", layers=layers)


def mixed() -> ModelGeometry:
    """Every pool on every stage of an even cut in two."""
    state = recurrent_layer(key_groups=1, value_heads=1, state_size=16)
    layers = (full_layer(2, 64), sliding_layer(2, 64, 128), state) * 4
    return ModelGeometry(name="mixed", family="mixed", layers=layers, context_tokens=4096)


LOPSIDED = (layers_of_2048_bytes(64), 5 * GIB, 5 * GIB)


def test_the_binding_stage_is_said_with_its_pool_and_the_bytes_of_the_next_step():
    explanation = explained(asked(*LOPSIDED, fence=(0, 56, 64)))
    binding = explanation.binding
    assert (binding.stage, binding.pool, binding.grows_by) == (0, "full records", "tokens")
    assert binding.used_bytes == 46_800 * 56 * 2048
    assert binding.next_bytes == 46_816 * 56 * 2048 > binding.have_bytes == 5 * GIB
    lack = 46_816 * 56 * 2048 - 5 * GIB
    assert explanation.says[0] == (
        "stage 0 binds in its full records: layers [0, 56) take 114,688 bytes per token, of"
        f" 5.00 GiB of cache; 16 tokens more would need {lack:,} bytes that it does not have"
    )


def test_stranded_bytes_are_told_per_stage_and_pool():
    explanation = explained(asked(*LOPSIDED, fence=(0, 56, 64)))
    (full,) = explanation.stages[1].pools
    assert (full.pool, full.unit_bytes, full.units) == ("full records", 262_144, 46_800 // 16)
    assert full.stranded_units == (327_680 - 46_800) // 16
    assert explanation.stages[1].loose_bytes == 0
    assert explanation.says[2] == (
        "stage 1 strands 4.29 GiB: 17,555 full records of 262,144 bytes; alone it would hold"
        " 327,680 tokens in one sequence"
    )


def test_a_better_cut_is_told_as_in_the_issue():
    lopsided = explained(asked(layers_of_2048_bytes(48), 20 * GIB, 8 * GIB, fence="even"))
    (cut,) = of_knob(lopsided, "--fence")
    assert cut.says == (
        "cut 24 -> 34 (--fence 0,34,48): +71 % tokens (174,752 -> 299,584), 11.43 GiB less stranded"
    )
    assert (cut.fence, cut.capacity_tokens) == ((0, 34, 48), 299_584)


def test_more_bytes_for_a_stage_that_does_not_bind_add_nothing_and_it_says_which_one_does():
    changes = of_knob(explained(asked(*LOPSIDED, fence=(0, 56, 64))), "--kv-budget")
    assert len(changes) == 2
    assert changes[0].says.startswith("2 GiB more on stage 0: +40 % tokens (46,800 -> 65,536)")
    assert changes[1].says.startswith("2 GiB more on stage 1: +0 % tokens, stage 0 binds")


def test_where_the_planner_may_cut_more_bytes_are_also_told_with_a_new_cut():
    changes = of_knob(explained(asked(layers_of_2048_bytes(48), 20 * GIB, 8 * GIB)), "--kv-budget")
    anew, kept = changes[0], changes[-1]
    assert anew.says.startswith("8 GiB more on stage 0, cut 34 -> 38 (--fence 0,38,48)")
    assert anew.capacity_tokens == 386_304
    assert kept.says == "8 GiB more on stage 0: +0 % tokens, stage 1 binds, 8.00 GiB more stranded"


@pytest.mark.parametrize(
    ("pair", "offered"),
    [
        ("f16", ["q4_0:q4_0", "q8_0:q4_0", "q8_0:q5_1", "fp8:fp8"]),
        ("q8_0:q5_1", ["q4_0:q4_0", "q8_0:q4_0"]),
        ("q4_0:q4_0", []),
    ],
)
def test_only_formats_that_are_smaller_and_larger_on_no_side_are_offered(pair, offered):
    changes = of_knob(explained(asked(layers_of_2048_bytes(4), GIB, GIB, pair=pair)), "--kv")
    assert [change.change.value for change in changes] == offered


def test_a_format_is_told_by_the_sides_that_it_changes():
    explanation = explained(asked(layers_of_2048_bytes(4), GIB, GIB, pair="q8_0:q5_1"))
    words = [change.says.split(":")[0] for change in of_knob(explanation, "--kv")]
    assert words == ["K and V to q4_0 (--kv q4_0", "V to q4_0 (--kv q8_0"]


def test_a_format_that_the_heads_cannot_hold_is_not_offered():
    odd = uniform_geometry(4, kv_heads=1, head_size=40)
    assert [c.change.value for c in of_knob(explained(asked(odd, MIB, MIB)), "--kv")] == ["fp8:fp8"]


def test_rings_are_offered_where_they_are_off_and_half_the_sequences_where_some_were_asked_for():
    off = CacheOptions(ring=False)
    (ring,) = of_knob(explained(asked(windowed(), 8 * MIB, 8 * MIB, options=off)), "--ring")
    on = asked(windowed(), 8 * MIB, 8 * MIB).plan()
    assert (ring.capacity_tokens, ring.stranded_bytes) == (on.capacity_tokens, on.stranded_bytes)
    assert not of_knob(explained(asked(layers_of_2048_bytes(4), GIB, GIB, options=off)), "--ring")
    (half,) = of_knob(
        explained(asked(layers_of_2048_bytes(4), GIB, GIB, sequences=8)), "--sequences"
    )
    assert (half.sequences, half.context_tokens) == (4, 65_536)
    assert "+100 % tokens of each sequence (32,768 -> 65,536)" in half.says
    (half,) = of_knob(explained(asked(layers_of_2048_bytes(4), GIB, GIB, ctx=8192)), "--sequences")
    assert (half.sequences, half.context_tokens) == (16, 16_384)


@pytest.mark.parametrize(
    "question",
    [
        asked(*LOPSIDED, fence=(0, 56, 64)),
        asked(mixed(), 4 * MIB, 3 * MIB, fence="even"),
        asked(mixed(), 4 * MIB, 3 * MIB, ctx=512),
        asked(windowed(), 8 * MIB, 6 * MIB, sequences=3, options=CacheOptions(ring=False)),
        asked(known_geometry("qwen3.5-9b"), 6 * GIB, 2 * GIB, pair="q8_0:q5_1"),
    ],
    ids=["lopsided", "mixed", "context", "rings-off", "hybrid"],
)
@pytest.mark.slow
def test_every_alternative_is_what_the_planner_answers_to_the_changed_request(question):
    explanation = explained(question)
    assert {change.change.knob for change in explanation.alternatives} >= {"--kv", "--kv-budget"}
    for change in explanation.alternatives:
        request, pair = question.request, question.pair
        knob, value = change.change.knob, change.change.value
        if knob == "--kv":
            pair = parse_pair(value)
        elif knob == "--ring":
            request = replace(request, options=replace(request.options, ring=True))
        elif knob == "--sequences":
            request = replace(request, sequences=int(value), ctx=None)
        elif knob == "--kv-budget":
            sizes = tuple(int(size) for size in value.split(","))
            request = replace(request, budget=replace(request.budget, stage_bytes=sizes))
        request = replace(request, fence=change.fence)
        again = plan_capacity(question.geometry, question.formats_of(pair), request)
        assert (again.fence, again.capacity_tokens, again.sequences, again.stranded_bytes) == (
            change.fence, change.capacity_tokens, change.sequences, change.stranded_bytes,
        )  # fmt: skip


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"ctx": 512},
        {"sequences": 2},
        {"ctx": 300, "sequences": 3},
        {"max_stage_bytes": ((0, 3 * MIB),)},
        {"ctx": 512, "max_stage_bytes": ((1, 2 * MIB),)},
    ],
)
@pytest.mark.parametrize("geometry", [mixed(), windowed()], ids=["mixed", "windowed"])
def test_the_pools_and_what_is_stranded_add_up_to_the_budget_of_every_stage(
    geometry, request_fields
):
    question = asked(geometry, 4 * MIB, 3 * MIB, **request_fields)
    plan = question.plan()
    shares = stage_shares(geometry, question.formats_of(question.pair), question.request, plan)
    for row, share in zip(plan.stages, shares, strict=True):
        idle = sum(pool.stranded_bytes for pool in share.pools)
        assert sum(pool.bytes for pool in share.pools) == row.context_bytes
        assert idle + share.loose_bytes + share.withheld_bytes == row.stranded_bytes
        assert share.loose_bytes >= 0
        capped = dict(request_fields.get("max_stage_bytes", ())).get(row.stage)
        assert share.withheld_bytes == (0 if capped is None else row.cache_budget_bytes - capped)
        assert sum(size for _, size in stage_parts(row, share)) == row.device_bytes
        for pool in share.pools:
            assert pool.bytes == pool.units * pool.unit_bytes
            assert pool.stranded_bytes == pool.stranded_units * pool.unit_bytes
    assert len(shares[0].pools) == (3 if geometry.name == "mixed" else 2)


def test_a_device_is_its_weights_buffers_reserve_pools_and_stranded_bytes():
    question = asked(
        weighted(), 24 * MIB, 16 * MIB, budget={"cache_only": False, "reserve_bytes": MIB}
    )
    plan = question.plan()
    shares = explain(question, plan).stages
    for row, share in zip(plan.stages, shares, strict=True):
        parts = stage_parts(row, share)
        assert [name for name, _ in parts] == [
            "weights", "fixed", "reserve", "full records", "stranded",
        ]  # fmt: skip
        assert sum(size for _, size in parts) == row.device_bytes


def test_bytes_beyond_a_cap_are_told_apart():
    explanation = explained(
        asked(layers_of_2048_bytes(4), GIB, GIB, max_stage_bytes=((1, GIB // 2),), fence="even")
    )
    assert explanation.binding.have_bytes == GIB // 2
    assert "stage 1 strands 512.00 MiB: 536,870,912 bytes beyond --max-stage-bytes" in (
        explanation.says
    )


def test_another_stage_may_end_the_sequences_and_it_says_so():
    state = recurrent_layer(key_groups=2, value_heads=2, state_size=64)
    geometry = ModelGeometry(
        name="far", family="far", layers=(full_layer(4, 128), state), context_tokens=64
    )
    slot = size = 2 * 4 * (state.conv_elements + state.state_elements)
    explanation = explained(asked(geometry, 2048 * 640, 3 * size, fence=(0, 1, 2), ctx=64))
    assert explanation.binding.stage == 0
    assert "stage 1 ends the number of sequences: 3 of 64 tokens fit there" in explanation.says
    assert explanation.stages[1].pools[0].unit_bytes * 2 == slot


def test_a_context_is_explained_by_one_more_sequence_of_it():
    explanation = explained(asked(layers_of_2048_bytes(4), GIB, GIB - 1, ctx=8192, fence="even"))
    binding = explanation.binding
    assert (binding.stage, binding.grows_by) == (1, "sequences")
    assert binding.next_bytes == 32 * 8192 * 2 * 2048 == binding.have_bytes + 1
    assert "one more sequence of 8,192 tokens would need 1 bytes" in explanation.says[0]
    spare = explained(asked(layers_of_2048_bytes(4), GIB, GIB, ctx=64, sequences=1))
    assert spare.says[0].startswith("stage 0 would bind first in its full records")
    assert "bytes would stay free after 16 tokens more" in spare.says[0]


def refusal(question: Question) -> CapacityError:
    with pytest.raises(CapacityError) as refused:
        plan_or_mend(question)
    return refused.value


def test_a_refusal_names_the_better_fence_first_and_keeps_every_stages_have_and_need():
    error = refusal(asked(*LOPSIDED, fence=(0, 56, 64), ctx=81_920))
    assert error.hint.startswith("--fence 0,32,64 fits; or --kv ")
    assert [stage.stage for stage in error.stages] == [0, 1]
    assert [stage.need_bytes for stage in error.stages] == [81_920 * n * 2048 for n in (56, 8)]


def mends_of(question: Question) -> list[str]:
    return refusal(question).hint.split("; or ")


def test_the_mends_of_a_long_context_are_a_format_fewer_tokens_and_more_bytes():
    question = asked(
        layers_of_2048_bytes(48), parse_size("3.18GiB"), 8 * GIB, fence=(0, 16, 48), ctx=262_144
    )
    assert mends_of(question) == [
        "--kv q8_0:q5_1 --fence 0,13,48 fits",
        "--ctx 104192 or less fits",
        "4936 MiB more on stage 0 and 8192 MiB more on stage 1 fit",
    ]


def test_the_mend_named_is_the_largest_that_fits():
    question = asked(layers_of_2048_bytes(4), GIB, GIB, ctx=8192, pair="q4_0:q4_0")
    per_token = 2 * 2 * 4 * 128 * 18 // 32
    most = GIB // (8192 * per_token)
    question = question.asking(sequences=most + 5)
    fewer, tokens, _ = mends_of(question)
    assert fewer == f"--sequences {most} or fewer fit"
    assert question.asking(sequences=most).try_plan()
    assert not question.asking(sequences=most + 1).try_plan()
    context = int(tokens.split()[1])
    assert question.asking(ctx=context).try_plan()
    assert not question.asking(ctx=context + 16).try_plan()


def weighted() -> ModelGeometry:
    layer = replace(full_layer(4, 128), weight_elements=1_000_000)
    return ModelGeometry(name="weighted", family="weighted", layers=(layer,) * 8, hidden_size=64)


def test_weights_that_do_not_fit_are_mended_down_to_a_first_block_of_cache():
    budget = {"cache_only": False, "dtype_bytes": 2}
    (more,) = mends_of(asked(weighted(), 5 * MIB, 5 * MIB, budget=budget))
    assert more.endswith(" fit")
    sizes = [5 * MIB, 5 * MIB]
    for words in more.removesuffix(" fit").split(" and "):
        amount, _, _, _, _, stage = words.split()
        sizes[int(stage)] += int(amount) * MIB
    assert asked(weighted(), *sizes, budget=budget).try_plan()
    assert not asked(weighted(), *(size - MIB for size in sizes), budget=budget).try_plan()


def test_many_short_stages_are_mended_by_one_figure_for_all():
    question = asked(layers_of_2048_bytes(4), *[MIB] * 4, ctx=16_384)
    assert mends_of(question)[-1] == "31 MiB more on each of 4 stages fit"


def test_wide_weights_and_a_large_reserve_are_mended_by_their_own_knobs():
    budget = {"cache_only": False, "dtype_bytes": 4}
    assert "--dtype bf16 fits" in mends_of(asked(weighted(), 12 * MIB, 12 * MIB, budget=budget))
    budget = {"cache_only": False, "dtype_bytes": 2, "reserve_bytes": 8 * MIB}
    mends = mends_of(asked(weighted(), 14 * MIB, 14 * MIB, budget=budget, ctx=16))
    (reserve,) = (mend for mend in mends if mend.startswith("--reserve"))
    budget["reserve_bytes"] = int(reserve.split()[1])
    assert 0 < budget["reserve_bytes"] < 8 * MIB
    assert asked(weighted(), 14 * MIB, 14 * MIB, budget=budget, ctx=16).try_plan()


def test_limits_that_the_request_sets_itself_are_mended_by_leaving_them_out():
    geometry = layers_of_2048_bytes(4)
    capped = asked(geometry, GIB, GIB, ctx=65_536, max_stage_bytes=((0, MIB), (1, MIB)))
    assert mends_of(capped)[0] == "leaving out --max-stage-bytes fits"
    tight = asked(geometry, GIB, GIB // 3, ctx=131_072, pins=((1, 0), (2, 1)))
    assert mends_of(tight)[0] == "leaving out --pin fits"


def test_rings_mend_a_refusal_where_they_are_off():
    off = CacheOptions(ring=False)
    whole = asked(windowed(), 8 * MIB, 8 * MIB, options=off, ctx=6_000)
    assert mends_of(whole)[0] == "--ring on fits"


@pytest.fixture
def written(tmp_path):
    def write(geometry: ModelGeometry) -> str:
        path = tmp_path / f"{geometry.name}.json"
        path.write_text(to_json(geometry))
        return str(path)

    return write


def test_the_command_line_explains_on_demand_alone(written, capsys):
    words = ["plan", written(mixed()), "--kv-budget", "4MiB", "--kv-budget", "3MiB", "--json"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "explanation" not in plain
    assert main([*words, "--explain"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert list(answer)[:-1] == list(plain)
    assert list(answer["explanation"]) == ["binding", "stages", "says"]
    for alternative in answer["alternatives"]:
        assert list(alternative)[:5] == [
            "fence", "capacity_tokens", "sequences", "stranded_bytes", "says",
        ]  # fmt: skip
        assert list(alternative["change"]) == ["knob", "value"]
        assert alternative["says"] in said.err
    for sentence in answer["explanation"]["says"]:
        assert sentence in said.err


def test_the_formats_of_single_layers_stay_while_another_pair_is_tried(written, capsys):
    model = written(layers_of_2048_bytes(2))
    words = ["plan", model, "--kv-budget", "4MiB", "--kv-budget", "4MiB", "--json"]
    words += ["--kv", "bf16", "--kv-layers", "0=bf16"]
    assert main([*words, "--explain"]) == 0
    offers = json.loads(capsys.readouterr().out)["alternatives"]
    (offer,) = (one for one in offers if one["change"]["value"] == "q8_0:q5_1")
    words[words.index("bf16")] = "q8_0:q5_1"
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [answer[key] for key in ("fence", "capacity_tokens", "stranded_bytes")] == [
        offer[key] for key in ("fence", "capacity_tokens", "stranded_bytes")
    ]


def test_a_refused_command_line_names_a_mend_that_the_command_line_takes(written, capsys):
    words = ["plan", written(layers_of_2048_bytes(64)), "--kv-budget", "5GiB", "--kv-budget"]
    words += ["5GiB", "--kv", "f16", "--ctx", "81920", "--fence", "0,56,64", "--json"]
    assert main(words) == 1
    hint = json.loads(capsys.readouterr().out)["error"]["hint"]
    assert hint.startswith("--fence 0,32,64 fits")
    words[words.index("0,56,64")] = "0,32,64"
    assert main(words) == 0


BARS = Bars(
    title="bytes",
    parts=("weights", "full records", "stranded"),
    rows=[
        ("stage 0", [("weights", 10), ("full records", 20), ("stranded", 30)]),
        ("stage 1", [("weights", 30)]),
    ],
)


class Screen:
    """A stream that says it is a terminal, and keeps what is written."""

    encoding = "utf-8"

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_bars_are_plain_in_a_pipe_and_drawn_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    pipe, terminal = Screen(terminal=False), Screen(terminal=True)
    for screen in (pipe, terminal):
        monkeypatch.setattr("sys.stdout", screen)
        write_result("plan", {}, [BARS], as_json=False)
    assert pipe.text.splitlines() == [
        "bytes: # weights  + full records  : stranded",
        "stage 0 |" + "#" * 10 + "+" * 20 + ":" * 30 + "|",
        "stage 1 |" + "#" * 30 + "|",
    ]
    assert terminal.text.count("█") == 3 + 60 + 30
    assert "\x1b[" in terminal.text


def test_a_narrow_terminal_costs_a_table_no_digit(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "50")
    screen = Screen(terminal=True)
    monkeypatch.setattr("sys.stdout", screen)
    table = Table(
        title="figures",
        columns=("stage", "stranded bytes", "capacity tokens", "why"),
        rows=[("0", "34360647680", "123456789", "one long sentence of many words that must wrap")],
        numbers=frozenset({"stage", "stranded bytes", "capacity tokens"}),
    )
    write_result("plan", {}, [table], as_json=False)
    words = screen.text.split()
    assert {"34360647680", "123456789", "sentence", "wrap"} <= set(words)
    assert "…" not in screen.text


def test_the_cells_of_a_bar_add_up_to_its_rounded_length():
    cells = bar_cells([("a", 1), ("b", 1), ("c", 1)], 4, 10)
    assert cells == [("a", 2), ("b", 3), ("c", 3)]
    assert bar_cells([("a", 0)], 0, 10) == [("a", 0)]
