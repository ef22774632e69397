"""Names for the integers that must not be mixed, and sizes in bytes as text."""

import re
from fractions import Fraction
from typing import NewType

from memkv_pp.errors import ConfigError

StageIndex = NewType("StageIndex", int)
LayerIndex = NewType("LayerIndex", int)
RecordId = NewType("RecordId", int)
RequestId = NewType("RequestId", int)

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str, knob: str = "size") -> int:
    """Bytes named by ``24GiB``, ``1.5GB``, ``800MiB`` or plain digits; fractions round down.

    Raises ConfigError naming ``knob`` for anything else.

    >>> parse_size("3.18GiB"), parse_size("1.5GB"), parse_size("17")
    (3414499000, 1500000000, 17)
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or len(text) > 64:
        raise ConfigError(
            f"{knob}: {text[:64]!r} is no size", "write 24GiB, 1.5GB, 800MiB or plain bytes"
        )
    return int(Fraction(match.group(1)) * factor)


def format_size(num_bytes: int) -> str:
    """A size for people, three significant figures: ``1.50 GiB``."""
    for factor, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.2f} {name}"
    return f"{num_bytes} B"


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up, for non-negative values."""
    return -(-value // divisor)


def align_up(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not below ``value``."""
    return ceil_div(value, alignment) * alignment
