"""Recurrent layers on the CPU in vector code: ``kernels/host/scan_host.cpp``.

A row's result, and the state after it, depend on the rows of its own span up to it only, bit for
bit: not on the spans beside it, the threads, or whether the rows come in one call or in several. So
``commit(n)``, a scan of n rows, gives the state that a scan of those rows alone would have given.

Shape legend: as in ``recurrent_ops``.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from memkv_pp.cache import host_kernels
from memkv_pp.cache.host_codec import TYPE_IDS
from memkv_pp.cache.recurrent_ops import SpanTable, check_conv, check_scan, no_outputs
from memkv_pp.errors import InternalError

MAX_KEY_SIZE = 512
MAX_TAPS = 8


class _Rows(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


_COUNTS = tuple(
    (name, ctypes.c_int64) for name in ("num_spans", "num_rows", "num_slots", "slot_stride")
)


class _Scan(ctypes.Structure):
    _fields_ = (
        ("states", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *_COUNTS,
        ("query", _Rows),
        ("key", _Rows),
        ("value", _Rows),
        ("heads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("key_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class _Conv(ctypes.Structure):
    _fields_ = (
        ("states", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *_COUNTS,
        ("value", _Rows),
        ("channels", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("silu", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def serves(dtype: torch.dtype, *, key_size: int = 0, taps: int = 0) -> bool:
    """Whether the kernels take rows of ``dtype`` and states of these sizes."""
    return dtype in TYPE_IDS and key_size <= MAX_KEY_SIZE and taps <= MAX_TAPS


class HostRecurrent:
    """The kernels in a loaded library; safe to call from any number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan = library.memkv_scan_delta
        self._conv = library.memkv_short_conv
        for function, arguments in ((self._scan, _Scan), (self._conv, _Conv)):
            function.argtypes = (ctypes.POINTER(arguments),)
            function.restype = ctypes.c_int

    def scan_delta(
        self,
        states_NHKV: Tensor,
        table: SpanTable,
        query_TGK: Tensor | None,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
        *,
        threads: int,
    ) -> Tensor:
        """As ``recurrent_ops.scan_delta``, whose sums are taken in another order.

        InternalError, with nothing written, for what the kernel does not serve, shapes that do not
        fit, and rows or slots that are not there.
        """
        check_scan(states_NHKV, query_TGK, key_TGK, value_THV, gate_TH, beta_TH)
        num_rows, heads, value_size = value_THV.shape
        gate_TH, beta_TH = gate_TH.contiguous(), beta_TH.contiguous()
        query, key, value = (_dense_rows(x) for x in (query_TGK, key_TGK, value_THV))
        out_THV = no_outputs(value_THV, None) if query is None else _out(value_THV, table)
        arguments = _Scan(
            states=states_NHKV.data_ptr(),
            spans=table.spans.data_ptr(),
            gate=gate_TH.data_ptr(),
            beta=beta_TH.data_ptr(),
            out=out_THV.data_ptr(),
            num_spans=len(table.spans),
            num_rows=num_rows,
            num_slots=len(states_NHKV),
            slot_stride=states_NHKV.stride(0),
            query=_rows(query),
            key=_rows(key),
            value=_rows(value),
            heads=heads,
            key_heads=key_TGK.shape[1],
            key_size=key_TGK.shape[2],
            value_size=value_size,
            threads=threads,
        )
        rows = [x for x in (query_TGK, key_TGK, value_THV) if x is not None]
        _check_served(rows, states_NHKV, key_size=key_TGK.shape[2])
        if self._scan(ctypes.byref(arguments)):
            table.check(num_rows, len(states_NHKV))
        return out_THV

    def short_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None = None,
        *,
        silu: bool = False,
        threads: int,
    ) -> Tensor:
        """As ``recurrent_ops.short_conv``: its bits, but for the last ones of SiLU's exponential.

        Weights that are not f32 are converted in every call. Errors as of ``scan_delta``.
        """
        check_conv(states_NCW, values_TC, weight_CX, bias_C)
        out_TC = _out(values_TC, table)
        weight = weight_CX.float().contiguous()
        bias = None if bias_C is None else bias_C.float().contiguous()
        self._run_conv(states_NCW, table, values_TC, weight, bias, out_TC, silu, threads)
        return out_TC

    def roll_conv(
        self, states_NCW: Tensor, table: SpanTable, values_TC: Tensor, *, threads: int
    ) -> None:
        """As ``recurrent_ops.roll_conv``, bit for bit. Errors as of ``scan_delta``."""
        check_conv(states_NCW, values_TC, None, None)
        self._run_conv(states_NCW, table, values_TC, None, None, None, False, threads)

    def _run_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        silu: bool,
        threads: int,
    ) -> None:
        num_slots, channels, taps = states_NCW.shape
        values = _dense_rows(values_TC)
        arguments = _Conv(
            states=states_NCW.data_ptr(),
            spans=table.spans.data_ptr(),
            weight=None if weight is None else weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out=None if out is None else out.data_ptr(),
            num_spans=len(table.spans),
            num_rows=len(values_TC),
            num_slots=num_slots,
            slot_stride=states_NCW.stride(0),
            value=_rows(values),
            channels=channels,
            taps=taps,
            silu=silu,
            threads=threads,
        )
        _check_served([values_TC], states_NCW, taps=taps)
        if self._conv(ctypes.byref(arguments)):
            table.check(len(values_TC), num_slots)


def loaded() -> HostRecurrent | None:
    """The kernels if ``host_kernels.load`` found a compiler before; does not try to."""
    kernels = host_kernels.loaded()
    return None if kernels is None else HostRecurrent(kernels.libraries["scan_host"])


def _check_served(
    rows: Sequence[Tensor], states: Tensor, *, key_size: int = 0, taps: int = 0
) -> None:
    for tensor in (*rows, states):
        if tensor.device.type != "cpu" or not serves(tensor.dtype, key_size=key_size, taps=taps):
            raise InternalError(
                f"recurrent kernels: {tensor.dtype} on {tensor.device} with states"
                f" {list(states.shape)} is not served"
            )


def _out(values: Tensor, table: SpanTable) -> Tensor:
    """Room for every row: zeros where rows of no span would stay as they are."""
    covered = int(table.spans[:, 1].sum()) == len(values)
    return values.new_empty(values.shape) if covered else values.new_zeros(values.shape)


def _dense_rows(rows: Tensor | None) -> Tensor | None:
    return rows if rows is None or rows.stride(-1) == 1 else rows.contiguous()


def _rows(rows: Tensor | None) -> _Rows:
    if rows is None:
        return _Rows(at=None, row_stride=0, head_stride=0, type=0)
    return _Rows(
        at=rows.data_ptr(),
        row_stride=rows.stride(0),
        head_stride=rows.stride(1) if rows.dim() == 3 else 0,
        type=TYPE_IDS.get(rows.dtype, -1),
    )
