"""The CUDA kernels as torch operators, compiled by CuPy's NVRTC at their first use.

Every operator runs on the device and the current torch stream of its tensors. What each does, and
the shapes, are those of ``cuda_kernels.CudaKernels``. A side is passed as its format's name, its
codes and scales, and fp8's scale.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memkv_pp.cache.cuda_kernels import CudaKernels
from memkv_pp.cache.cuda_launch import Argument, PackedSide
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import parse_format

_OPTIONS = ("-std=c++17",)
# More must be asked for, kernel by kernel.
_DEFAULT_SHARED_BYTES = 48 * 1024


class CupyLauncher:
    """A ``Launcher`` for CUDA tensors; ConfigError without CuPy."""

    def __init__(self) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise ConfigError(
                f"CUDA kernels need CuPy: {error}", "pip install 'memkv-pp[gpu]'"
            ) from error
        self._functions: dict[tuple[int, str, str], Any] = {}

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Enqueue ``kernel`` on the current stream of the first tensor's device."""
        device = next(item.device for item in arguments if isinstance(item, Tensor))
        if device.type != "cuda":
            raise InternalError(f"a CUDA kernel was given tensors on {device}")
        stream = torch.cuda.current_stream(device)
        values = tuple(
            np.uint64(item.data_ptr()) if isinstance(item, Tensor) else item for item in arguments
        )
        cuda = self._cupy.cuda
        with cuda.Device(device.index), cuda.ExternalStream(stream.cuda_stream, device.index):
            function = self._function(device.index, source, kernel)
            if shared_bytes > max(_DEFAULT_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
                function.max_dynamic_shared_size_bytes = shared_bytes
            function(grid, (threads, 1, 1), values, shared_mem=shared_bytes)

    def _function(self, device: int, source: str, kernel: str) -> Any:
        key = (device, source, kernel)
        if key not in self._functions:
            module = self._cupy.RawModule(
                code=kernel_source(source), options=_OPTIONS, name_expressions=(kernel,)
            )
            self._functions[key] = module.get_function(kernel)
        return self._functions[key]


@cache
def cuda_kernels() -> CudaKernels:
    """The kernels of this process's devices; ConfigError without CuPy."""
    return CudaKernels(CupyLauncher())


@torch.library.custom_op("memkv::append", mutates_args=("codes", "scales"))
def append(
    codes: Tensor,
    scales: Tensor,
    format_name: str,
    scale: float,
    values: Tensor,
    records: Tensor,
    rows: Tensor,
) -> None:
    """Pack rows [T, H, D] into (record, row) pairs."""
    side = _side(format_name, values.shape[-1], codes, scales, scale)
    cuda_kernels().append(side, values, records, rows)


@torch.library.custom_op("memkv::gather", mutates_args=())
def gather(
    codes: Tensor,
    scales: Tensor,
    format_name: str,
    scale: float,
    head_size: int,
    records: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """All rows of the records, unpacked: [H, N * B, D]."""
    side = _side(format_name, head_size, codes, scales, scale)
    return cuda_kernels().gather(side, records, dtype)


@torch.library.custom_op("memkv::attend", mutates_args=())
def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    key_format: str,
    key_scale: float,
    value_codes: Tensor,
    value_scales: Tensor,
    value_format: str,
    value_scale: float,
    value_size: int,
    records: Tensor,
    segments: Tensor,
    max_rows: int,
    max_length: int,
    scale: float,
    split_rows: int,
) -> tuple[Tensor, Tensor]:
    """Attention over packed rows: [T, H * G, D of V] and the log-sum-exp [T, H * G]."""
    return cuda_kernels().attend(
        query,
        _side(key_format, query.shape[-1], key_codes, key_scales, key_scale),
        _side(value_format, value_size, value_codes, value_scales, value_scale),
        records,
        segments,
        max_rows=max_rows,
        max_length=max_length,
        scale=scale,
        split_rows=split_rows,
    )


@torch.library.custom_op("memkv::rotate", mutates_args=())
def rotate(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rows [..., D] rotated; rotated back with the signs swapped."""
    return cuda_kernels().rotate(values, first, second)


@torch.library.custom_op("memkv::copy_records", mutates_args=("target",))
def copy_records(
    target: Tensor, source: Tensor, into: Tensor, out_of: Tensor, record_bytes: int
) -> None:
    """Copy whole records."""
    cuda_kernels().copy_records(target, source, into, out_of, record_bytes)


@torch.library.custom_op("memkv::copy_state", mutates_args=("target",))
def copy_state(
    target: Tensor,
    source: Tensor,
    into: Tensor,
    out_of: Tensor,
    slot_bytes: int,
    offset: int,
    num_elements: int,
) -> None:
    """Copy one layer's states from slot to slot."""
    cuda_kernels().copy_state(
        target,
        source,
        into,
        out_of,
        slot_bytes=slot_bytes,
        offset=offset,
        num_elements=num_elements,
    )


@torch.library.custom_op("memkv::roll_conv", mutates_args=("states",))
def roll_conv(
    states: Tensor,
    slots: Tensor,
    spans: Tensor,
    values: Tensor,
    slot_bytes: int,
    offset: int,
    taps: int,
) -> None:
    """Shift convolution states by new rows."""
    cuda_kernels().roll_conv(
        states, slots, spans, values, slot_bytes=slot_bytes, offset=offset, taps=taps
    )


@gather.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    format_name: str,
    scale: float,
    head_size: int,
    records: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    _, heads, block, _ = codes.shape
    return codes.new_empty((heads, records.shape[0] * block, head_size), dtype=dtype)


@attend.register_fake
def _(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    key_format: str,
    key_scale: float,
    value_codes: Tensor,
    value_scales: Tensor,
    value_format: str,
    value_scale: float,
    value_size: int,
    records: Tensor,
    segments: Tensor,
    max_rows: int,
    max_length: int,
    scale: float,
    split_rows: int,
) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return query.new_empty((*query.shape[:2], value_size)), lse


@rotate.register_fake
def _(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _side(name: str, head_size: int, codes: Tensor, scales: Tensor, scale: float) -> PackedSide:
    return PackedSide(
        format=parse_format(name), head_size=head_size, codes=codes, scales=scales, scale=scale
    )
