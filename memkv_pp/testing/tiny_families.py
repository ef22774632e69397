"""What a tiny model of each family has beyond the shape that all share.

Layers alternate so that any cut into two to four stages parts kinds; windows are shorter than the
tests' prompts; heads and head sizes differ where a family lets them.
"""

from collections.abc import Mapping
from typing import Any

_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    # Heads of the rule's output are normalised however small they are: with random weights some are
    # so small that a smaller epsilon would blow the rounding of f32 up (transformers' own full and
    # cached passes then differ by 6e-5).
    "rms_norm_eps": 1e-3,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = 12

FAMILY_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_next": {
        **_DELTA_NET,
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
    "qwen3_5": {**_DELTA_NET, "model_type": "qwen3_5_text"},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
    "deepseek_v3": {
        **_EXPERTS,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
}
"""Fields of config.json by family; ``model_type`` where transformers names the text model apart."""

NORMS_ADD_ONE = frozenset({"gemma3", "qwen3_next", "qwen3_5"})
"""Families whose norms multiply by their weight and 1."""
