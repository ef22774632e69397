"""Qwen3.5: three gated delta nets to one gated full attention; the text model of it."""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter, StepCache
from memkv_pp.model.adapters.delta_net import delta_refusal, gated_delta_net


class _DeltaNet(Qwen3_5GatedDeltaNet):
    """transformers' weights; the convolution and the scan are the cache's."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **step: Any) -> torch.Tensor:
        cache: StepCache = step["memkv_cache"]
        rows = hidden_states[0]
        z = self.in_proj_z(rows).view(len(rows), -1, self.head_v_dim)
        b, a = self.in_proj_b(rows), self.in_proj_a(rows)
        return gated_delta_net(self, self.in_proj_qkv(rows), z, b, a, cache)[None]


def _decoder_layer(config: Any, layer: int) -> nn.Module:
    module = Qwen3_5DecoderLayer(config, layer)
    if config.layer_types[layer] == "linear_attention":
        module.linear_attn = _DeltaNet(config, layer)
    return module


ADAPTER = Adapter(
    family="qwen3_5",
    decoder_layer=_decoder_layer,
    norm=lambda config: Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Qwen3_5TextRotaryEmbedding,
    layer_types=("full_attention", "linear_attention"),
    refusal=delta_refusal,
)
