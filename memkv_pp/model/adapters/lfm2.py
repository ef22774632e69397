"""LFM2: short convolutions between the attention layers."""

from typing import Any

import torch
from torch import nn
from transformers.models.lfm2.modeling_lfm2 import (
    Lfm2DecoderLayer,
    Lfm2RMSNorm,
    Lfm2RotaryEmbedding,
    Lfm2ShortConv,
)

from memkv_pp.model.adapters.base import Adapter, StepCache


class _ShortConv(Lfm2ShortConv):
    """transformers' weights; the convolution is the cache's."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **step: Any) -> torch.Tensor:
        cache: StepCache = step["memkv_cache"]
        gate_in, gate_out, rows = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        out = cache.convolve(
            self.layer_idx, gate_in * rows, self.conv.weight.squeeze(1), self.conv.bias, silu=False
        )
        return self.out_proj(gate_out * out)[None]


def _decoder_layer(config: Any, layer: int) -> nn.Module:
    module = Lfm2DecoderLayer(config, layer)
    if not module.is_attention_layer:
        module.conv = _ShortConv(config, layer)
    return module


ADAPTER = Adapter(
    family="lfm2",
    decoder_layer=_decoder_layer,
    norm=lambda config: Lfm2RMSNorm(config.hidden_size, config.norm_eps),
    rotary=Lfm2RotaryEmbedding,
    layer_types=("full_attention", "conv"),
    norm_name="model.embedding_norm",
)
