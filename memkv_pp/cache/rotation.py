"""Rotates heads of tensors, bit for bit as ``memkv_pp/rotation.py`` rotates one."""

from functools import cache

import torch
from torch import Tensor

from memkv_pp.rotation import rotation_norm, sign_tables


def rotate(rows: Tensor, *, inverse: bool = False) -> Tensor:
    """f32 [..., head_size]: every row rotated, or with ``inverse`` rotated back.

    FormatError for a head size that is not 64, 128, 256 or 512.
    """
    size = rows.shape[-1]
    before, after = sign_rows(size, rows.device)
    if inverse:
        before, after = after, before
    values = rows.to(torch.float32) * before
    stride = 1
    while stride < size:
        low, high = values.unflatten(-1, (-1, 2, stride)).unbind(-2)
        values = torch.stack((low + high, low - high), -2).flatten(-3)
        stride *= 2
    return values.mul_(rotation_norm(size)).mul_(after)


@cache
def sign_rows(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two sign tables of heads of ``size`` elements, f32, on ``device``."""
    before, after = sign_tables(size)
    return (
        torch.tensor(before, dtype=torch.float32, device=device),
        torch.tensor(after, dtype=torch.float32, device=device),
    )
