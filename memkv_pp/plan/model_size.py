"""One sequence on one unsplit stage, layer by layer: the figures of ``size``."""

from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.records import RecordLayout, StateLayout
from memkv_pp.rings import resident_rows
from memkv_pp.sizing import (
    CacheOptions,
    StageSizing,
    layer_bytes_per_token,
    layer_context_bytes,
    size_layers,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """One layer's row; the field names are the contract's keys (CLI.md).

    A format is None where the layer stores no such side. ``context_bytes`` counts live rows,
    ``allocated_bytes`` what the runtime takes; a record's or slot's padding at its end counts
    with its last layer, so that the layers add up to the stage.
    """

    layer: int
    kind: str
    k_format: str | None
    v_format: str | None
    k_bytes_per_token: int
    v_bytes_per_token: int
    context_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The answer of ``size``; the field names are the contract's keys (CLI.md)."""

    model: str
    context_tokens: int
    total_bytes: int
    bytes_per_token: int
    ring_bytes_per_token: int
    ring_rows: int
    bytes_per_sequence: int
    layers: tuple[LayerSize, ...]


def size_model(
    geometry: ModelGeometry, formats: Sequence[Pair], options: CacheOptions, tokens: int
) -> ModelSize:
    """Size one sequence of ``tokens``. NextN layers count while ``options.spec_tokens`` is not 0."""
    with_nextn = options.spec_tokens > 0
    sizing = size_layers(
        geometry, formats, range(geometry.num_layers), options, with_nextn=with_nextn
    )
    allocated = _allocated(sizing, tokens)
    stored = (*geometry.layers, *geometry.nextn_layers) if with_nextn else geometry.layers
    layers: list[LayerSize] = []
    for index, layer in enumerate(stored):
        pair = formats[index]
        k, v = layer_bytes_per_token(layer, pair)
        layers.append(
            LayerSize(
                layer=index,
                kind=layer.kind.value,
                k_format=pair.k.name if k else None,
                v_format=pair.v.name if v else None,
                k_bytes_per_token=k,
                v_bytes_per_token=v,
                context_bytes=layer_context_bytes(layer, pair, tokens),
                allocated_bytes=allocated.get(index, 0),
            )
        )
    return ModelSize(
        model=geometry.name,
        context_tokens=tokens,
        total_bytes=sum(layer.context_bytes for layer in layers),
        bytes_per_token=sizing.bytes_per_token,
        ring_bytes_per_token=sizing.ring_bytes_per_token,
        ring_rows=resident_rows(tokens, sizing.ring_rows),
        bytes_per_sequence=sizing.bytes_per_sequence,
        layers=tuple(layers),
    )


def _allocated(sizing: StageSizing, tokens: int) -> dict[int, int]:
    units = sizing.footprint(tokens)
    return (
        {layer: units.full_records * size for layer, size in _spans(sizing.full).items()}
        | {layer: units.window_records * size for layer, size in _spans(sizing.window).items()}
        | {layer: units.state_slots * size for layer, size in _slot_spans(sizing.state).items()}
    )


def _spans(record: RecordLayout | None) -> dict[int, int]:
    """Bytes from each layer's start to the next one's in a record."""
    if record is None:
        return {}
    starts = [layer.k.codes.offset for layer in record.layers]
    ends = [*starts[1:], record.record_bytes]
    return {
        laid.layer: end - start
        for laid, start, end in zip(record.layers, starts, ends, strict=True)
    }


def _slot_spans(slot: StateLayout | None) -> dict[int, int]:
    """The same in a state slot."""
    if slot is None:
        return {}
    starts = [layer.conv_offset for layer in slot.layers]
    ends = [*starts[1:], slot.slot_bytes]
    return {
        laid.layer: end - start for laid, start, end in zip(slot.layers, starts, ends, strict=True)
    }
