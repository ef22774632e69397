"""A model's geometry from a Hugging Face ``config.json``.

``num_hidden_layers`` excludes the NextN layers, which are added behind. ``layer_types`` is honoured
wherever it is given; otherwise the family's rule is, and a warning says what was assumed.
"""

from collections.abc import Mapping
from dataclasses import replace

from memkv_pp.errors import GeometryError
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.model.figures import MAX_LAYERS, Figures
from memkv_pp.model.patterns import (
    GATED_DELTA,
    GATED_DELTA_INTERVAL,
    at_interval,
    gated_delta,
    implied_sliding,
    refuse_family,
    share_tail,
)
from memkv_pp.model.weight_formulas import (
    EXACT_FAMILIES,
    feed_forward_elements,
    feed_forward_size,
    mixer_elements,
    nextn_projection_elements,
    norm_elements,
    per_layer_input_elements,
    shared_elements,
)

_KINDS = {
    "attention": LayerKind.FULL,
    "full_attention": LayerKind.FULL,
    "indexed_attention": LayerKind.LATENT,
    "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT,
    "conv": LayerKind.SHORT_CONV,
}
_TIED_BY_DEFAULT = frozenset(
    {"cohere2", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "lfm2", "lfm2_moe"}
)
# A window in these families' files means nothing unless use_sliding_window says so
_WINDOW_OFF_BY_DEFAULT = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
_UNREAD_PREFIXES = ("mamba_", "ssm_", "rwkv", "attn_layer_", "hybrid_override_pattern")
_NEXTN_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_GEMMA4_GLOBAL_HEAD_SIZE = 512


def geometry_from_config(config: Mapping[str, object], name: str) -> ModelGeometry:
    """Describe the model of ``config``; a nested ``text_config`` is the one that counts.

    Raises GeometryError naming the key for a figure that is missing, of a wrong type or length, or
    that describes a model this cache cannot hold. ``weight_elements`` are by formula, exact for the
    families of ``weight_formulas.EXACT_FAMILIES``; others are counted as Llama's and say so.
    """
    figures, family = _open(config, name)
    num_trunk = figures.layer_count("num_hidden_layers")
    num_nextn = next((figures.integer(key) for key in _NEXTN_KEYS if figures.has(key)), 0)
    if num_trunk + num_nextn > MAX_LAYERS:
        figures.fail("num_nextn_predict_layers", f"is {num_nextn}, over {MAX_LAYERS} layers")
    kinds = _kinds(figures, family, num_trunk, num_nextn)
    owned = [_layer(figures, family, kind, index) for index, kind in enumerate(kinds)]
    trunk = share_tail(name, owned[:num_trunk], figures.integer("num_kv_shared_layers", 0))
    every = _weigh(figures, family, owned, [*trunk, *owned[num_trunk:]], num_trunk)
    if family not in EXACT_FAMILIES:
        figures.warn(f"weights of {family} are counted by Llama's formula")
    hidden_size = figures.integer("hidden_size")
    vocabulary = figures.integer("vocab_size", 0)
    tied = figures.flag("tie_word_embeddings", family in _TIED_BY_DEFAULT)
    return ModelGeometry(
        name=name,
        family=family,
        layers=tuple(every[:num_trunk]),
        nextn_layers=tuple(every[num_trunk:]),
        context_tokens=figures.integer("max_position_embeddings", 0),
        hidden_size=hidden_size,
        feed_forward_size=max(
            feed_forward_size(figures, family, index, shares=layer.kind is LayerKind.SHARED)
            for index, layer in enumerate(trunk)
        ),
        vocabulary_size=vocabulary,
        embedding_elements=vocabulary * hidden_size,
        head_elements=0 if tied else vocabulary * hidden_size,
        norm_elements=hidden_size,
        tied_embedding=tied,
        warnings=tuple(figures.warnings),
    )


