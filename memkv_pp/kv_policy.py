"""Which format where: one pair per layer, from what the user asked and what the layers are.

From the strongest to the weakest:

1. ``--kv-layers``, per absolute trunk layer;
2. ``--high-precision-layers``: the layers at both ends of the model in bf16;
3. with ``policy="source"``: the source's e4m3 switches, per layer class;
4. the model's pair, which ``effective_pair`` takes from ``--kv``, the model's own default or
   the engine's, in that order.

A shared layer has its source layer's pair, since it reads that cache. Layers that keep no rows
carry a pair that means nothing. NextN layers always take the model's pair.

The ``source`` policy reproduces the rules of two engines: ``paged-cache-and-swap.md`` 1.7 (high
precision) and ``dual-cache-and-pipeline.md`` 1.4 (switches), for comparing byte for byte.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.errors import ConfigError, FormatError
from memkv_pp.formats import DEFAULT_PAIR, SOURCE_NAMES, Family, Pair, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.units import ceil_div

HIGH_PRECISION_PAIR = parse_pair("bf16:bf16")
E4M3_PAIR = parse_pair("fp8:fp8")
AUTO_LAYERS = 2

_POLICIES = ("default", "source")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?=(.+)")
_ROW_KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT)
_PAIR_NAMES = {parse_pair(name): name for name in SOURCE_NAMES}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSwitches:
    """The source's e4m3 switches; None means that nobody set it.

    ``gemma_global`` and ``gemma_window`` choose e4m3 for gemma's global and windowed layers,
    over any pair; an unset window switch is on unless ``drafting`` (e4m3 windows cost drafts
    their acceptance). ``fp8`` is the door for all other models; while it is unset, the model's
    loader may open it (``model_fp8``); it is shut otherwise. NextN layers never pass through it.
    """

    gemma_global: bool = True
    gemma_window: bool | None = None
    drafting: bool = False
    fp8: bool | None = None
    model_fp8: bool | None = None

    @property
    def windows_on(self) -> bool:
        """Whether gemma's windowed layers are e4m3."""
        return not self.drafting if self.gemma_window is None else self.gemma_window

    @property
    def fp8_on(self) -> bool:
        """Whether the layers of models other than gemma are e4m3."""
        return bool(self.model_fp8) if self.fp8 is None else self.fp8

    def pair_for(self, *, gemma: bool, windowed: bool, pair: Pair) -> Pair:
        """The pair of one layer: fp8:fp8 where its switch is on, else ``pair``."""
        on = (self.windows_on if windowed else self.gemma_global) if gemma else self.fp8_on
        return E4M3_PAIR if on else pair


DEFAULT_SWITCHES = SourceSwitches()


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectivePair:
    """The model's pair, and what to tell the user about it (empty when nothing)."""

    pair: Pair
    warning: str = ""


def effective_pair(
    explicit: Pair | None, model_default: Pair | None, engine_default: Pair = DEFAULT_PAIR
) -> EffectivePair:
    """``--kv`` if given, else the model's default, else the engine's.

    An explicit pair wins even where it equals the engine's default; where it differs from the
    model's own, ``warning`` says so.
    """
    if explicit is None:
        return EffectivePair(pair=model_default or engine_default)
    if model_default is None or explicit == model_default:
        return EffectivePair(pair=explicit)
    return EffectivePair(
        pair=explicit,
        warning=f"--kv: {explicit} is used, this model's own default is {model_default}",
    )


def layer_formats(
    geometry: ModelGeometry,
    *,
    kv: Pair,
    kv_layers: str = "",
    high_precision_layers: str | int = 0,
    policy: str = "default",
    switches: SourceSwitches = DEFAULT_SWITCHES,
) -> tuple[Pair, ...]:
    """One pair per trunk layer, then one per NextN layer.

    ``high_precision_layers`` is a number N of layers at each end, ``auto`` or ``max``. The default
    policy counts the layers that keep rows, and ``auto`` is 2 where a side of ``kv`` is nvfp4 or
    turbo, else 0. The source policy counts all attention layers, shared ones too, ``auto`` is
    always 2, and 0 leaves the number to ``auto_high_precision_layers``; ``switches`` are its.

    Raises ConfigError for a bad knob, FormatError where a layer that keeps rows has a head size
    its formats cannot hold; the message names the layer.
    """
    if policy not in _POLICIES:
        raise ConfigError(f"--kv-policy: unknown policy {policy[:64]!r}", "use default or source")
    explicit = parse_layer_ranges(kv_layers, geometry.num_layers)
    layers = geometry.layers
    pairs = [kv] * len(layers)
    kinds = _ROW_KINDS
    if policy == "source":
        kinds = (*_ROW_KINDS, LayerKind.SHARED)
        gemma = geometry.family.startswith("gemma")
        pairs = [
            switches.pair_for(gemma=gemma, windowed=layer.kind is LayerKind.SLIDING, pair=kv)
            for layer in layers
        ]
    counted = [index for index, layer in enumerate(layers) if layer.kind in kinds]
    if policy == "source":
        ordinals = source_boundary_layers(kv, len(counted), high_precision_layers)
    else:
        ends = _default_ends(high_precision_layers, kv, len(counted))
        ordinals = boundary_layers(len(counted), ends)
    for ordinal in ordinals:
        pairs[counted[ordinal]] = HIGH_PRECISION_PAIR
    for index, pair in explicit.items():
        pairs[index] = pair
    for source, reader in geometry.shared_edges():
        pairs[reader] = pairs[source]
    every = (*pairs, *[kv] * len(geometry.nextn_layers))
    _check_head_sizes((*layers, *geometry.nextn_layers), every)
    return every


