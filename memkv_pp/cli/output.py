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


def write_result(
    command: str, payload: Mapping[str, Any], tables: Sequence[Table], *, as_json: bool
) -> None:
    """Write a command's answer. ``payload`` is the JSON object without its ``schema``."""
    for table in tables:
        _write_table(table, sys.stderr if as_json else sys.stdout)
    if as_json:
        _write_json({"schema": f"memkv-pp/{command}/1", **payload})


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
    import rich.console
    import rich.table

    drawn = rich.table.Table(title=table.title, title_justify="left")
    for name in table.columns:
        drawn.add_column(name, justify="right" if name in table.numbers else "left")
    for row in table.rows:
        drawn.add_row(*row)
    rich.console.Console(file=stream, markup=False).print(drawn)
