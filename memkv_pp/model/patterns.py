"""What model families leave unsaid: which layers slide, which share, what a recurrence keeps.

Names are Hugging Face model types; ``CANONICAL`` maps GGUF architectures onto them, so that one
model has one family whichever file it was read from.
"""

from collections.abc import Sequence
from dataclasses import replace

from memkv_pp.errors import GeometryError
from memkv_pp.geometry import LayerGeometry, LayerKind

CANONICAL = {
    "deepseek2": "deepseek_v2",
    "exaone-moe": "exaone_moe",
    "glm-dsa": "glm_moe_dsa",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "lfm2moe": "lfm2_moe",
    "mistral3": "mistral",
    "qwen2moe": "qwen2_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "step35": "step3p5",
}

GATED_DELTA = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
GATED_DELTA_INTERVAL = 4

# family: (interval, whether the full layer comes first in it); interval 0 means all layers slide
_IMPLIED: dict[str, tuple[int, bool]] = {
    "cohere2": (4, False),
    "exaone4": (4, False),
    "exaone_moe": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma4": (6, False),
    "gpt_oss": (2, False),
    "llama": (0, False),
    "mistral": (0, False),
    "mixtral": (0, False),
    "olmo3": (4, False),
    "step3p5": (4, True),
}

REFUSED = {
    "arwkv7": "its recurrence is not one that this cache holds",
    "falcon-h1": "its layers attend and recur at once",
    "falcon_h1": "its layers attend and recur at once",
    "llama4": "it attends in chunks, which this cache does not hold",
    "llama4_text": "it attends in chunks, which this cache does not hold",
    "rwkv": "its recurrence is not one that this cache holds",
    "rwkv6": "its recurrence is not one that this cache holds",
    "rwkv6qwen2": "its recurrence is not one that this cache holds",
    "rwkv7": "its recurrence is not one that this cache holds",
    "bert": "it is an encoder and keeps no cache",
    "clip": "it is an image encoder and keeps no cache",
    "t5": "it has an encoder and cross attention",
    "t5encoder": "it is an encoder and keeps no cache",
}


def refuse_family(name: str, family: str) -> None:
    """Raise GeometryError for a family whose cache would be described wrongly."""
    if family in REFUSED:
        raise GeometryError(f"{name}: {family} is refused: {REFUSED[family]}")


def at_interval(num_layers: int, interval: int, *, full_first: bool = False) -> tuple[bool, ...]:
    """Which layers are *not* full attention when one of ``interval`` is: its last, or its first.

    0 means none is full, 1 that all are.

    >>> at_interval(4, 2), at_interval(4, 4, full_first=True)
    ((True, False, True, False), (False, True, True, True))
    """
    if interval == 0:
        return (True,) * num_layers
    full = 0 if full_first else interval - 1
    return tuple(layer % interval != full for layer in range(num_layers))


def implied_sliding(family: str, num_layers: int) -> tuple[tuple[bool, ...], str] | None:
    """The sliding layers that a family implies, and the sentence that says so; None if unknown."""
    if family not in _IMPLIED:
        return None
    interval, first = _IMPLIED[family]
    flags = at_interval(num_layers, interval, full_first=first)
    which = (
        "every layer slides"
        if interval == 0
        else f"{'the first' if first else 'the last'} of every {interval} layers is full attention"
    )
    return flags, f"the sliding pattern is not given; assumed as {family} has it: {which}"


def share_tail(name: str, layers: Sequence[LayerGeometry], num_shared: int) -> list[LayerGeometry]:
    """The last ``num_shared`` layers read the last layer of their own kind before them.

    Where the owners end on a full layer preceded by a sliding one, as Gemma's do, these are
    ``kv_from - 1`` and ``kv_from - 2`` of ``dual-cache-and-pipeline.md`` 1.6.
    """
    if num_shared == 0:
        return list(layers)
    start = len(layers) - num_shared
    if start <= 0:
        raise GeometryError(f"{name}: {num_shared} of {len(layers)} layers share, none owns")
    last_of = {layer.kind: index for index, layer in enumerate(layers[:start])}
    shared: list[LayerGeometry] = []
    for index, layer in enumerate(layers[start:], start):
        if layer.kind not in last_of:
            raise GeometryError(
                f"{name}: layer {index} shares a {layer.kind} cache, no layer before {start} has one"
            )
        shared.append(
            LayerGeometry(
                kind=LayerKind.SHARED,
                query_heads=layer.query_heads,
                source_layer=last_of[layer.kind],
                weight_elements=layer.weight_elements,
            )
        )
    return [*layers[:start], *shared]


def gated_delta(
    *, key_heads: int, value_heads: int, key_size: int, value_size: int, conv_kernel: int
) -> LayerGeometry:
    """A gated delta-net layer, by ``dual-cache-and-pipeline.md`` 1.5."""
    return LayerGeometry(
        kind=LayerKind.RECURRENT,
        conv_channels=2 * key_size * key_heads + value_size * value_heads,
        conv_kernel=conv_kernel,
        state_elements=key_size * value_size * value_heads,
    )


def state_space(*, inner: int, groups: int, state: int, conv_kernel: int) -> LayerGeometry:
    """A Mamba layer; ``groups`` is 0 for Mamba-1, whose convolution sees the inner rows alone."""
    return LayerGeometry(
        kind=LayerKind.RECURRENT,
        conv_channels=inner + 2 * groups * state,
        conv_kernel=conv_kernel,
        state_elements=inner * state,
    )


def with_weights(layers: Sequence[LayerGeometry], elements: Sequence[int]) -> list[LayerGeometry]:
    """The layers, each with its number of weight elements."""
    return [
        replace(layer, weight_elements=count) for layer, count in zip(layers, elements, strict=True)
    ]
