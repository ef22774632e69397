"""Qwen3: normalised queries and keys; windows on the upper layers if asked for."""

from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter

ADAPTER = Adapter(
    family="qwen3",
    decoder_layer=Qwen3DecoderLayer,
    norm=lambda config: Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Qwen3RotaryEmbedding,
    layer_types=("full_attention", "sliding_attention"),
)
