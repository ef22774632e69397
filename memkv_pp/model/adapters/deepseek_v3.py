"""DeepSeek-V3: latent attention (MLA), in which a token's row is one latent and one rotated key.

Heads are never expanded over the cache: what expands a latent into a head's key is applied to the
query, and what expands it into a value to the weighted sum ("DeepSeek-V2", 2405.04434, 2.1.2).
"""

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from memkv_pp.model.adapters.base import Adapter, Rotary, StepCache


class _LatentAttention(DeepseekV3Attention):
    """transformers' weights over latent rows.

    Legend: T tokens, H heads, N and R sizes of a head's plain and rotated part, L of the latent,
    V of a value head.
    """

    def forward(self, hidden_states: torch.Tensor, *_: Any, **step: Any) -> Any:
        cache: StepCache = step["memkv_cache"]
        rotary: Rotary = step["position_embeddings"]
        rows = hidden_states[0]
        query = self._queries(rows)
        plain_THN, turned_THR = query.view(len(rows), self.num_heads, -1).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        latent_TL, key_TR = self.kv_a_proj_with_mqa(rows).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent_T1L = self.kv_a_layernorm(latent_TL)[:, None]
        turn = (
            apply_rotary_pos_emb_interleave if self.config.rope_interleave else apply_rotary_pos_emb
        )
        turned_THR, key_T1R = turn(
            turned_THR, key_TR[:, None], *(t[0] for t in rotary), unsqueeze_dim=1
        )
        to_key_HNL, to_value_HVL = self.kv_b_proj.weight.view(
            self.num_heads, -1, self.kv_lora_rank
        ).split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        asked_THL = torch.einsum("thn,hnl->thl", plain_THN, to_key_HNL)
        out_THL = cache.attend(
            self.layer_idx,
            torch.cat([asked_THL, turned_THR], dim=-1),
            torch.cat([latent_T1L, key_T1R], dim=-1),
            latent_T1L,
            self.scaling,
        )
        out_THV = torch.einsum("thl,hvl->thv", out_THL, to_value_HVL)
        return self.o_proj(out_THV.reshape(1, len(rows), -1)), None

    def _queries(self, rows: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            return self.q_proj(rows)
        low: Any = self
        return low.q_b_proj(low.q_a_layernorm(low.q_a_proj(rows)))


def _decoder_layer(config: Any, layer: int) -> nn.Module:
    module = DeepseekV3DecoderLayer(config, layer)
    module.self_attn = _LatentAttention(config, layer)
    return module


ADAPTER = Adapter(
    family="deepseek_v3",
    decoder_layer=_decoder_layer,
    norm=lambda config: DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps),
    rotary=DeepseekV3RotaryEmbedding,
    has_experts=lambda config: config.first_k_dense_replace < config.num_hidden_layers,
)
