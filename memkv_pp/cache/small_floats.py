"""E4M3, views and exact division on tensors: what the codecs of ``cache`` share."""

import torch
from torch import Tensor

from memkv_pp.small_floats import E4M3_MAX, E4M3_NAN


def e4m3_codes(values: Tensor) -> Tensor:
    """uint8, contiguous, as ``small_floats.e4m3_code`` of each f32 value."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), E4M3_NAN).contiguous()


def e4m3_values(codes: Tensor) -> Tensor:
    """f32, by way of f16: the same fields with an exponent bias of 15 instead of 7."""
    wide = codes.view(torch.int8).to(torch.int16)
    nan = wide.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    halves = wide.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000).bitwise_or_(nan)
    return halves.view(torch.float16).to(torch.float32).mul_(2.0**8)


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """``data`` (bytes) as ``dtype`` along its last dimension, copied only where it is unaligned."""
    size = dtype.itemsize
    aligned = data.stride(-1) == 1 and not any(
        step % size for step in (data.storage_offset(), *data.stride()[:-1])
    )
    return (data if aligned else data.clone(memory_format=torch.contiguous_format)).view(dtype)


def bytes_of(values: Tensor) -> Tensor:
    """uint8 [..., n * element size] of ``values`` [..., n], a view where they are contiguous.

    ``Tensor.view`` refuses a last dimension of one element, or an empty tensor, whose stride is odd.
    """
    width = values.shape[-1] * values.element_size()
    return values.contiguous().flatten().view(torch.uint8).view(*values.shape[:-1], width)


def divide(values: Tensor, divisor: float) -> Tensor:
    """``values / divisor``; a divisor on the CPU would become a rounded reciprocal on a GPU."""
    return values / values.new_full((), divisor)
