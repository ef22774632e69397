"""The fp8 cache scales of a Hugging Face folder, and which of them a pipeline uses.

The names that count, under ``model.layers.N.self_attn.``, for K (V alike)::

    k_scale              compressed-tensors, vLLM
    attn.k_scale         vLLM's own modules
    k_proj.k_scale       ModelOpt
    qkv_proj.k_scale     ModelOpt, fused projections
    k_proj.output_scale  compressed-tensors before it had k_scale
    kv_scale             one scale for both sides, AutoFP8

Each holds one number, and all mean the same: the cache stores ``x / scale``. What config.json and
hf_quant_config.json say of the cache must be static symmetric E4M3 with one scale per tensor
(``kv_cache_scheme``; ModelOpt's ``kv_cache_quant_algo``): scales of any other scheme mean something
else. A GGUF file has none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memkv_pp.errors import ConfigError, ModelError
from memkv_pp.formats import Pair
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales, fp8_sides
from memkv_pp.model.weights import WeightSource, open_weights
from memkv_pp.packing import fp8_reciprocal

_NAMES = {
    side: (
        f"{side}_scale",
        f"attn.{side}_scale",
        f"{side}_proj.{side}_scale",
        f"qkv_proj.{side}_scale",
        f"{side}_proj.output_scale",
        "kv_scale",
    )
    for side in ("k", "v")
}
SCALE_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.("
    + "|".join(re.escape(name) for name in sorted({*_NAMES["k"], *_NAMES["v"]}))
    + ")"
)
"""A tensor that holds a cache scale: (layer, name within the attention module)."""

_CALIBRATE = re.compile(r"calibrate:([1-9][0-9]{0,8})")


def choose_fp8_scales(
    choice: str | None,
    path: Path,
    formats: Sequence[Pair],
    source: WeightSource | None = None,
) -> Fp8Scales:
    """What ``--fp8-scales`` asks for, for the trunk layers whose formats are ``formats``.

    ``checkpoint``: the scales of the folder at ``path``, ModelError where an fp8 side has none.
    ``calibrate:N``: from the first N rows of each side. ``one``: 1.0. None: the checkpoint's where it
    has one, else 1.0. ``source`` is the weights, by default the files at ``path``. ConfigError for
    another text; nothing is read where no side is fp8. Errors as ``checkpoint_scales``.
    """
    calibrate = _CALIBRATE.fullmatch(choice or "")
    if choice not in (None, "checkpoint", "one") and calibrate is None:
        raise ConfigError(
            f"--fp8-scales: {choice[:64]!r} says nowhere to take scales from",
            "write checkpoint, one, or calibrate:N with N rows from 1",
        )
    sides = fp8_sides(formats)
    if not sides or choice == "one":
        return UNIT_SCALES
    if calibrate is not None:
        return Fp8Scales(calibration_rows=int(calibrate[1]))
    found = checkpoint_scales(path, source)
    for layer, side in sides if choice == "checkpoint" else ():
        if (layer, side) not in found:
            raise ModelError(
                f"--fp8-scales checkpoint: {path} has no {side.upper()} scale for layer {layer}",
                f"a tensor model.layers.{layer}.self_attn.{side}_scale is needed; or use"
                " calibrate:N or one",
            )
    used = {key: found[key] for key in sides if key in found}
    if not used:
        return UNIT_SCALES
    return Fp8Scales(
        layers=tuple(
            (used.get((layer, "k"), 1.0), used.get((layer, "v"), 1.0))
            for layer in range(len(formats))
        )
    )


def checkpoint_scales(
    path: Path, source: WeightSource | None = None
) -> dict[tuple[int, str], float]:
    """Every cache scale at ``path``, by absolute layer and ``k`` or ``v``; empty for a GGUF file.

    ModelError naming the tensor for a scale that is no single number, not positive and finite, or
    that another name contradicts, and naming the setting for a cache scheme that is not E4M3's.
    """
    if not path.is_dir():
        return {}
    weights = open_weights(path) if source is None else source
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name in sorted(weights.names()):
        match = SCALE_NAME.fullmatch(name)
        if match is None:
            continue
        value = _one_scale(path, name, weights)
        for side in ("k", "v"):
            if match[2] not in _NAMES[side]:
                continue
            other, known = found.setdefault((int(match[1]), side), (name, value))
            if known != value:
                raise ModelError(
                    f"{path}: {name} is {value}, but {other} of the same cache is {known}",
                    "keep one of the two, or use --fp8-scales one or calibrate:N",
                )
    if found:
        _check_scheme(path)
    return {key: value for key, (_, value) in found.items()}


def quantises_only_the_cache(quantization: object) -> bool:
    """Whether a ``quantization_config`` leaves every weight plain.

    So it does where it names no group of weights and no algorithm for them, as compressed-tensors
    and ModelOpt write it for a checkpoint of which only the cache was calibrated.
    """
    if not isinstance(quantization, Mapping):
        return False
    known = quantization.get("quant_method") in ("compressed-tensors", "modelopt")
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    weights = quantization.get("config_groups") or quantization.get("quant_algo")
    return known and bool(scheme) and not weights


def _one_scale(path: Path, name: str, weights: WeightSource) -> float:
    tensor = weights.tensor(name, torch.float32)
    if tensor.numel() != 1:
        raise ModelError(
            f"{path}: {name} has shape {tuple(tensor.shape)}: fp8 has one scale per layer and side",
            "recalibrate per tensor, or use --fp8-scales one or calibrate:N",
        )
    value = float(tensor)
    try:
        fp8_reciprocal(value)
    except ConfigError as error:
        raise ModelError(
            f"{path}: {name} is {value}, not positive and finite with a finite reciprocal",
            "use --fp8-scales one or calibrate:N",
        ) from error
    return value


def _check_scheme(path: Path) -> None:
    """ModelError where the folder says that its cache scales are not E4M3's."""
    config = _json(path / "config.json").get("quantization_config") or {}
    sidecar = _json(path / "hf_quant_config.json").get("quantization") or {}
    scheme = config.get("kv_cache_scheme") or {}
    wrong = {
        f"kv_cache_scheme.{key}": scheme[key]
        for key, good in (
            ("num_bits", (8,)),
            ("type", ("float",)),
            ("strategy", (None, "tensor")),
            ("dynamic", (None, False)),
            ("symmetric", (None, True)),
        )
        if key in scheme and scheme[key] not in good
    }
    for said in (config, sidecar):
        algorithm = said.get("kv_cache_quant_algo")
        if algorithm not in (None, "FP8"):
            wrong["kv_cache_quant_algo"] = algorithm
    if wrong:
        stated = ", ".join(f"{key} = {value!r}" for key, value in wrong.items())
        raise ModelError(
            f"{path}: its cache scales are not for E4M3 with one scale per tensor: {stated}",
            "use --fp8-scales one or calibrate:N",
        )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
