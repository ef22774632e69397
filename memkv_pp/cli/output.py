"""Everything the command line writes.

With ``--json`` stdout carries exactly one JSON object, and the tables go to stderr. Without it
the tables go to stdout: drawn by rich on a terminal, plain columns in a pipe. Messages and
progress always go to stderr.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from memkv_pp.errors import CapacityError, MemkvError


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under ``columns``. Columns named in ``numbers`` are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A bar per row, made of parts: (label, [(part, size), …]). The largest row is the widest.

    ``parts`` names every part there may be, in the order of the legend.
    """

    title: str
    parts: tuple[str, ...]
    rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]


BAR_CELLS = 60
PLAIN_GLYPHS = "#+:=~*.%@o"
COLOURS = ("blue", "cyan", "white", "green", "yellow", "magenta", "red")


def write_result(
    command: str, payload: Mapping[str, Any], tables: Sequence[Table | Bars], *, as_json: bool
) -> None:
    """Write a command's answer. ``payload`` is the JSON object without its ``schema``."""
    stream = sys.stderr if as_json else sys.stdout
    for table in tables:
        if isinstance(table, Bars):
            _write_bars(table, stream)
        else:
            _write_table(table, stream)
    if as_json:
        _write_json({"schema": f"memkv-pp/{command}/1", **payload})


def write_text(text: str, *, as_json: bool) -> None:
    """Text that is to be copied as it is, where the tables go."""
    (sys.stderr if as_json else sys.stdout).write(text)


def write_message(text: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(text + "\n")


def error_object(error: Exception) -> dict[str, Any]:
    """The contract's description of an error: type, message, hint, and the stages' have and need."""
    stages = error.stages if isinstance(error, CapacityError) else ()
    return {
        "type": type(error).__name__,
        "message": error.message if isinstance(error, MemkvError) else str(error),
        "hint": error.hint if isinstance(error, MemkvError) else "",
        "stages": [
            {
                "stage": stage.stage,
                "have_bytes": stage.have_bytes,
                "need_bytes": stage.need_bytes,
            }
            for stage in stages
        ],
    }


def write_error(error: Exception, *, as_json: bool) -> None:
    """An error for people on stderr, and with ``as_json`` as the contract's object on stdout."""
    described = error_object(error)
    write_message(f"{described['type']}: {described['message']}")
    if described["hint"]:
        write_message(f"  hint: {described['hint']}")
    if as_json:
        _write_json({"schema": "memkv-pp/error/1", "error": described})


def _write_json(payload: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(payload, allow_nan=False) + "\n")


def _write_table(table: Table, stream: TextIO) -> None:
    if stream.isatty():
        _write_drawn(table, stream)
        return
    widths = [
        max(len(name), *(len(row[i]) for row in table.rows), 0)
        for i, name in enumerate(table.columns)
    ]
    stream.write(table.title + "\n")
    for row in (table.columns, *table.rows):
        cells = [
            cell.rjust(width) if name in table.numbers else cell.ljust(width)
            for name, cell, width in zip(table.columns, row, widths, strict=True)
        ]
        stream.write("  ".join(cells).rstrip() + "\n")


def _write_drawn(table: Table, stream: TextIO) -> None:
    """Columns of bare numbers keep every digit, however narrow the terminal; others wrap."""
    import rich.console
    import rich.table

    drawn = rich.table.Table(
        title=table.title,
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold underline",
    )
    for index, name in enumerate(table.columns):
        number = name in table.numbers
        bare = number and not any(" " in row[index] for row in table.rows)
        drawn.add_column(
            name.replace(" ", "\n") if bare else name,
            justify="right" if number else "left",
            no_wrap=bare,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*row)
    rich.console.Console(file=stream, markup=False).print(drawn)


def bar_cells(parts: Sequence[tuple[str, int]], largest: int, width: int) -> list[tuple[str, int]]:
    """(part, cells) of a bar whose ``largest`` would fill ``width`` cells; edges are rounded.

    >>> bar_cells([("weights", 10), ("stranded", 5)], 20, 8)
    [('weights', 4), ('stranded', 2)]
    """
    cells: list[tuple[str, int]] = []
    end = edge = 0
    for part, size in parts:
        end += size
        following = round(end * width / max(largest, 1))
        cells.append((part, following - edge))
        edge = following
    return cells


def _write_bars(bars: Bars, stream: TextIO) -> None:
    labels = max((len(label) for label, _ in bars.rows), default=0)
    largest = max((sum(size for _, size in parts) for _, parts in bars.rows), default=0)
    shown = [name for name in bars.parts if any(name in dict(parts) for _, parts in bars.rows)]
    drawn = [
        (label.rjust(labels), bar_cells(parts, largest, BAR_CELLS)) for label, parts in bars.rows
    ]
    if stream.isatty():
        _write_coloured(bars, drawn, shown, stream)
        return
    glyphs = dict(zip(bars.parts, PLAIN_GLYPHS, strict=False))
    legend = "  ".join(f"{glyphs[name]} {name}" for name in shown)
    stream.write(f"{bars.title}: {legend}\n")
    for label, cells in drawn:
        stream.write(f"{label} |{''.join(glyphs[part] * count for part, count in cells)}|\n")


def _write_coloured(
    bars: Bars, drawn: Sequence[tuple[str, list[tuple[str, int]]]], shown: list[str], stream: TextIO
) -> None:
    import rich.console
    import rich.text

    console = rich.console.Console(file=stream, markup=False, highlight=False)
    cell = "█" if console.encoding.startswith("utf") else "#"
    colours = dict(zip(bars.parts, COLOURS, strict=False))
    text = rich.text.Text(f"{bars.title}:")
    for name in shown:
        text.append("  ").append(cell, colours[name]).append(f" {name}")
    for label, cells in drawn:
        text.append(f"\n{label} ")
        for part, count in cells:
            text.append(cell * count, colours[part])
    console.print(text)
