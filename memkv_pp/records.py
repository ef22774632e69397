"""The layout of a record and of a state slot: offsets and strides, in bytes.

A record holds ``rows`` tokens of the attention layers of a stage::

    record   | layer a                                  | layer b …           | pad to 256
    layer    | K codes | K scales | K exps | V codes | V scales | V exps |
    part     [head][row] of row_bytes each, starting at a multiple of 16

Without padding these are exactly the bytes of ``formats.py``. A state slot holds, per recurrent
layer, the f32 convolution state and then the f32 matrix state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.formats import Format, Pair
from memkv_pp.geometry import LayerGeometry, LayerKind
from memkv_pp.units import align_up

PART_ALIGNMENT = 16
RECORD_ALIGNMENT = 256
FLAT_TAIL_BYTES = 8
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """``heads * rows`` rows of ``row_bytes``, at ``offset`` in the record; none if row_bytes is 0."""

    offset: int
    heads: int
    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, unpadded."""
        return self.heads * self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of one layer in a record."""

    format: Format
    heads: int
    head_size: int
    codes: Part
    scales: Part
    exponents: Part


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where one layer's rows lie in a record; ``v`` is None for latent attention."""

    layer: int
    k: Side
    v: Side | None


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """A record of ``rows`` tokens: ``record_bytes`` apart, of which ``payload_bytes`` hold data."""

    rows: int
    layers: tuple[LayerLayout, ...]
    payload_bytes: int
    record_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of a record that hold no data."""
        return self.record_bytes - self.payload_bytes


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Offsets of one recurrent layer's states in a slot, and their f32 elements."""

    layer: int
    conv_offset: int
    conv_elements: int
    state_offset: int
    state_elements: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A slot: one copy of every recurrent layer's state on a stage."""

    layers: tuple[StateLayer, ...]
    payload_bytes: int
    slot_bytes: int


StoredLayer = tuple[int, LayerGeometry, Pair]


def record_layout(
    layers: Sequence[StoredLayer], rows: int, *, tail_bytes: int = 0
) -> RecordLayout | None:
    """Lay ``layers`` (absolute index, geometry, formats) out; None if there is none.

    ``tail_bytes`` follow each side (8 in the flat layout, as the source has them).
    """
    if not layers:
        return None
    offset = payload = 0
    laid: list[LayerLayout] = []
    for index, layer, pair in layers:
        k, offset, size = _side(pair.k, *layer.key_row, rows, offset, tail_bytes)
        payload += size
        v = None
        if layer.kind is not LayerKind.LATENT:
            v, offset, size = _side(pair.v, *layer.value_row, rows, offset, tail_bytes)
            payload += size
        laid.append(LayerLayout(index, k, v))
    return RecordLayout(rows, tuple(laid), payload, align_up(offset, RECORD_ALIGNMENT))


def _side(
    fmt: Format, heads: int, head_size: int, rows: int, offset: int, tail_bytes: int
) -> tuple[Side, int, int]:
    fmt.check_head_size(head_size)
    codes = Part(offset, heads, rows, fmt.code_row_bytes(head_size))
    offset = align_up(offset + codes.num_bytes, PART_ALIGNMENT)
    scales = Part(offset, heads, rows, fmt.scale_row_bytes(head_size))
    offset = align_up(offset + scales.num_bytes, PART_ALIGNMENT)
    exponents = Part(offset, heads, 1, 1 if fmt.exponent else 0)
    offset = align_up(offset + exponents.num_bytes + tail_bytes, PART_ALIGNMENT)
    size = codes.num_bytes + scales.num_bytes + exponents.num_bytes
    return Side(fmt, heads, head_size, codes, scales, exponents), offset, size


def state_layout(layers: Sequence[tuple[int, LayerGeometry]]) -> StateLayout | None:
    """Lay the states of recurrent ``layers`` out in a slot; None if there is none."""
    if not layers:
        return None
    offset = payload = 0
    laid: list[StateLayer] = []
    for index, layer in layers:
        conv_offset = offset
        offset = align_up(offset + layer.conv_elements * F32_BYTES, PART_ALIGNMENT)
        laid.append(
            StateLayer(index, conv_offset, layer.conv_elements, offset, layer.state_elements)
        )
        offset = align_up(offset + layer.state_elements * F32_BYTES, PART_ALIGNMENT)
        payload += (layer.conv_elements + layer.state_elements) * F32_BYTES
    return StateLayout(tuple(laid), payload, align_up(offset, RECORD_ALIGNMENT))
