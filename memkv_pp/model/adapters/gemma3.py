"""Gemma 3: most layers see a window, and turn with their own rotation; rows are scaled embeddings."""

from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3DecoderLayer,
    Gemma3RMSNorm,
    Gemma3RotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter, rope_by_layer_type


def _refusal(config: object) -> str:
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "attn_logit_softcapping"
    return ""


ADAPTER = Adapter(
    family="gemma3",
    decoder_layer=Gemma3DecoderLayer,
    norm=lambda config: Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Gemma3RotaryEmbedding,
    rope_of=rope_by_layer_type,
    layer_types=("full_attention", "sliding_attention"),
    refusal=_refusal,
    embedding_scale=lambda config: config.hidden_size**0.5,
    logit_cap=lambda config: config.final_logit_softcapping or 0.0,
)
