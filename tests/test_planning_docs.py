"""What docs/sizing.md and docs/migration.md show is recomputed: Python, commands and tables."""

import doctest
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from memkv_pp.cli import main
from memkv_pp.fence import explicit
from memkv_pp.formats import FORMATS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("sizing.md", "migration.md")


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[tuple[list[str], str]]:
    """(words, what follows) of every line that starts with ``$`` in the page's console blocks."""
    found: list[tuple[list[str], str]] = []
    for block in blocks(page, "console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, rest = command.partition("\n")
            found.append((shlex.split(line), rest))
    return found


def shown(text: str) -> object:
    """The JSON that is shown; ``…`` at the end of a list stays as an item, in an object it goes."""
    text = re.sub(r",\s*…\s*\}", "}", text)
    return json.loads(re.sub(r",\s*…\s*\]", ', "…"]', text))


def differences(want: object, have: object, where: str = "") -> list[str]:
    """Where ``have`` lacks something of ``want``; keys left out of an object are no difference."""
    if isinstance(want, dict) and isinstance(have, dict):
        missing = [f"{where}.{key}: missing" for key in want if key not in have]
        return missing + [
            line
            for key, value in want.items()
            if key in have
            for line in differences(value, have[key], f"{where}.{key}")
        ]
    if isinstance(want, list) and isinstance(have, list) and want[-1:] == ["…"]:
        return [
            f"{where}: no item like {item}"
            for item in want[:-1]
            if all(differences(item, other) for other in have)
        ]
    if isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = enumerate(zip(want, have, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [] if want == have else [f"{where}: {want} is shown, it is {have}"]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_answers_what_the_page_shows(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown_commands = commands(page)
    assert len(shown_commands) >= 3
    for words, rest in shown_commands:
        if words[0] == "cat":
            Path(words[1]).write_text(rest)
            continue
        assert words[0] == "memkv-pp"
        code = main(words[1:])
        out = capsys.readouterr().out
        want, have = shown(rest), json.loads(out)
        assert differences(want, have) == [], words
        assert (code != 0) == ("error" in have), words


def test_a_figure_that_is_wrong_or_absent_is_found():
    have = {"a": 1, "list": [{"b": 2, "c": 3}, {"b": 4}]}
    assert differences(shown('{"list": [{"b": 4}, …], …}'), have) == []
    assert differences(shown('{"a": 2, …}'), have) == [".a: 2 is shown, it is 1"]
    assert differences(shown('{"z": 1, …}'), have) == [".z: missing"]
    assert differences(shown('{"list": [{"b": 5}, …], …}'), have) == [
        ".list: no item like {'b': 5}"
    ]


def test_the_python_of_the_page_prints_what_it_shows():
    text = "\n".join(blocks("sizing.md", "python"))
    test = doctest.DocTestParser().get_doctest(text, {}, "sizing.md", "sizing.md", 0)
    assert len(test.examples) > 20
    result = doctest.DocTestRunner(verbose=False).run(test)
    assert result.failed == 0


def test_the_table_of_formats_is_the_catalogue():
    rows = re.findall(
        r"^\| ([`a-z0-9_ ]+) \| (\d+) \| (\d+) \+ (\d+) \| ([\d.]+) \| (\d+) \|$",
        (DOCS / "sizing.md").read_text(),
        re.MULTILINE,
    )
    listed = {name for names, *_ in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {name for name, fmt in FORMATS.items() if not fmt.exponent}
    for names, group, codes, scales, bits, row in rows:
        for name in re.findall(r"`(\w+)`", names):
            fmt = FORMATS[name]
            assert (fmt.group, fmt.code_bytes, fmt.scale_bytes) == (
                int(group), int(codes), int(scales),
            )  # fmt: skip
            assert fmt.bits_per_element == float(bits)
            assert fmt.row_bytes(128) == int(row)


def llama_cpp_device(layer: int, slots: int, proportions: list[int]) -> int:
    """The device of a layer as llama.cpp's proportions place it, in its own float arithmetic."""
    ends = np.cumsum(np.array(proportions, dtype=np.float32), dtype=np.float32)
    position = np.float32(layer) / np.float32(slots)
    return int(np.searchsorted(ends / ends[-1], position, side="right"))


CUTS = re.findall(
    r"^\| `--fence ([\d,]+)` \| `VLLM_PP_LAYER_PARTITION=([\d,]+)` \| `-ts ([\d,]+)` \|$",
    (DOCS / "migration.md").read_text(),
    re.MULTILINE,
)


def test_the_migration_table_has_cuts():
    assert len(CUTS) >= 4


@pytest.mark.parametrize(("cuts", "partition", "proportions"), CUTS)
def test_the_cuts_of_the_migration_table_put_each_layer_on_the_same_stage(
    cuts, partition, proportions
):
    numbers = [int(cut) for cut in cuts.split(",")]
    fence = explicit(numbers, numbers[-1])
    sizes = [after - before for before, after in pairwise(numbers)]
    assert [int(size) for size in partition.split(",")] == sizes
    shares = [int(share) for share in proportions.split(",")]
    assert shares == [*sizes[:-1], sizes[-1] + 1]
    slots = fence.num_layers + 1
    placed = [llama_cpp_device(layer, slots, shares) for layer in range(slots)]
    assert placed[:-1] == [fence.stage_of(layer) for layer in range(fence.num_layers)]
    assert placed[-1] == fence.num_stages - 1
