"""Weight elements of a decoder layer from a configuration, where no weight file was read.

Written from the parameter shapes of each family's layer; the tests hold them equal to the
parameters of transformers' own modules. h is the hidden size, H and G query and KV heads, d the
head size, I the width of the feed-forward.
"""

from memkv_pp.geometry import LayerGeometry, LayerKind
from memkv_pp.model.figures import Figures

_QK_NORM = frozenset(
    {"gemma3", "gemma4", "lfm2", "lfm2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5",
     "qwen3_5_moe"}
)  # fmt: skip
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma4"})
_GATED_QUERY = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
_TOP_KEYS = ("num_experts_per_tok", "moe_top_k", "top_k_experts")
EXACT_FAMILIES = _QK_NORM | _FOUR_NORMS | _QKV_BIAS | {
    "deepseek_v2", "deepseek_v3", "gemma", "gpt_oss", "llama", "mistral", "mixtral",
}  # fmt: skip


def mixer_elements(figures: Figures, family: str, layer: LayerGeometry) -> int:
    """Weights of the attention, recurrence or convolution of ``layer``, its inner norms included."""
    if layer.kind is LayerKind.RECURRENT:
        return _gated_delta_elements(figures)
    if layer.kind is LayerKind.SHORT_CONV:
        h, bias = layer.conv_channels, figures.flag("conv_bias", False)
        return 4 * h * h + h * layer.conv_kernel + (5 * h if bias else 0)
    if layer.kind is LayerKind.LATENT:
        return _latent_elements(figures, layer)
    return _attention_elements(figures, family, layer)


def _attention_elements(figures: Figures, family: str, layer: LayerGeometry) -> int:
    h = figures.integer("hidden_size")
    query = layer.query_heads * layer.key_head_size
    key, value = layer.kv_heads * layer.key_head_size, layer.kv_heads * layer.value_head_size
    out = layer.query_heads * layer.value_head_size
    projected = query * (2 if family in _GATED_QUERY else 1) + key + value
    if family == "gemma4" and layer.kind is LayerKind.FULL:
        projected -= value if figures.flag("attention_k_eq_v", False) else 0
    total = projected * h + out * h
    bias = figures.flag("attention_bias", family == "gpt_oss")
    if family in _QKV_BIAS:
        total += projected if figures.flag("qkv_bias", True) else 0
    elif bias:
        total += projected + h
    if family in _QK_NORM:
        total += 2 * layer.key_head_size
    if family == "gpt_oss":
        total += layer.query_heads
    return total


def shared_elements(figures: Figures, family: str, layer: LayerGeometry) -> int:
    """Weights of an attention layer that reads another's cache: queries and output alone."""
    h, width = figures.integer("hidden_size"), layer.query_heads * layer.key_head_size
    return 2 * width * h + (layer.key_head_size if family in _QK_NORM else 0)


def _latent_elements(figures: Figures, layer: LayerGeometry) -> int:
    h, heads = figures.integer("hidden_size"), layer.query_heads
    nope, rope = figures.integer("qk_nope_head_dim"), layer.rope_size
    value, latent = figures.integer("v_head_dim"), layer.latent_size
    rank = figures.integer("q_lora_rank", 0)
    bias = figures.flag("attention_bias", False)
    width = heads * (nope + rope)
    query = h * width if rank == 0 else h * rank + rank + rank * width + (rank if bias else 0)
    down = h * (latent + rope) + latent + (latent + rope if bias else 0)
    up = latent * heads * (nope + value)
    return query + down + up + heads * value * h + (h if bias else 0)


def _gated_delta_elements(figures: Figures) -> int:
    h = figures.integer("hidden_size")
    key_heads = figures.integer("linear_num_key_heads")
    value_heads = figures.integer("linear_num_value_heads")
    key = key_heads * figures.integer("linear_key_head_dim")
    value_size = figures.integer("linear_value_head_dim")
    value = value_heads * value_size
    conv = (2 * key + value) * figures.integer("linear_conv_kernel_dim")
    projected = h * (2 * key + 2 * value + 2 * value_heads)
    return projected + conv + 2 * value_heads + value_size + value * h


