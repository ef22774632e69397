"""Gemma 4: head sizes and KV heads by layer, and last layers that read the rows of others."""

from typing import Any

import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)

from memkv_pp.model.adapters.base import Adapter, Rotary, StepCache, rope_by_layer_type


class _HeldElsewhere(dict[str, tuple[torch.Tensor, torch.Tensor]]):
    """Stands for the keys and values of the layers that are shared: the cache has them."""

    def __missing__(self, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = torch.empty(0)
        return nothing, nothing


def _run(module: nn.Module, hidden: torch.Tensor, rotary: Rotary, cache: StepCache) -> torch.Tensor:
    output = module(
        hidden[None],
        shared_kv_states=_HeldElsewhere(),
        attention_mask=None,
        position_embeddings=rotary,
        memkv_cache=cache,
    )
    return output[0]


def _refusal(config: Any) -> str:
    if config.hidden_size_per_layer_input:
        return "hidden_size_per_layer_input: an input to every layer from the first stage's table"
    if config.use_bidirectional_attention == "all":
        return "use_bidirectional_attention"
    return ""


ADAPTER = Adapter(
    family="gemma4",
    decoder_layer=Gemma4TextDecoderLayer,
    norm=lambda config: Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=Gemma4TextRotaryEmbedding,
    run=_run,
    rope_of=rope_by_layer_type,
    layer_types=("full_attention", "sliding_attention"),
    rope_types=("default", "linear", "yarn", "llama3", "proportional"),
    refusal=_refusal,
    embedding_scale=lambda config: config.hidden_size**0.5,
    logit_cap=lambda config: config.final_logit_softcapping or 0.0,
)
