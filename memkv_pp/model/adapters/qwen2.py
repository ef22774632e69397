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
    norm=Qwen2RMSNorm,
    rotary=Qwen2RotaryEmbedding,
    window_knob="use_sliding_window",
)
