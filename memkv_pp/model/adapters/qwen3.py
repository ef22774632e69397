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
    norm=Qwen3RMSNorm,
    rotary=Qwen3RotaryEmbedding,
    window_knob="use_sliding_window",
)
