"""Attention over packed rows where they lie, on the CPU: ``kernels/host/attend_host.cpp``.

A row's result depends on its query, its position and its keys only, bit for bit: not on the rows
beside it, the records' size or the threads. So one kernel serves with and without
``--deterministic``.

Shape legend: T query rows, Q query heads, H KV heads, B rows of a record, N records, S segments,
D head size of K, E head size of V.
"""

import ctypes

import torch

from memkv_pp.cache import host_kernels
from memkv_pp.cache.attention import SegmentTable
from memkv_pp.cache.host_codec import FORMAT_IDS, TYPE_IDS
from memkv_pp.cache.ops import SideView
from memkv_pp.errors import InternalError
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.small_floats import to_f32

MAX_HEAD_SIZE = 576
_LANES = 16
_DONE, _NO_MEMORY = 0, 2


class _Side(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("code_record_stride", ctypes.c_int64),
        ("scale_record_stride", ctypes.c_int64),
        ("exponent_record_stride", ctypes.c_int64),
        ("code_row_bytes", ctypes.c_int32),
        ("scale_row_bytes", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("padding", ctypes.c_int32),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("log_sum_exp", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_listed", ctypes.c_int64),
        ("num_records", ctypes.c_int64),
        ("query_row_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("k", _Side),
        ("v", _Side),
        ("query_type", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("record_rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("padding", ctypes.c_int32),
    )


class HostAttention:
    """The kernel in a loaded library; safe to call from any number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.memkv_attend
        self._attend.argtypes = (ctypes.POINTER(_Arguments),)
        self._attend.restype = ctypes.c_int

    def serves(self, side: SideView) -> bool:
        """Whether the kernel reads this side: on the CPU, heads in whole vectors."""
        size = side.head_size
        return (
            side.codes.device.type == "cpu"
            and side.format.name in FORMAT_IDS
            and size % _LANES == 0
            and 0 < size <= MAX_HEAD_SIZE
        )

    def attend(
        self,
        k: SideView,
        v: SideView,
        query_TQD: torch.Tensor,
        table: SegmentTable,
        scale: float,
        *,
        threads: int,
        window: int = 0,
        cap: float = 0.0,
        sinks_Q: torch.Tensor | None = None,
        log_sum_exp_TQ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``PackedAttention.attend`` says; InternalError also for records outside the arena."""
        if query_TQD.stride(-1) != 1:
            query_TQD = query_TQD.contiguous()
        num_rows, query_heads, _ = query_TQD.shape
        num_records, heads, record_rows, _ = k.codes.shape
        group, rest = divmod(query_heads, heads)
        shape = (num_rows, query_heads, v.head_size)
        make = query_TQD.new_empty if table.num_rows == num_rows else query_TQD.new_zeros
        out = make(shape)
        good = (
            not rest
            and query_TQD.shape[2] == k.head_size
            and v.codes.shape[:3] == k.codes.shape[:3]
            and (log_sum_exp_TQ is None or _is_f32(log_sum_exp_TQ, shape[:2]))
            and (sinks_Q is None or _is_f32(sinks_Q, shape[1:2]))
        )
        status = -1
        if good:
            arguments = _Arguments(
                query=query_TQD.data_ptr(),
                out=out.data_ptr(),
                log_sum_exp=None if log_sum_exp_TQ is None else log_sum_exp_TQ.data_ptr(),
                sinks=None if sinks_Q is None else sinks_Q.data_ptr(),
                segments=table.segments.data_ptr(),
                records=table.records.data_ptr(),
                num_segments=len(table.segments),
                num_rows=num_rows,
                num_listed=len(table.records),
                num_records=num_records,
                query_row_stride=query_TQD.stride(0),
                query_head_stride=query_TQD.stride(1),
                window=window,
                k=_side(k),
                v=_side(v),
                query_type=TYPE_IDS.get(query_TQD.dtype, -1),
                heads=heads,
                group=group,
                record_rows=record_rows,
                threads=threads,
                scale=scale,
                cap=cap,
            )
            status = self._attend(ctypes.byref(arguments))
        if status == _NO_MEMORY:
            raise MemoryError("attention over packed rows: no memory for the partial sums")
        if status != _DONE:
            raise InternalError(
                f"attention over {k.format.name}:{v.format.name} rows of {k.head_size} and"
                f" {v.head_size} cannot serve queries {list(query_TQD.shape)} {query_TQD.dtype} on"
                f" records {list(k.codes.shape[:3])} for segments {table.segments.tolist()}"
            )
        return out


def loaded() -> HostAttention | None:
    """The kernel if ``host_kernels.load`` found a compiler before; does not try to."""
    kernels = host_kernels.loaded()
    return None if kernels is None else HostAttention(kernels.libraries["attend_host"])


def _is_f32(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tensor.dtype is torch.float32 and tensor.shape == shape and tensor.is_contiguous()


def _side(side: SideView) -> _Side:
    scale = side.fp8.value
    if side.format.name == "fp8":
        fp8_reciprocal(scale)
    return _Side(
        codes=side.codes.data_ptr(),
        scales=side.scales.data_ptr(),
        exponents=side.exponents.data_ptr() if side.format.exponent else None,
        code_record_stride=side.codes.stride(0),
        scale_record_stride=side.scales.stride(0),
        exponent_record_stride=side.exponents.stride(0),
        code_row_bytes=side.codes.shape[3],
        scale_row_bytes=side.scales.shape[3],
        format=FORMAT_IDS.get(side.format.name, -1),
        head_size=side.head_size,
        factor=to_f32(scale),
    )
