"""A model's geometry from a GGUF header.

``block_count`` includes the NextN blocks: ``trunk = block_count - nextn_predict_layers``. Keys are
``dual-cache-and-pipeline.md`` 1 and 3; where a key is missing, the family's rule is assumed and a
warning says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.errors import GeometryError
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.model.figures import Figures
from memkv_pp.model.gguf_header import GGUFHeader
from memkv_pp.model.gguf_weights import EMBEDDING, read_weights
from memkv_pp.model.patterns import (
    CANONICAL,
    GATED_DELTA,
    GATED_DELTA_INTERVAL,
    at_interval,
    gated_delta,
    implied_sliding,
    refuse_family,
    share_tail,
    state_space,
    with_weights,
)

# What a gemma4 file means by leaving a key out (`dual-cache-and-pipeline.md` 1.6)
_GEMMA4_DEFAULTS = {
    "attention.sliding_window": 1024,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
}


def geometry_from_header(header: GGUFHeader, name: str) -> ModelGeometry:
    """Describe the model of ``header``; ``name`` is for people and messages.

    Raises GeometryError naming the key for metadata that is missing, of a wrong type or length, or
    that describes a model this cache cannot hold.
    """
    architecture = header.architecture
    refuse_family(name, architecture)
    family = CANONICAL.get(architecture, architecture)
    figures = Figures(
        name, header.metadata, prefix=architecture + ".", unread=_unread_keys(header, architecture)
    )
    shape = _read_shape(figures, family)
    layers = [_layer(figures, shape, index) for index in range(shape.num_blocks)]
    trunk = share_tail(
        name, layers[: shape.num_trunk], figures.integer("attention.shared_kv_layers", 0)
    )
    weights = read_weights(figures, header, shape.num_blocks)
    every = with_weights([*trunk, *layers[shape.num_trunk :]], weights.block_elements)
    _warn_about_what_is_not_counted(figures)
    return ModelGeometry(
        name=name,
        family=family,
        layers=tuple(every[: shape.num_trunk]),
        nextn_layers=tuple(every[shape.num_trunk :]),
        context_tokens=figures.integer("context_length", 0),
        hidden_size=shape.hidden_size,
        feed_forward_size=_feed_forward_size(figures, shape),
        vocabulary_size=_vocabulary_size(figures, header),
        embedding_elements=weights.embedding_elements,
        head_elements=weights.head_elements,
        norm_elements=weights.norm_elements,
        tied_embedding=weights.embedding_elements > 0 and weights.head_elements == 0,
        embedding_file_bytes=weights.embedding_file_bytes,
        head_file_bytes=weights.head_file_bytes,
        file_bytes_by_layer=weights.block_file_bytes[: shape.num_trunk],
        warnings=tuple(figures.warnings),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Per-block figures, NextN blocks included."""

    family: str
    num_blocks: int
    num_trunk: int
    hidden_size: int
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    recurrent: tuple[bool, ...]
    sliding: tuple[bool, ...]
    window: int
    key_size: int
    value_size: int
    key_size_sliding: int
    value_size_sliding: int


def _read_shape(figures: Figures, family: str) -> _Shape:
    num_blocks = figures.layer_count("block_count")
    num_nextn = figures.integer("nextn_predict_layers", 0)
    if num_nextn >= num_blocks:
        figures.fail("nextn_predict_layers", f"is {num_nextn} of {num_blocks} blocks")
    num_trunk = num_blocks - num_nextn
    query = figures.per_layer("attention.head_count", num_blocks, num_extra=num_nextn, default=0)
    kv = (
        figures.per_layer("attention.head_count_kv", num_blocks, num_extra=num_nextn)
        if figures.has("attention.head_count_kv")
        else query
    )
    # A NextN block attends with the model's heads, whatever the pattern says at its index.
    kv = kv[:num_trunk] + tuple(heads or max(kv) for heads in kv[num_trunk:])
    hidden_size = figures.integer("embedding_length", least=1)
    attends = max(kv) > 0 and not figures.has("attention.kv_lora_rank")
    sizes = _head_sizes(figures, family, hidden_size, max(query)) if attends else (0, 0, 0, 0)
    window = figures.integer(
        "attention.sliding_window", _default(figures, family, "attention.sliding_window", 0)
    )
    return _Shape(
        family=family,
        num_blocks=num_blocks,
        num_trunk=num_trunk,
        hidden_size=hidden_size,
        query_heads=query,
        kv_heads=kv,
        recurrent=_recurrent(figures, family, kv, num_trunk),
        sliding=_sliding(figures, family, num_blocks, num_trunk, window),
        window=window,
        key_size=sizes[0],
        value_size=sizes[1],
        key_size_sliding=sizes[2],
        value_size_sliding=sizes[3],
    )


