"""Llama: every layer is full attention."""

from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter

ADAPTER = Adapter(
    family="llama",
    decoder_layer=LlamaDecoderLayer,
    norm=lambda config: LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=LlamaRotaryEmbedding,
)
