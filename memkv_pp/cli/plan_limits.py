"""What ``plan`` makes the most of, and within which limits: objective, pins, caps."""

import argparse

from memkv_pp.errors import ConfigError
from memkv_pp.plan.request import OBJECTIVES
from memkv_pp.units import parse_size


def add_limits(parser: argparse.ArgumentParser) -> None:
    """``--objective``, ``--pin`` and ``--max-stage-bytes``."""
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="capacity",
        help="what the balanced fence makes the most of: the longest sequence, how many of the"
        " context, or the least time per token (needs --device-profile); default %(default)s",
    )
    parser.add_argument(
        "--pin",
        metavar="LAYER=STAGE,…",
        default="",
        help="stages of single layers, as in '0=0,40=2'",
    )
    parser.add_argument(
        "--max-stage-bytes",
        metavar="STAGE=SIZE,…",
        default="",
        help="the most that weights, buffers and cache of a stage may take together, as in"
        " '1=3.5GiB'",
    )


def parse_pins(text: str) -> tuple[tuple[int, int], ...]:
    """(layer, stage) pairs of ``--pin``; ConfigError for anything else.

    >>> parse_pins("0=0, 40=2")
    ((0, 0), (40, 2))
    """
    return tuple(
        (_index("--pin", key), _index("--pin", value)) for key, value in _pairs("--pin", text)
    )


def parse_stage_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """(stage, bytes) pairs of ``--max-stage-bytes``; ConfigError for anything else.

    >>> parse_stage_sizes("1=3.5GiB")
    ((1, 3758096384),)
    """
    knob = "--max-stage-bytes"
    return tuple((_index(knob, key), parse_size(value, knob)) for key, value in _pairs(knob, text))


def _pairs(knob: str, text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for item in text.split(",") if text.strip() else ():
        key, equals, value = item.partition("=")
        if not equals:
            wanted = "LAYER=STAGE" if knob == "--pin" else "STAGE=SIZE"
            raise ConfigError(f"{knob}: {item.strip()[:64]!r} is no {wanted}")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _index(knob: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(f"{knob}: {text[:64]!r} is no number")
    return int(text)
