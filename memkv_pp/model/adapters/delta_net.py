"""The gated delta net that Qwen3-Next and Qwen3.5 share, over a ``StepCache``.

Legend: T tokens of a packed step, C channels of the convolution, KH key and VH value heads.
"""

from typing import Any

import torch
from torch.nn import functional

from memkv_pp.model.adapters.base import StepCache

# What transformers adds to the squared norm of queries and keys.
_EPSILON = 1e-6


def gated_delta_net(
    module: Any,
    mixed_TC: torch.Tensor,
    z_THD: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    cache: StepCache,
) -> torch.Tensor:
    """From the projected rows to the layer's output ``[T, H]``: "Gated Delta Networks", 2412.06464.

    ``mixed_TC`` is query, key and value side by side. The rule runs in f32.
    """
    num_rows, layer = len(mixed_TC), module.layer_idx
    mixed_TC = cache.convolve(
        layer, mixed_TC, module.conv1d.weight.squeeze(1), module.conv1d.bias, silu=True
    )
    query, key, value = mixed_TC.float().split(
        [module.key_dim, module.key_dim, module.value_dim], dim=-1
    )
    query = _unit(query.view(num_rows, -1, module.head_k_dim)) / module.head_k_dim**0.5
    key = _unit(key.view(num_rows, -1, module.head_k_dim))
    gate = -module.A_log.float().exp() * functional.softplus(a_TH.float() + module.dt_bias)
    out = cache.scan(
        layer,
        query,
        key,
        value.view(num_rows, -1, module.head_v_dim),
        gate.float(),
        b_TH.sigmoid().float(),
    )
    out = out.to(mixed_TC.dtype).reshape(-1, module.head_v_dim)
    out = module.norm(out, z_THD.reshape(-1, module.head_v_dim))
    return module.out_proj(out.view(num_rows, -1))


def delta_refusal(config: Any) -> str:
    """What of a configuration the convolution's activation rules out."""
    return "" if config.hidden_act == "silu" else f"hidden_act = {config.hidden_act}"


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON)
