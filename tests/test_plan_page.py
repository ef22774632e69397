"""The page of a plan: whole, self-contained, escaped."""

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from memkv_pp.cli import main
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import ModelGeometry, uniform_geometry
from memkv_pp.model.geometry_file import to_json
from memkv_pp.plan.changes import Question
from memkv_pp.plan.explain import explain
from memkv_pp.plan.page import render_page
from memkv_pp.plan.pool_shares import stage_parts
from memkv_pp.plan.request import Budget, PlanRequest
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.geometries import full_layer, recurrent_layer, sliding_layer
from memkv_pp.units import MIB, format_size


class Tree(HTMLParser):
    """Every tag closed in order; the words, the attributes and the rectangles that were met."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.bars: list[list[tuple[str, float, float]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in values.items()]
        if tag == "svg" and values.get("class") == "bar":
            self.bars.append([])
        if tag == "rect" and "x" in values and self.bars:
            self.bars[-1].append(
                (values["class"], float(values["x"]), float(values.get("width", 0)))
            )
        if tag not in {"meta", "line"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)


def mixed(name: str = "mixed") -> ModelGeometry:
    state = recurrent_layer(key_groups=1, value_heads=1, state_size=16)
    weigh = (replace(layer, weight_elements=9000) for layer in (full_layer(2, 64), state))
    full, state = weigh
    return ModelGeometry(
        name=name,
        family="mixed",
        layers=(full, sliding_layer(2, 64, 128), state) * 4,
        context_tokens=4096,
        hidden_size=64,
        warnings=("a <guess> was made",),
    )


def question_of(geometry: ModelGeometry, *devices: int, **request) -> Question:
    return Question(
        geometry=geometry,
        pair=parse_pair("q8_0:q5_1"),
        formats_of=lambda pair: (pair,) * geometry.num_layers,
        request=PlanRequest(
            budget=Budget(stage_bytes=devices, reserve_bytes=MIB),
            options=CacheOptions(),
            **request,
        ),
    )


def page_of(question: Question, command: str = "memkv-pp plan MODEL") -> tuple[str, Tree]:
    plan = question.plan()
    page = render_page(question.geometry, plan, explain(question, plan), command)
    return page, Tree(page)


def test_every_stage_with_every_figure_is_on_the_page():
    question = question_of(mixed(), 12 * MIB, 9 * MIB, 6 * MIB, fence="even")
    plan = question.plan()
    _, tree = page_of(question)
    for row in plan.stages:
        assert f"Stage {row.stage}" in tree.words
        assert format_size(row.stranded_bytes) in tree.text
        for name, value in asdict(row).items():
            assert name in tree.words
            if isinstance(value, int):
                assert f"{value:,}" in tree.words
        assert f"[{row.layers[0]}, {row.layers[1]})" in tree.words
    for figure in (f"{plan.capacity_tokens:,}", f"{plan.sequences:,}"):
        assert figure in tree.words
    assert tree.words.count("binds") == 1


def test_the_explanation_the_changes_and_the_command_are_on_the_page():
    question = question_of(mixed(), 12 * MIB, 9 * MIB, 6 * MIB, fence="even")
    command = "memkv-pp plan 'a model' --device 12MiB"
    explanation = explain(question, question.plan())
    _, tree = page_of(question, command)
    assert set(explanation.says) <= set(tree.words)
    assert {change.says for change in explanation.alternatives} <= set(tree.words)
    assert command in tree.words
    assert "a <guess> was made" in tree.words


def test_a_bar_is_as_wide_as_its_device_and_its_parts_as_their_bytes():
    question = question_of(mixed(), 12 * MIB, 6 * MIB, fence="even")
    plan = question.plan()
    shares = explain(question, plan).stages
    _, tree = page_of(question)
    assert len(tree.bars) == 2
    for row, share, (room, *drawn) in zip(plan.stages, shares, tree.bars, strict=True):
        parts = stage_parts(row, share)
        assert room == ("room", 0, pytest.approx(1000 * row.device_bytes / (12 * MIB), abs=0.01))
        drawn = drawn[: len(parts)]
        assert [name for name, _, _ in drawn] == [name.replace(" ", "-") for name, _ in parts]
        start = 0
        for (_, x, width), (_, size) in zip(drawn, parts, strict=True):
            assert x == pytest.approx(1000 * start / (12 * MIB), abs=0.01)
            assert width == pytest.approx(1000 * size / (12 * MIB), abs=0.01)
            start += size


def test_the_page_asks_the_network_for_nothing_and_runs_nothing():
    page, tree = page_of(question_of(mixed(), 12 * MIB, 9 * MIB))
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|<iframe", page)
    assert not {name for _, name, _ in tree.attributes} & {"src", "href", "action", "onload"}


def test_what_others_wrote_is_escaped():
    name = '<script>alert("1")</script>&amp;\'"'
    command = "memkv-pp plan '</code><b>'"
    page, tree = page_of(question_of(mixed(name), 12 * MIB, 9 * MIB), command)
    assert "<script" not in page
    assert "<b>" not in page
    assert name in tree.words
    assert command in tree.words


def test_both_colour_schemes_and_narrow_screens_are_provided_for():
    page, tree = page_of(question_of(mixed(), 12 * MIB, 9 * MIB))
    assert "prefers-color-scheme: dark" in page
    assert ("meta", "content", "width=device-width, initial-scale=1") in tree.attributes
    cells = [value for tag, name, value in tree.attributes if (tag, name) == ("td", "data-label")]
    assert cells == ["stage", "layers", "device", "weights", "cache budget", "context", "stranded",
                     "capacity tokens", "sequences"] * 2  # fmt: skip
    used = {word for _, name, value in tree.attributes if name == "class" for word in value.split()}
    style = page[page.index("<style>") : page.index("</style>")]
    assert {name for name in used if f".{name} " not in style} == set()


def test_the_command_line_writes_the_page_and_the_command_that_makes_it_again(tmp_path, capsys):
    model, page = tmp_path / "a model.json", tmp_path / "plan.html"
    model.write_text(to_json(uniform_geometry(8, kv_heads=2, head_size=64, name="<8>")))
    words = ["plan", str(model), "--kv-budget", "8MiB", "--kv-budget", "4MiB", "--html", str(page)]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == f"wrote {page}\n"
    assert "what would change" not in said.out
    tree = Tree(page.read_text(encoding="utf-8"))
    assert f"memkv-pp plan '{model}' {' '.join(words[2:])}" in tree.words
    capsys.readouterr()
    assert main([*words[:-1], str(tmp_path / "none" / "plan.html")]) == 2
    assert re.search("ConfigError: --html: .*plan.html cannot be written", capsys.readouterr().err)
