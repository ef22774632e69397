"""Qwen2: biased query, key and value projections; windows on the upper layers if asked for."""

from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter

ADAPTER = Adapter(
    family="qwen2",
    decoder_layer=Qwen2DecoderLayer,
    norm=lambda config: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Qwen2RotaryEmbedding,
    layer_types=("full_attention", "sliding_attention"),
)
