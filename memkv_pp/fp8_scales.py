"""The scales of ``fp8`` caches: one f32 per layer and side, and where they come from.

``fp8`` stores ``x / scale`` as E4M3, whose largest number is 448 (OCP 8-bit Floating Point
Specification, E4M3): anything beyond ``448 * scale`` is stored as that. A scale is the largest
magnitude a side will hold, divided by 448: that of a checkpoint was measured on its author's
data, a calibrated one is measured on the first rows a side is given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.errors import ConfigError
from memkv_pp.formats import Pair
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.small_floats import to_f32

E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Scales:
    """(K, V) scales by absolute trunk layer; a layer beyond ``layers`` has (1.0, 1.0).

    ``calibration_rows`` above 0: every fp8 side takes its own from so many of its first rows
    instead (``cache/fp8_scale.py``). Scales of other formats are never used. ConfigError for a scale
    that cannot scale, or both ways at once.
    """

    layers: tuple[tuple[float, float], ...] = ()
    calibration_rows: int = 0

    def __post_init__(self) -> None:
        if self.calibration_rows < 0 or (self.layers and self.calibration_rows):
            raise ConfigError(
                f"--fp8-scales: {len(self.layers)} layers with scales and calibration on"
                f" {self.calibration_rows} rows",
                "give scales or calibrate, on at least one row",
            )
        for sides in self.layers:
            for scale in sides:
                fp8_reciprocal(scale)

    def of_layer(self, layer: int) -> tuple[float, float]:
        """(K, V) scales of an absolute trunk layer."""
        return self.layers[layer] if layer < len(self.layers) else (1.0, 1.0)


UNIT_SCALES = Fp8Scales()


def calibrated_scale(largest: float) -> float:
    """The f32 scale that puts ``largest`` at E4M3's 448; 1.0 for zero, tiny, infinite or NaN.

    >>> calibrated_scale(896.0)
    2.0
    """
    scale = to_f32(largest / E4M3_MAX) if math.isfinite(largest) else math.inf
    try:
        fp8_reciprocal(scale)
    except ConfigError:
        return 1.0
    return scale


def fp8_sides(formats: Sequence[Pair]) -> tuple[tuple[int, str], ...]:
    """(layer, ``k`` or ``v``) of every side of ``formats`` that is fp8."""
    return tuple(
        (layer, side)
        for layer, pair in enumerate(formats)
        for side, fmt in (("k", pair.k), ("v", pair.v))
        if fmt.name == "fp8"
    )
