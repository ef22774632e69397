"""What one layer stores, and what a model is to the cache.

A description knows its own size in *elements*; ``formats.py`` turns elements into bytes and
``sizing.py`` is the only place that adds them up. Reading metadata files is ``model/``.
"""

from dataclasses import dataclass
from enum import StrEnum

from memkv_pp.errors import GeometryError


class LayerKind(StrEnum):
    """What a layer keeps between tokens."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LATENT = "latent_attention"
    RECURRENT = "recurrent"
    SHORT_CONV = "short_conv"
    SHARED = "shared_kv"

    @property
    def grows(self) -> bool:
        """Whether it takes room in full records, one row per token."""
        return self in (LayerKind.FULL, LayerKind.LATENT)

    @property
    def has_state(self) -> bool:
        """Whether it takes room in state slots, the same for any number of tokens."""
        return self in (LayerKind.RECURRENT, LayerKind.SHORT_CONV)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGeometry:
    """One layer. Fields that do not belong to its kind are 0.

    full and sliding attention: ``kv_heads`` rows of ``key_head_size`` and ``value_head_size``
    elements per token. Latent attention: one row of ``latent_size + rope_size`` elements, of
    which V is the first ``latent_size`` (no V side). Recurrent: a convolution state of
    ``conv_channels * (conv_kernel - 1)`` and a matrix state of ``state_elements``, both f32
    (``dual-cache-and-pipeline.md`` 1.5). Short convolution: the convolution state alone.
    Shared: nothing of its own; it reads ``source_layer``.
    """

    kind: LayerKind
    query_heads: int = 0
    kv_heads: int = 0
    key_head_size: int = 0
    value_head_size: int = 0
    window: int = 0
    latent_size: int = 0
    rope_size: int = 0
    conv_channels: int = 0
    conv_kernel: int = 0
    state_elements: int = 0
    source_layer: int = -1
    weight_elements: int = 0

    def __post_init__(self) -> None:
        for name in _NEEDED[self.kind]:
            if getattr(self, name) <= 0:
                raise GeometryError(
                    f"{self.kind}: {name} must be positive, got {getattr(self, name)}"
                )
        if self.kind is LayerKind.SHARED and self.source_layer < 0:
            raise GeometryError("shared_kv: source_layer is missing")

    @property
    def conv_elements(self) -> int:
        """f32 elements of the convolution state."""
        return self.conv_channels * max(self.conv_kernel - 1, 0)

    @property
    def key_row(self) -> tuple[int, int]:
        """(heads, elements per head) of one token's K side; (1, width) for latent attention."""
        if self.kind is LayerKind.LATENT:
            return 1, self.latent_size + self.rope_size
        return self.kv_heads, self.key_head_size

    @property
    def value_row(self) -> tuple[int, int]:
        """(heads, elements per head) of one token's V side; (0, 0) for latent attention."""
        if self.kind is LayerKind.LATENT:
            return 0, 0
        return self.kv_heads, self.value_head_size


_ATTENTION = ("kv_heads", "key_head_size", "value_head_size")
_NEEDED: dict[LayerKind, tuple[str, ...]] = {
    LayerKind.FULL: _ATTENTION,
    LayerKind.SLIDING: (*_ATTENTION, "window"),
    LayerKind.LATENT: ("latent_size",),
    LayerKind.RECURRENT: ("conv_channels", "conv_kernel", "state_elements"),
    LayerKind.SHORT_CONV: ("conv_channels", "conv_kernel"),
    LayerKind.SHARED: (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGeometry:
    """A model, as far as caches and fences care.

    ``layers`` is the trunk; ``nextn_layers`` are the NextN/MTP blocks behind it, which belong
    to the last stage and are charged only when drafting uses them. ``file_bytes_by_layer`` (when
    a weight file was read) aligns with ``layers``. ``default_kv`` is the pair this model is served
    with where nobody says another, written as ``--kv`` takes it; empty where the model has none.
    ``feed_forward_size``: elements of the widest feed-forward row, the experts that a row uses
    together. ``warnings`` says what had to be assumed.
    """

    name: str
    family: str
    layers: tuple[LayerGeometry, ...]
    nextn_layers: tuple[LayerGeometry, ...] = ()
    context_tokens: int = 0
    hidden_size: int = 0
    feed_forward_size: int = 0
    vocabulary_size: int = 0
    embedding_elements: int = 0
    head_elements: int = 0
    norm_elements: int = 0
    tied_embedding: bool = False
    embedding_file_bytes: int = 0
    head_file_bytes: int = 0
    file_bytes_by_layer: tuple[int, ...] = ()
    default_kv: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise GeometryError(f"{self.name}: a model needs at least one layer")
        for index, layer in enumerate(self.layers):
            if layer.kind is LayerKind.SHARED:
                source = layer.source_layer
                if source >= index or self.layers[source].kind is LayerKind.SHARED:
                    raise GeometryError(
                        f"{self.name}: layer {index} shares the cache of layer {source},"
                        " which must come before it and own a cache"
                    )
        if self.file_bytes_by_layer and len(self.file_bytes_by_layer) != len(self.layers):
            raise GeometryError(f"{self.name}: file_bytes_by_layer does not match the layers")

    @property
    def num_layers(self) -> int:
        """Trunk layers."""
        return len(self.layers)

    def shared_edges(self) -> tuple[tuple[int, int], ...]:
        """(source, reader) for every shared layer: a cut may not part them."""
        return tuple(
            (layer.source_layer, index)
            for index, layer in enumerate(self.layers)
            if layer.kind is LayerKind.SHARED
        )


def uniform_geometry(
    num_layers: int, *, kv_heads: int, head_size: int, name: str = "uniform"
) -> ModelGeometry:
    """A model of ``num_layers`` equal full-attention layers, for arithmetic and tests."""
    layer = LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=kv_heads,
        kv_heads=kv_heads,
        key_head_size=head_size,
        value_head_size=head_size,
    )
    return ModelGeometry(name=name, family="uniform", layers=(layer,) * num_layers)