def _feed_forward_size(figures: Figures, shape: _Shape) -> int:
    """Elements of the widest feed-forward row, the experts that a row uses together; 0 if unsaid."""
    num_nextn = shape.num_blocks - shape.num_trunk
    dense = max(
        figures.per_layer("feed_forward_length", shape.num_blocks, num_extra=num_nextn, default=0)
    )
    used = figures.integer("expert_used_count", 0)
    expert = figures.integer("expert_feed_forward_length", dense)
    shared = figures.integer("expert_shared_feed_forward_length", 0)
    return max(dense, used * expert + shared) if used else dense


def _default(figures: Figures, family: str, key: str, otherwise: int) -> int:
    if family != "gemma4" or figures.has(key) or key not in _GEMMA4_DEFAULTS:
        return otherwise
    figures.warn(f"{figures.prefix}{key} is missing; assumed {_GEMMA4_DEFAULTS[key]}")
    return _GEMMA4_DEFAULTS[key]


def _head_sizes(
    figures: Figures, family: str, hidden_size: int, query_heads: int
) -> tuple[int, int, int, int]:
    """(key, value, sliding key, sliding value) elements per head."""
    found: list[int] = []
    for key in ("attention.key_length", "attention.value_length"):
        size = figures.integer(key, _default(figures, family, key, 0))
        if size == 0:
            if query_heads == 0 or hidden_size % query_heads:
                figures.fail(
                    key,
                    f"is missing, and embedding_length {hidden_size} is no multiple of"
                    f" {query_heads} heads",
                )
            size = hidden_size // query_heads
            figures.warn(
                f"{figures.prefix}{key} is missing; assumed embedding_length / head_count = {size}"
            )
        found.append(size)
    for key, full in zip(
        ("attention.key_length_swa", "attention.value_length_swa"), tuple(found), strict=True
    ):
        found.append(figures.integer(key, _default(figures, family, key, full)))
    return found[0], found[1], found[2], found[3]


def _recurrent(
    figures: Figures, family: str, kv_heads: Sequence[int], num_trunk: int
) -> tuple[bool, ...]:
    """Which blocks recur. The array comes before the interval; no KV heads always means it."""
    num_blocks = len(kv_heads)
    flags = (False,) * num_blocks
    for key in ("attention.recurrent_layers", "recurrent_layers"):
        if figures.has(key):
            items = figures.per_layer(key, num_blocks, num_extra=num_blocks - num_trunk)
            flags = tuple(item != 0 for item in items)
            break
    else:
        interval = figures.integer("full_attention_interval", 0)
        if interval == 0 and family in GATED_DELTA:
            interval = GATED_DELTA_INTERVAL
            figures.warn(f"{figures.prefix}full_attention_interval is missing; assumed {interval}")
        if interval:
            flags = at_interval(num_blocks, interval)
    return tuple(
        index < num_trunk and (flag or heads == 0)
        for index, (flag, heads) in enumerate(zip(flags, kv_heads, strict=True))
    )