def feed_forward_elements(figures: Figures, family: str, index: int, *, shares: bool) -> int:
    """Weights of the feed-forward of layer ``index``: dense, or router and experts.

    ``shares``: the layer reads another's cache (some gemma4 models double its width there).
    """
    if is_sparse(figures, index):
        return _expert_elements(figures, family)
    width = _dense_width(figures, family, shares=shares)
    h = figures.integer("hidden_size")
    return 3 * h * width + (2 * width + h if figures.flag("mlp_bias", False) else 0)


def feed_forward_size(figures: Figures, family: str, index: int, *, shares: bool) -> int:
    """Elements of one row inside the feed-forward of layer ``index``, all its experts together."""
    if not is_sparse(figures, index):
        return _dense_width(figures, family, shares=shares)
    width = figures.integer("moe_intermediate_size", figures.integer("intermediate_size", 0))
    chosen = next((figures.integer(key) for key in _TOP_KEYS if figures.has(key)), 0)
    if chosen == 0:
        figures.warn(f"{_TOP_KEYS[0]} is missing; activations count one expert of a row")
        chosen = 1
    shared = width * figures.integer("n_shared_experts", 0)
    for key in ("shared_expert_intermediate_size", "share_expert_dim"):
        shared += figures.integer(key, 0)
    return chosen * width + shared


def _dense_width(figures: Figures, family: str, *, shares: bool) -> int:
    width = figures.integer("intermediate_size")
    if family == "lfm2":
        width = _lfm2_width(figures, width)
    if family == "gemma4" and shares and figures.flag("use_double_wide_mlp", False):
        width *= 2
    return width


def is_sparse(figures: Figures, index: int) -> bool:
    """Whether layer ``index`` routes to experts."""
    if num_experts(figures) == 0:
        return False
    kinds = figures.value("mlp_layer_types")
    if isinstance(kinds, list):
        return index >= len(kinds) or kinds[index] == "sparse"
    only_dense = figures.value("mlp_only_layers")
    if isinstance(only_dense, list) and index in only_dense:
        return False
    dense_first = figures.integer("first_k_dense_replace", figures.integer("num_dense_layers", 0))
    step = figures.integer("decoder_sparse_step", 1, least=1)
    return index >= dense_first and (index + 1) % step == 0


def num_experts(figures: Figures) -> int:
    """Routed experts of a sparse layer; 0 for a dense model."""
    for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if figures.has(key):
            return figures.integer(key)
    return 0


def _expert_elements(figures: Figures, family: str) -> int:
    h, experts = figures.integer("hidden_size"), num_experts(figures)
    width = figures.integer("moe_intermediate_size", figures.integer("intermediate_size", 0))
    if family == "gpt_oss":
        return experts * (3 * h * width + 2 * width + h) + experts * h + experts
    total = experts * 3 * h * width + experts * h
    if figures.has("shared_expert_intermediate_size"):
        total += 3 * h * figures.integer("shared_expert_intermediate_size") + h
    if figures.has("n_shared_experts"):
        total += 3 * h * width * figures.integer("n_shared_experts")
    if figures.has("share_expert_dim"):
        total += 3 * h * figures.integer("share_expert_dim")
    return total


def _lfm2_width(figures: Figures, width: int) -> int:
    if not figures.flag("block_auto_adjust_ff_dim", True):
        return width
    multiplier = figures.value("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    if isinstance(multiplier, (int, float)):
        width = int(multiplier * width)
    multiple = figures.integer("block_multiple_of", 256, least=1)
    return multiple * -(-width // multiple)


def norm_elements(figures: Figures, family: str) -> int:
    """Weights of the norms around a layer's mixer and feed-forward."""
    return figures.integer("hidden_size") * (4 if family in _FOUR_NORMS else 2)


def nextn_projection_elements(figures: Figures) -> int:
    """What a NextN layer has beyond a decoder layer: two inputs to one, and three norms."""
    h = figures.integer("hidden_size")
    return 2 * h * h + 3 * h


def per_layer_input_elements(figures: Figures, num_layers: int) -> tuple[int, int]:
    """(of each layer, of the first stage) for gemma4's per-layer embeddings; zeros without."""
    p, h = figures.integer("hidden_size_per_layer_input", 0), figures.integer("hidden_size")
    if p == 0:
        return 0, 0
    rows = figures.integer("vocab_size_per_layer_input", figures.integer("vocab_size", 0))
    return 2 * h * p + h, num_layers * p * (rows + h) + p
