"""The options that several commands share, and what they mean; in this one place.

Values that argparse would only call invalid (formats, sizes, fences) stay text until a function
here parses them, so that the typed error reaches the user.
"""

import argparse

from memkv_pp.cli.output import write_message
from memkv_pp.errors import ConfigError, FenceError
from memkv_pp.formats import Pair, parse_format, parse_pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.fences import FenceChoice
from memkv_pp.sizing import CacheOptions, Layout


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional ``MODEL``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a .gguf, a Hugging Face folder, a config.json, a geometry .json, or a shipped name"
        " such as qwen3.5-9b",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else"
    )


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The options about the cache: formats, rings, layout, speculation, fence."""
    group = parser.add_argument_group("cache")
    add = group.add_argument
    add(
        "--kv",
        metavar="PAIR",
        default=None,
        help="formats of K and V, as in q8_0:q4_0, bf16 or turbo4k3v (default: the model's own where"
        " its geometry file has one, else q8_0:q5_1)",
    )
    add(
        "--kv-layers",
        metavar="RANGES",
        default="",
        help="formats of single layers, as in '0-3=bf16:bf16,36-39=bf16:bf16'",
    )
    add(
        "--high-precision-layers",
        metavar="N|auto|max",
        default="0",
        help="layers at each end that stay in high precision (default %(default)s)",
    )
    add(
        "--kv-policy",
        choices=("default", "source"),
        default="default",
        help="whose rules choose formats where you did not (default %(default)s)",
    )
    add(
        "--block-tokens",
        metavar="N",
        type=int,
        default=16,
        help="tokens of one record (default %(default)s)",
    )
    add(
        "--prefill-chunk",
        metavar="N",
        type=int,
        default=512,
        help="most prompt tokens of one step; rings hold one beside the window (default %(default)s)",
    )
    add(
        "--rewind-slack",
        metavar="N",
        type=int,
        default=64,
        help="tokens a ring can go back beyond its window (default %(default)s)",
    )
    add(
        "--ring",
        choices=("on", "off"),
        default="on",
        help="keep sliding layers in rings, or whole (default %(default)s)",
    )
    add(
        "--layout",
        choices=("paged", "flat"),
        default="paged",
        help="records of --block-tokens, or one per sequence (default %(default)s)",
    )
    add(
        "--dtype",
        choices=("bf16", "f32", "f16"),
        default="bf16",
        help="compute type; weights count in it (default %(default)s)",
    )
    add(
        "--spec",
        metavar="K",
        type=int,
        default=0,
        help="speculative tokens: windows have 1 + K rows (default %(default)s)",
    )
    add(
        "--fence",
        metavar="even|balanced|CUTS",
        default=None,
        help="layers per stage, as in 0,16,48 (default: balanced over devices, else even)",
    )


def cache_options(args: argparse.Namespace, *, flat_rows: int = 0) -> CacheOptions:
    """CacheOptions of the shared options; ``flat_rows`` is used in the flat layout only."""
    layout = Layout(args.layout)
    return CacheOptions(
        block_tokens=args.block_tokens,
        prefill_chunk=args.prefill_chunk,
        rewind_slack=args.rewind_slack,
        ring=args.ring == "on",
        layout=layout,
        flat_rows=flat_rows if layout is Layout.FLAT else 0,
        spec_tokens=args.spec,
    )


def layer_pairs(args: argparse.Namespace, geometry: ModelGeometry) -> tuple[Pair, ...]:
    """A pair of formats per layer, NextN layers behind the trunk; says what ``model_pair`` says."""
    return pairs_of(args, geometry, model_pair(args, geometry))


def model_pair(args: argparse.Namespace, geometry: ModelGeometry) -> Pair:
    """The model's pair: ``--kv``, the model's own default, or the engine's.

    What the user gives up by overriding the model's own default goes to stderr.
    """
    from memkv_pp.kv_policy import effective_pair

    chosen = effective_pair(
        None if args.kv is None else parse_pair(args.kv),
        parse_pair(geometry.default_kv) if geometry.default_kv else None,
    )
    if chosen.warning:
        write_message(f"warning: {chosen.warning}")
    return chosen.pair


def pairs_of(args: argparse.Namespace, geometry: ModelGeometry, pair: Pair) -> tuple[Pair, ...]:
    """What the shared options make of the model's ``pair``, layer by layer."""
    from memkv_pp.kv_policy import layer_formats

    precise: str = args.high_precision_layers
    return layer_formats(
        geometry,
        kv=pair,
        kv_layers=args.kv_layers,
        high_precision_layers=int(precise) if precise.isdecimal() else precise,
        policy=args.kv_policy,
    )


def dtype_bytes(args: argparse.Namespace) -> int:
    """Bytes of one weight element."""
    return parse_format(args.dtype).code_bytes


def parse_fence(text: str) -> FenceChoice:
    """``even``, ``balanced``, or the cuts of ``0,16,48``; FenceError for anything else.

    >>> parse_fence("0,16,48")
    (0, 16, 48)
    """
    name = text.strip()
    if name == "even" or name == "balanced":
        return name
    items = [item.strip() for item in name.split(",")]
    if not all(item.isdecimal() and len(item) < 10 for item in items):
        raise FenceError(f"--fence: {text[:64]!r} is no fence", "write even, balanced or 0,16,48")
    return tuple(int(item) for item in items)


def at_least_one(knob: str, value: int | None) -> int | None:
    """``value``, or ConfigError naming ``knob`` when it is below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{knob}: {value} is below 1")
    return value


def load_geometry(args: argparse.Namespace) -> ModelGeometry:
    """The geometry of ``MODEL``; what had to be assumed goes to stderr."""
    from memkv_pp.model.metadata import open_geometry

    geometry = open_geometry(args.model)
    for warning in geometry.warnings:
        write_message(f"warning: {warning}")
    return geometry
