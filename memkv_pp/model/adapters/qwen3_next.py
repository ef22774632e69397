"""Qwen3-Next: three gated delta nets to one gated full attention, and experts."""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextGatedDeltaNet,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter, StepCache
from memkv_pp.model.adapters.delta_net import delta_refusal, gated_delta_net


class _DeltaNet(Qwen3NextGatedDeltaNet):
    """transformers' weights; the convolution and the scan are the cache's."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **step: Any) -> torch.Tensor:
        cache: StepCache = step["memkv_cache"]
        query, key, value, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        mixed_TC = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=-1)
        return gated_delta_net(self, mixed_TC, z[0], b[0], a[0], cache)[None]


def _decoder_layer(config: Any, layer: int) -> nn.Module:
    module = Qwen3NextDecoderLayer(config, layer)
    if module.block_type == "linear_attention":
        module.linear_attn = _DeltaNet(config, layer)
    return module


ADAPTER = Adapter(
    family="qwen3_next",
    decoder_layer=_decoder_layer,
    norm=lambda config: Qwen3NextRMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Qwen3NextRotaryEmbedding,
    layer_types=("full_attention", "linear_attention"),
    refusal=delta_refusal,
    has_experts=lambda config: bool(config.num_experts),
)
