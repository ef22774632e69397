"""What the documentation shows runs, and what the first screen promises is there."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = (
    *("clock", "fence", "formats", "geometry", "packing", "packing_groups", "pools", "rings"),
    *("rotation", "sizing", "small_floats", "units"),
)


def test_the_readme_shows_exactly_two_set_up_commands_on_its_first_screen():
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    assert [line for line in first_screen if line.startswith("make ")] == ["make demo", "make test"]


def test_the_python_of_the_readme_runs_and_prints_what_it_says(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert block.rstrip().endswith(f"# {printed}")


@pytest.mark.parametrize("name", PURE)
def test_examples_in_docstrings_are_true(name):
    module = importlib.import_module(f"memkv_pp.{name}")
    assert doctest.testmod(module).failed == 0


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    names = [re.match(r"[a-z0-9-]+", name) for name in (*project["dependencies"], *extras)]
    listed = {name[0].removesuffix("-cuda12x").removesuffix("-cuda13x") for name in names if name}
    reasons = (ROOT / "docs/dependencies.md").read_text()
    assert [name for name in listed if name not in reasons] == []
    assert len(listed) > 12


def test_kernels_and_launch_hold_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "launch" / "__init__.py").exists()