def _sliding(
    figures: Figures, family: str, num_blocks: int, num_trunk: int, window: int
) -> tuple[bool, ...]:
    """Which blocks slide. A NextN block does only where an array says so."""
    none = (False,) * num_blocks
    key = "attention.sliding_window_pattern"
    nextn = none[num_trunk:]
    if window == 0:
        if figures.has(key):
            figures.warn(
                f"{figures.prefix}{key} is given without attention.sliding_window;"
                " every layer counts as full attention"
            )
        return none
    found = figures.value(key)
    if isinstance(found, (list, tuple)):
        items = figures.per_layer(key, num_blocks, num_extra=num_blocks - num_trunk)
        flags = tuple(item != 0 for item in items)
        return flags if len(found) == num_blocks else flags[:num_trunk] + nextn
    if found is not None:
        return at_interval(num_trunk, figures.integer(key)) + nextn
    implied = implied_sliding(family, num_trunk)
    if implied is None:
        figures.warn(
            f"{figures.prefix}attention.sliding_window is {window} without a pattern;"
            " every layer counts as full attention"
        )
        return none
    figures.warn(implied[1])
    return implied[0] + nextn


def _layer(figures: Figures, shape: _Shape, index: int) -> LayerGeometry:
    try:
        if shape.recurrent[index]:
            return _recurrent_layer(figures, shape, index)
        if shape.sliding[index]:
            return LayerGeometry(
                kind=LayerKind.SLIDING,
                query_heads=shape.query_heads[index],
                kv_heads=shape.kv_heads[index],
                key_head_size=shape.key_size_sliding,
                value_head_size=shape.value_size_sliding,
                window=shape.window,
            )
        if figures.has("attention.kv_lora_rank"):
            return LayerGeometry(
                kind=LayerKind.LATENT,
                query_heads=shape.query_heads[index],
                latent_size=figures.integer("attention.kv_lora_rank"),
                rope_size=figures.integer("rope.dimension_count"),
            )
        return LayerGeometry(
            kind=LayerKind.FULL,
            query_heads=shape.query_heads[index],
            kv_heads=shape.kv_heads[index],
            key_head_size=shape.key_size,
            value_head_size=shape.value_size,
        )
    except GeometryError as error:
        if error.message.startswith(figures.name):
            raise
        raise GeometryError(f"{figures.name}: layer {index}: {error.message}") from error


def _recurrent_layer(figures: Figures, shape: _Shape, index: int) -> LayerGeometry:
    if figures.has("shortconv.l_cache"):
        return LayerGeometry(
            kind=LayerKind.SHORT_CONV,
            conv_channels=shape.hidden_size,
            conv_kernel=figures.integer("shortconv.l_cache"),
        )
    if not figures.has("ssm.state_size"):
        raise GeometryError(
            f"{figures.name}: layer {index} has no KV heads, and neither"
            f" {figures.prefix}ssm.state_size nor shortconv.l_cache says what it keeps"
        )
    state = figures.integer("ssm.state_size")
    conv_kernel = figures.integer("ssm.conv_kernel")
    groups = figures.integer("ssm.group_count", 0)
    if shape.family in GATED_DELTA:
        return gated_delta(
            key_heads=groups,
            value_heads=figures.integer("ssm.time_step_rank"),
            key_size=state,
            value_size=state,
            conv_kernel=conv_kernel,
        )
    if figures.per_layer(
        "feed_forward_length",
        shape.num_blocks,
        num_extra=shape.num_blocks - shape.num_trunk,
        default=0,
    )[index] and shape.family.startswith("nemotron_h"):
        figures.warn(
            "layers that only feed forward are charged a recurrent state, as the others are"
        )
    return state_space(
        inner=figures.integer("ssm.inner_size"), groups=groups, state=state, conv_kernel=conv_kernel
    )


def _unread_keys(header: GGUFHeader, architecture: str) -> dict[str, int]:
    return {key: n for key, n in header.skipped.items() if key.startswith(architecture + ".")}


def _vocabulary_size(figures: Figures, header: GGUFHeader) -> int:
    """The key, else the length of the token list, else the rows of the embedding, else 0."""
    if figures.has("vocab_size"):
        return figures.integer("vocab_size")
    if "tokenizer.ggml.tokens" in header.skipped:
        return header.skipped["tokenizer.ggml.tokens"]
    return next((t.shape[-1] for t in header.tensors if t.name == EMBEDDING), 0)


def _warn_about_what_is_not_counted(figures: Figures) -> None:
    if figures.has("attention.indexer.head_count"):
        figures.warn("the sparse-attention index state is not counted")