def parse_layer_ranges(text: str, num_layers: int) -> dict[int, Pair]:
    """Pairs by absolute trunk layer from ``0-3=bf16:bf16,7=q8_0:q4_0``; both ends included.

    ConfigError naming --kv-layers for text that is no range, a range that is reversed or past
    the ``num_layers`` of the model, or a layer named twice; FormatError for an unknown format.

    >>> {layer: str(pair) for layer, pair in parse_layer_ranges("0-1=bf16, 3=q8_0:q4_0", 4).items()}
    {0: 'bf16:bf16', 1: 'bf16:bf16', 3: 'q8_0:q4_0'}
    """
    found: dict[int, Pair] = {}
    for part in text.split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"--kv-layers: {part.strip()[:64]!r} is no range",
                "write FIRST-LAST=K:V or LAYER=K:V, as in 0-3=bf16:bf16,7=q8_0:q4_0",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= num_layers:
            raise ConfigError(
                f"--kv-layers: {first}-{last} is not within layers 0-{num_layers - 1} of this model"
            )
        try:
            pair = parse_pair(match[3])
        except FormatError as error:
            raise FormatError(
                f"--kv-layers: {first}-{last}: {error.message.removeprefix('--kv: ')}", error.hint
            ) from None
        for layer in range(first, last + 1):
            if layer in found:
                raise ConfigError(f"--kv-layers: layer {layer} is in two ranges")
            found[layer] = pair
    return found


def boundary_layers(num_layers: int, at_each_end: int) -> tuple[int, ...]:
    """The first and last ``at_each_end`` of ``num_layers``; all of them where the ends meet.

    >>> boundary_layers(10, 2), boundary_layers(3, 2)
    ((0, 1, 8, 9), (0, 1, 2))
    """
    return tuple(i for i in range(num_layers) if i < at_each_end or i >= num_layers - at_each_end)


def auto_high_precision_layers(format_name: str, num_attention_layers: int) -> int:
    """The source's layers at each end when its flag is 0, for one of its sixteen names.

    0 for bf16, fp8 and nvfp4; max(4, ceil(4 L / 5)) for turbo2 and bf16k_turbo3v, which is all of
    them for every L; max(2, ceil(L / 3)) for the rest. ``paged-cache-and-swap.md`` 1.7.
    """
    if format_name in ("bf16", "fp8", "nvfp4"):
        return 0
    if format_name not in SOURCE_NAMES:
        raise FormatError(
            f"--kv-policy source: no rule for {format_name[:64]!r}",
            f"known: {', '.join(SOURCE_NAMES)}",
        )
    if format_name in ("turbo2", "bf16k_turbo3v"):
        return max(4, ceil_div(4 * num_attention_layers, 5))
    return max(2, ceil_div(num_attention_layers, 3))


def source_boundary_layers(
    pair: Pair, num_attention_layers: int, high_precision_layers: str | int = 0
) -> tuple[int, ...]:
    """Ordinals of the attention layers that the source keeps in bf16.

    Empty where the pair is bf16 already. The flag 0 takes ``auto_high_precision_layers`` for a pair
    the source has a name for, and 0 for any other; ``auto`` is 2, which suppresses that number.
    """
    if pair == HIGH_PRECISION_PAIR:
        return ()
    at_each_end = _parse_ends(high_precision_layers, auto=AUTO_LAYERS, most=num_attention_layers)
    if at_each_end == 0 and pair in _PAIR_NAMES:
        at_each_end = auto_high_precision_layers(_PAIR_NAMES[pair], num_attention_layers)
    return boundary_layers(num_attention_layers, at_each_end)


def source_pair(k: str = "", v: str = "") -> Pair:
    """The pair of the source's two format settings; empty text is its default, q8_0 and q5_1.

    It takes q8_0 or fp8 for K and q5_1, q4_0 or fp8 for V; FormatError for anything else.
    """
    for side, name, known in (("K", k, ("q8_0", "fp8")), ("V", v, ("q5_1", "q4_0", "fp8"))):
        if name and name not in known:
            raise FormatError(
                f"--kv-policy source: {name[:64]!r} is no {side} format of the source",
                f"known: {', '.join(known)}",
            )
    return parse_pair(f"{k or 'q8_0'}:{v or 'q5_1'}")


def _default_ends(value: str | int, kv: Pair, most: int) -> int:
    coarse = any(side.family in (Family.NVFP4, Family.TURBO) for side in (kv.k, kv.v))
    return _parse_ends(value, auto=AUTO_LAYERS if coarse else 0, most=most)


def _parse_ends(value: str | int, *, auto: int, most: int) -> int:
    """Layers at each end: a number, ``auto``, or ``max`` (also ``all``); any case, trimmed."""
    text = str(value).strip().lower()
    if text == "auto":
        return auto
    if text in ("max", "all"):
        return most
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ConfigError(
            f"--high-precision-layers: {text[:64]!r} is no number of layers",
            "use a number from 0, auto or max",
        )
    return int(text)


def _check_head_sizes(layers: Sequence[LayerGeometry], pairs: Sequence[Pair]) -> None:
    for index, (layer, pair) in enumerate(zip(layers, pairs, strict=True)):
        if layer.kind not in _ROW_KINDS:
            continue
        for fmt, (heads, head_size) in ((pair.k, layer.key_row), (pair.v, layer.value_row)):
            if not heads:
                continue
            try:
                fmt.check_head_size(head_size)
            except FormatError as error:
                raise FormatError(f"layer {index}: {error.message}", error.hint) from None
