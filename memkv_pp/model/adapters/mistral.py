"""Mistral: Llama with, in its first release, a sliding window on every layer."""

from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter

ADAPTER = Adapter(
    family="mistral",
    decoder_layer=MistralDecoderLayer,
    norm=lambda config: MistralRMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=MistralRotaryEmbedding,
    layer_types=("full_attention", "sliding_attention"),
)
