"""gpt-oss: windows on every other layer, a sink in every head, and experts."""

from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssDecoderLayer,
    GptOssRMSNorm,
    GptOssRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter

ADAPTER = Adapter(
    family="gpt_oss",
    decoder_layer=GptOssDecoderLayer,
    norm=lambda config: GptOssRMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=GptOssRotaryEmbedding,
    layer_types=("full_attention", "sliding_attention"),
    has_experts=lambda config: True,
)
