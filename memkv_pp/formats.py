"""The catalogue of cache formats: how many bytes a group of elements takes, and what it is called.

A format stores elements in groups; a group is some bytes of codes and some bytes of scales:

==========  =====  =====  ======  =========  ==========================================
name        group  codes  scales  bits/elem  head sizes
==========  =====  =====  ======  =========  ==========================================
f32             1      4       0         32  any
f16, bf16       1      2       0         16  any
fp8             1      1       0          8  any (E4M3; one f32 scale per layer and side)
q8_0           32     32       2        8.5  multiples of 32
q5_1           32     20       4          6  multiples of 32
q5_0           32     20       2        5.5  multiples of 32
q4_1           32     16       4          5  multiples of 32
q4_0           32     16       2        4.5  multiples of 32
nvfp4          16      8       1        4.5  multiples of 16
turbo8         16     16       2          9  powers of two, 64 to 512 (rotated)
turbo4         16      8       1        4.5  as turbo8
turbo3         16      6       1        3.5  as turbo8
turbo2         16      4       1        2.5  as turbo8
==========  =====  =====  ======  =========  ==========================================

The ggml rows are ggml's block types; the others follow ``paged-cache-and-swap.md`` 1.1 and 1.2.
A suffix ``e`` on nvfp4 and the turbo formats adds one power-of-two exponent byte per record,
layer, side and KV head. How a group is packed is ``packing.py``, how a head is rotated
``rotation.py``.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from memkv_pp.errors import FormatError

ROTATED_SIZES = (64, 128, 256, 512)


class Family(StrEnum):
    """What a format's head size must be, and how its groups are packed."""

    PLAIN = "plain"
    SCALED = "scaled"
    GGML = "ggml"
    NVFP4 = "nvfp4"
    TURBO = "turbo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One side's storage: ``group`` elements take ``code_bytes`` and ``scale_bytes``."""

    name: str
    family: Family
    group: int
    code_bytes: int
    scale_bytes: int
    exponent: bool = False

    @property
    def rotated(self) -> bool:
        """Whether rows are rotated (Walsh-Hadamard) before they are packed."""
        return self.family is Family.TURBO

    @property
    def group_bytes(self) -> int:
        """Bytes of one group, codes and scales."""
        return self.code_bytes + self.scale_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits, scales included and exponent bytes not."""
        return 8 * self.group_bytes / self.group

    def row_bytes(self, head_size: int) -> int:
        """Bytes of one token of one head, unpadded; FormatError if the format cannot hold it."""
        self.check_head_size(head_size)
        return head_size // self.group * self.group_bytes

    def code_row_bytes(self, head_size: int) -> int:
        """The part of ``row_bytes`` that holds codes."""
        return head_size // self.group * self.code_bytes

    def scale_row_bytes(self, head_size: int) -> int:
        """The part of ``row_bytes`` that holds scales."""
        return head_size // self.group * self.scale_bytes

    def check_head_size(self, head_size: int) -> None:
        """Raise FormatError, naming the format and the size, for a head it cannot hold."""
        if self.rotated:
            if head_size not in ROTATED_SIZES:
                raise FormatError(
                    f"{self.name} cannot hold a head size of {head_size}: a rotated format needs"
                    " a power of two from 64 to 512",
                    "choose another --kv format for this layer, such as q8_0 or bf16",
                )
        elif head_size <= 0 or head_size % self.group:
            raise FormatError(
                f"{self.name} cannot hold a head size of {head_size}: it is no positive multiple"
                f" of {self.group}",
                "choose f32, f16, bf16 or fp8, which hold any head size",
            )


def _format(name: str, family: Family, group: int, code_bytes: int, scale_bytes: int) -> Format:
    return Format(
        name=name, family=family, group=group, code_bytes=code_bytes, scale_bytes=scale_bytes
    )


_BASE = (
    _format("f32", Family.PLAIN, 1, 4, 0),
    _format("f16", Family.PLAIN, 1, 2, 0),
    _format("bf16", Family.PLAIN, 1, 2, 0),
    _format("fp8", Family.SCALED, 1, 1, 0),
    _format("q8_0", Family.GGML, 32, 32, 2),
    _format("q5_1", Family.GGML, 32, 20, 4),
    _format("q5_0", Family.GGML, 32, 20, 2),
    _format("q4_1", Family.GGML, 32, 16, 4),
    _format("q4_0", Family.GGML, 32, 16, 2),
    _format("nvfp4", Family.NVFP4, 16, 8, 1),
    _format("turbo8", Family.TURBO, 16, 16, 2),
    _format("turbo4", Family.TURBO, 16, 8, 1),
    _format("turbo3", Family.TURBO, 16, 6, 1),
    _format("turbo2", Family.TURBO, 16, 4, 1),
)

FORMATS: dict[str, Format] = {f.name: f for f in _BASE} | {
    f.name + "e": replace(f, name=f.name + "e", exponent=True)
    for f in _BASE
    if f.family in (Family.NVFP4, Family.TURBO)
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The formats of K and V of a layer; written ``K:V``."""

    k: Format
    v: Format

    def __str__(self) -> str:
        return f"{self.k.name}:{self.v.name}"


# The sixteen names of `paged-cache-and-swap.md` 1.1; a symmetric name is its own format.
SOURCE_NAMES: dict[str, tuple[str, str]] = {
    name: (name, name)
    for name in ("bf16", "fp8", "nvfp4", "turbo8", "turbo4", "turbo3", "turbo2")
} | {
    f"{k}k_{v}v": (k, v)
    for k, v in (
        ("turbo4", "turbo3"), ("turbo4", "turbo8"), ("turbo3", "turbo8"),
        ("bf16", "turbo4"), ("bf16", "turbo3"), ("bf16", "turbo2"),
        ("fp8", "turbo4"), ("fp8", "turbo3"), ("fp8", "turbo2"),
    )
}  # fmt: skip

ALIASES: dict[str, str] = {
    name.replace("k_turbo", "k"): name for name in SOURCE_NAMES if "k_turbo" in name
}


def parse_format(name: str) -> Format:
    """The format called ``name`` (any case); FormatError lists the names there are."""
    found = FORMATS.get(name.strip().lower())
    if found is None:
        raise FormatError(f"--kv: unknown format {name[:64]!r}", f"known: {', '.join(FORMATS)}")
    return found


def parse_pair(text: str) -> Pair:
    """A pair from ``K:V``, one format for both sides, a source name or its alias.

    >>> str(parse_pair("q8_0:q5_1")), str(parse_pair("turbo4k3v")), str(parse_pair("bf16"))
    ('q8_0:q5_1', 'turbo4:turbo3', 'bf16:bf16')
    """
    name = text.strip().lower()
    name = ALIASES.get(name, name)
    if name in SOURCE_NAMES:
        k, v = SOURCE_NAMES[name]
        return Pair(parse_format(k), parse_format(v))
    sides = name.split(":")
    if len(sides) > 2:
        raise FormatError(f"--kv: {text[:64]!r} is no pair", "write K:V, as in q8_0:q5_1")
    return Pair(parse_format(sides[0]), parse_format(sides[-1]))


DEFAULT_PAIR = parse_pair("q8_0:q5_1")
