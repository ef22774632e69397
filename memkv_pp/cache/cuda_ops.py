"""The CUDA kernels as torch operators, compiled by CuPy's NVRTC at their first use.

Every operator runs on the device and the current torch stream of its tensors. What each does, and
the shapes, are those of ``cuda_kernels.CudaKernels``. A side is passed as its codes, scales and
exponents, its format's name, and fp8's scale.
"""

import importlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


_lock = threading.Lock()
_serving: dict[str, CudaKernels] = {}
_tried = False


def load() -> CudaKernels | None:
    """The kernels of this process's CUDA devices; None, after one warning, without CuPy."""
    global _tried
    with _lock:
        if not _tried:
            _tried = True
            try:
                _serving["cuda"] = CudaKernels(CupyLauncher())
            except ConfigError as error:
                warnings.warn(
                    f"CUDA kernels are not used: {error}; torch code serves, slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _serving.get("cuda")


def loaded(device: torch.device) -> CudaKernels | None:
    """The kernels that serve tensors on ``device``, if ``load`` found them before."""
    return _serving.get(device.type)


@contextmanager
def serving(device_type: str, kernels: CudaKernels) -> Iterator[None]:
    """Meanwhile ``kernels`` serve tensors of ``device_type``: on the CPU, those of the emulation."""
    before = dict(_serving)
    _serving[device_type] = kernels
    try:
        yield
    finally:
        _serving.clear()
        _serving.update(before)


def _of(tensor: Tensor) -> CudaKernels:
    kernels = loaded(tensor.device)
    if kernels is None:
        raise InternalError(f"a CUDA operator was given tensors on {tensor.device} before load()")
    return kernels


@torch.library.custom_op("memkv::append", mutates_args=("codes", "scales", "exponents"))
def append(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
    format_name: str,
    scale: float,
    values: Tensor,
    records: Tensor,
    rows: Tensor,
) -> None:
    """Pack rows [T, H, D] into (record, row) pairs."""
    side = _side(format_name, values.shape[-1], codes, scales, exponents, scale)
    _of(codes).append(side, values, records, rows)


@torch.library.custom_op("memkv::gather", mutates_args=())
def gather(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
    format_name: str,
    scale: float,
    head_size: int,
    records: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """All rows of the records, unpacked: [H, N * B, D]."""
    side = _side(format_name, head_size, codes, scales, exponents, scale)
    return _of(codes).gather(side, records, dtype)


@torch.library.custom_op("memkv::attend", mutates_args=())
def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    key_exponents: Tensor,
    key_format: str,
    key_scale: float,
    value_codes: Tensor,
    value_scales: Tensor,
    value_exponents: Tensor,
    value_format: str,
    value_scale: float,
    value_size: int,
    records: Tensor,
    segments: Tensor,
    max_rows: int,
    max_length: int,
    scale: float,
    window: int,
    cap: float,
    sinks: Tensor | None,
    split_rows: int,
) -> tuple[Tensor, Tensor]:
    """Attention over packed rows: [T, H * G, D of V] and the log-sum-exp [T, H * G]."""
    return _of(query).attend(
        query,
        _side(key_format, query.shape[-1], key_codes, key_scales, key_exponents, key_scale),
        _side(value_format, value_size, value_codes, value_scales, value_exponents, value_scale),
        records,
        segments,
        max_rows=max_rows,
        max_length=max_length,
        scale=scale,
        window=window,
        cap=cap,
        sinks_Q=sinks,
        split_rows=split_rows,
    )


@torch.library.custom_op("memkv::rotate", mutates_args=())
def rotate(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rows [..., D] rotated; rotated back with the signs swapped."""
    return _of(values).rotate(values, first, second)


@torch.library.custom_op("memkv::copy_records", mutates_args=("target",))
def copy_records(
    target: Tensor, source: Tensor, into: Tensor, out_of: Tensor, record_bytes: int
) -> None:
    """Copy whole records."""
    _of(target).copy_records(target, source, into, out_of, record_bytes)


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
    _of(target).copy_state(
        target,
        source,
        into,
        out_of,
        slot_bytes=slot_bytes,
        offset=offset,
        num_elements=num_elements,
    )


@gather.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
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
    key_exponents: Tensor,
    key_format: str,
    key_scale: float,
    value_codes: Tensor,
    value_scales: Tensor,
    value_exponents: Tensor,
    value_format: str,
    value_scale: float,
    value_size: int,
    records: Tensor,
    segments: Tensor,
    max_rows: int,
    max_length: int,
    scale: float,
    window: int,
    cap: float,
    sinks: Tensor | None,
    split_rows: int,
) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return query.new_empty((*query.shape[:2], value_size)), lse


@rotate.register_fake
def _(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _side(
    name: str, head_size: int, codes: Tensor, scales: Tensor, exponents: Tensor, scale: float
) -> PackedSide:
    return PackedSide(
        format=parse_format(name),
        head_size=head_size,
        codes=codes,
        scales=scales,
        exponents=exponents,
        scale=scale,
    )
