"""Assembles the parser, runs a command, and turns errors into exit codes.

======  =====================================================================
code    meaning
======  =====================================================================
0       done
1       a typed refusal or failure: any MemkvError but ConfigError
2       wrong usage: a bad option, ConfigError and its kin, a missing file
======  =====================================================================
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from memkv_pp import __version__
from memkv_pp.cli import bench, doctor, generate, output, plan, size
from memkv_pp.errors import ConfigError, MemkvError

COMMANDS = (size, plan, generate, doctor, bench)


class UsageError(ConfigError):
    """The command line does not parse: an unknown option, a missing value."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, never abbreviates, and keeps the examples' line breaks."""

    def __init__(self, **settings: object) -> None:
        super().__init__(
            **{  # pyright: ignore[reportArgumentType]
                "allow_abbrev": False,
                "formatter_class": argparse.RawDescriptionHelpFormatter,
            }
            | settings
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; ``main`` turns it into exit code 2."""
        raise UsageError(f"{self.prog}: {message}", f"see {self.prog} --help")


def build_parser() -> Parser:
    """The whole command line. Each module of COMMANDS adds its own subcommand."""
    parser = Parser(
        prog="memkv-pp",
        description="Plan, size and run staged KV caches: a byte ledger per pipeline stage.",
        epilog="examples:\n"
        "  memkv-pp size qwen3.5-9b --ctx 131072\n"
        "  memkv-pp plan qwen3.5-27b --device 24GiB --device 16GiB\n"
        "  memkv-pp doctor",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own by default); the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        args = build_parser().parse_args(words, argparse.Namespace(words=words))
        return args.run(args)
    except (ConfigError, OSError) as error:
        output.write_error(error, as_json=as_json)
        return 2
    except MemkvError as error:
        output.write_error(error, as_json=as_json)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