def _open(config: Mapping[str, object], name: str) -> tuple[Figures, str]:
    nested = config.get("text_config")
    values = dict(config)
    if isinstance(nested, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings", "model_type") if key in config}
        values = outer | {str(key): value for key, value in nested.items()}
    figures = Figures(name, values)
    family = figures.text("model_type").removesuffix("_text")
    if not family:
        figures.fail("model_type", "is missing")
    refuse_family(name, family)
    unread = sorted(key for key in values if key.startswith(_UNREAD_PREFIXES))
    if unread:
        figures.fail(unread[0], f"describes a recurrence of {family} that is read from GGUF alone")
    return figures, family


def _kinds(figures: Figures, family: str, num_trunk: int, num_nextn: int) -> list[LayerKind]:
    """One kind per layer, NextN layers included."""
    full = LayerKind.LATENT if figures.has("kv_lora_rank") else LayerKind.FULL
    found = figures.value("layer_types")
    if isinstance(found, list):
        if len(found) not in (num_trunk, num_trunk + num_nextn):
            figures.fail("layer_types", f"has {len(found)} items for {num_trunk} layers")
        kinds = [_kind(figures, item, index) for index, item in enumerate(found)]
        if not figures.flag("use_sliding_window", True):
            kinds = [full if kind is LayerKind.SLIDING else kind for kind in kinds]
    elif found is not None:
        figures.fail("layer_types", "must be a list")
    else:
        kinds = _kinds_by_family(figures, family, num_trunk)
    if full is LayerKind.LATENT:
        kinds = [full if kind is LayerKind.FULL else kind for kind in kinds]
    return kinds + [full] * (num_trunk + num_nextn - len(kinds))


def _kind(figures: Figures, item: object, index: int) -> LayerKind:
    if not isinstance(item, str) or item not in _KINDS:
        figures.fail(
            f"layer_types[{index}]", f"is {item!r}; this cache holds {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[item]


def _kinds_by_family(figures: Figures, family: str, num_layers: int) -> list[LayerKind]:
    if figures.has("full_attn_idxs"):
        attends = figures.value("full_attn_idxs")
        if not isinstance(attends, list):
            figures.fail("full_attn_idxs", "must be a list")
        return [LayerKind.FULL if i in attends else LayerKind.SHORT_CONV for i in range(num_layers)]
    interval = figures.integer("full_attention_interval", 0)
    if interval == 0 and family in GATED_DELTA:
        interval = GATED_DELTA_INTERVAL
        figures.warn(f"full_attention_interval is missing; assumed {interval}")
    if interval:
        return _chosen(at_interval(num_layers, interval), LayerKind.RECURRENT)
    if family.startswith("lfm2"):
        figures.fail("layer_types", "is missing, and so is full_attn_idxs")
    return _chosen(_sliding(figures, family, num_layers), LayerKind.SLIDING)


def _chosen(flags: tuple[bool, ...], kind: LayerKind) -> list[LayerKind]:
    return [kind if flag else LayerKind.FULL for flag in flags]


def _sliding(figures: Figures, family: str, num_layers: int) -> tuple[bool, ...]:
    none = (False,) * num_layers
    window = figures.integer("sliding_window", 0)
    if window == 0 or not figures.flag("use_sliding_window", family not in _WINDOW_OFF_BY_DEFAULT):
        return none
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if figures.has(key):
            return at_interval(num_layers, figures.integer(key))
    if figures.has("max_window_layers"):
        first = figures.integer("max_window_layers")
        return tuple(index >= first for index in range(num_layers))
    implied = implied_sliding(family, num_layers)
    if implied is None:
        figures.warn(
            f"sliding_window is {window} without layer_types; every layer counts as full attention"
        )
        return none
    figures.warn(implied[1])
    return implied[0]


def _layer(figures: Figures, family: str, kind: LayerKind, index: int) -> LayerGeometry:
    try:
        if kind is LayerKind.RECURRENT:
            return gated_delta(
                key_heads=figures.integer("linear_num_key_heads"),
                value_heads=figures.integer("linear_num_value_heads"),
                key_size=figures.integer("linear_key_head_dim"),
                value_size=figures.integer("linear_value_head_dim"),
                conv_kernel=figures.integer("linear_conv_kernel_dim"),
            )
        if kind is LayerKind.SHORT_CONV:
            return LayerGeometry(
                kind=kind,
                conv_channels=figures.integer("hidden_size"),
                conv_kernel=figures.integer("conv_L_cache"),
            )
        return _attention_layer(figures, family, kind, index)
    except GeometryError as error:
        if error.message.startswith(figures.name):
            raise
        raise GeometryError(f"{figures.name}: layer {index}: {error.message}") from error


def _attention_layer(figures: Figures, family: str, kind: LayerKind, index: int) -> LayerGeometry:
    own = _own_figures(figures, family, kind, index)
    query_heads = own.integer("num_attention_heads", least=1)
    if kind is LayerKind.LATENT:
        return LayerGeometry(
            kind=kind,
            query_heads=query_heads,
            latent_size=figures.integer("kv_lora_rank"),
            rope_size=figures.integer("qk_rope_head_dim"),
        )
    size = own.integer("head_dim", 0)
    if size == 0:
        hidden_size = figures.integer("hidden_size", least=1)
        if hidden_size % query_heads:
            figures.fail(
                "head_dim",
                f"is missing, and hidden_size {hidden_size} is no multiple of {query_heads} heads",
            )
        size = hidden_size // query_heads
        figures.warn(f"head_dim is missing; assumed hidden_size / num_attention_heads = {size}")
    return LayerGeometry(
        kind=kind,
        query_heads=query_heads,
        kv_heads=own.integer("num_key_value_heads", query_heads),
        key_head_size=size,
        value_head_size=size,
        window=figures.integer("sliding_window", least=1) if kind is LayerKind.SLIDING else 0,
    )


def _own_figures(figures: Figures, family: str, kind: LayerKind, index: int) -> Figures:
    """The head figures of layer ``index``: the model's, under the overrides that families have."""
    values: dict[str, object] = {
        key: figures.value(key)
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    }
    if figures.has("num_attention_groups"):
        values["num_key_value_heads"] = figures.value("num_attention_groups")
    overrides: Mapping[str, object] = {}
    per_layer = figures.value("per_layer_config")
    if isinstance(per_layer, Mapping):
        by_index = {int(k): v for k, v in per_layer.items() if str(k).isdecimal()}
        found = by_index.get(index)
        overrides = found if isinstance(found, Mapping) else {}
    elif kind is LayerKind.SLIDING:
        overrides = _sliding_overrides(figures)
    elif family == "gemma4":
        overrides = _gemma4_global(figures)
    values |= {key: value for key, value in overrides.items() if key in values}
    return Figures(figures.name, values)


def _sliding_overrides(figures: Figures) -> dict[str, object]:
    """What Step's files call ``attention_other_setting``, or a head count for sliding layers."""
    setting = figures.value("attention_other_setting")
    if isinstance(setting, Mapping):
        renamed = {"num_attention_groups": "num_key_value_heads"}
        return {renamed.get(str(key), str(key)): value for key, value in setting.items()}
    if figures.has("num_sliding_attention_heads"):
        return {"num_attention_heads": figures.value("num_sliding_attention_heads")}
    return {}


def _gemma4_global(figures: Figures) -> dict[str, object]:
    """Gemma 4's global layers have heads of their own size, and KV heads where K is V."""
    if not figures.has("global_head_dim"):
        figures.warn(f"global_head_dim is missing; assumed {_GEMMA4_GLOBAL_HEAD_SIZE}")
    found: dict[str, object] = {
        "head_dim": figures.integer("global_head_dim", _GEMMA4_GLOBAL_HEAD_SIZE)
    }
    if figures.has("num_global_key_value_heads") and figures.flag("attention_k_eq_v", True):
        found["num_key_value_heads"] = figures.integer("num_global_key_value_heads")
    return found


def _weigh(
    figures: Figures,
    family: str,
    owned: list[LayerGeometry],
    layers: list[LayerGeometry],
    num_trunk: int,
) -> list[LayerGeometry]:
    """``layers`` with their weight elements; ``owned`` holds the head sizes of those that share.

    Tables that only the first stage reads are counted with layer 0.
    """
    each, first_stage = (
        per_layer_input_elements(figures, num_trunk) if family == "gemma4" else (0, 0)
    )
    weighed: list[LayerGeometry] = []
    for index, (own, layer) in enumerate(zip(owned, layers, strict=True)):
        shares = layer.kind is LayerKind.SHARED
        mixer = (shared_elements if shares else mixer_elements)(figures, family, own)
        total = mixer + feed_forward_elements(figures, family, index, shares=shares)
        total += norm_elements(figures, family) + each + (first_stage if index == 0 else 0)
        if index >= num_trunk:
            total += nextn_projection_elements(figures)
        weighed.append(replace(layer, weight_elements=total))
    return weighed
