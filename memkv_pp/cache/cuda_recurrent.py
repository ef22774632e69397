"""Recurrent layers on CUDA: ``kernels/cuda/scan.cu``, its host side and its torch operators.

What launches is a ``Launcher``, as in ``cuda_kernels``. A row's result does not depend on the spans
beside its own, nor on whether rows come in one call or in several, bit for bit; it differs from the
host kernel's in the order of sums.

Shape legend: as in ``recurrent_ops``. Spans are int64 [S, 4] on the states' device.
"""

import numpy as np
import torch
from torch import Tensor

from memkv_pp.cache import cuda_ops
from memkv_pp.cache.cuda_launch import Launcher, check, dtype_id
from memkv_pp.cache.recurrent_ops import check_conv, check_scan, no_outputs
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.units import ceil_div

SCAN = "scan"
MAX_KEY_SIZE = 256

_THREADS = 128
_COLUMNS = 32
_HELD = (8, 16, 32, 64)  # rows of a state in a lane's registers
_CONV_ROWS = 64


def scan_kernel(dtype: torch.dtype, key_size: int) -> str:
    """The kernel that scans rows of ``dtype`` over heads of ``key_size``."""
    return f"scan_delta<{dtype_id(dtype)}, {_held(key_size)}>"


def conv_kernel(dtype: torch.dtype) -> str:
    """The kernel that convolves rows of ``dtype``."""
    return f"short_conv<{dtype_id(dtype)}>"


def _held(key_size: int) -> int:
    if not 0 < key_size <= MAX_KEY_SIZE:
        raise ConfigError(
            f"key heads of {key_size} are beyond {MAX_KEY_SIZE}, what the CUDA scan holds",
            "use the torch scan of recurrent_ops for this layer",
        )
    return next(n for n in _HELD if 4 * n >= key_size)


class CudaRecurrent:
    """The kernels as functions of tensors. InternalError for tensors that do not fit."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def scan_delta(
        self,
        states_NHKV: Tensor,
        spans_S4: Tensor,
        query_TGK: Tensor | None,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
    ) -> Tensor:
        """As ``recurrent_ops.scan_delta``; whether rows and slots are there is not looked up.

        Queries, keys and values are of one dtype. ConfigError for key heads beyond 256.
        """
        check_scan(states_NHKV, query_TGK, key_TGK, value_THV, gate_TH, beta_TH)
        _check_spans(spans_S4)
        _, heads, value_size = value_THV.shape
        check(key_TGK.dtype == value_THV.dtype, "keys and values differ in dtype")
        check(query_TGK is None or query_TGK.dtype == key_TGK.dtype, "queries differ in dtype")
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous()
            for x in (key_TGK if query_TGK is None else query_TGK, key_TGK, value_THV)
        )
        out = no_outputs(value_THV, query_TGK)
        key_size = key_TGK.shape[2]
        if len(spans_S4) and states_NHKV.numel():
            self._launcher.launch(
                SCAN,
                scan_kernel(value_THV.dtype, key_size),
                (len(spans_S4), heads, ceil_div(value_size, _COLUMNS)),
                _THREADS,
                16 * 4 * _held(key_size),
                (
                    states_NHKV, spans_S4, query, key, value, gate_TH.contiguous(),
                    beta_TH.contiguous(), out,
                    np.int64(states_NHKV.stride(0)), np.int64(query.stride(0)),
                    np.int64(query.stride(1)), np.int64(key.stride(0)), np.int64(key.stride(1)),
                    np.int64(value.stride(0)), np.int64(value.stride(1)), np.int32(heads),
                    np.int32(key_TGK.shape[1]), np.int32(key_size), np.int32(value_size),
                    np.int32(query_TGK is not None),
                ),
            )  # fmt: skip
        return out

    def short_conv(
        self,
        states_NCW: Tensor,
        spans_S4: Tensor,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None = None,
        *,
        silu: bool = False,
        max_rows: int,
    ) -> Tensor:
        """As ``recurrent_ops.short_conv``: its bits, but for the last ones of SiLU's exponential.

        ``max_rows`` bounds the rows of a span.
        """
        out = values_TC.new_zeros(values_TC.shape)
        check_conv(states_NCW, values_TC, weight_CX, bias_C)
        bias = None if bias_C is None else bias_C.float().contiguous()
        weight = weight_CX.float().contiguous()
        self._run_conv(states_NCW, spans_S4, values_TC, weight, bias, out, silu, max_rows)
        return out

    def roll_conv(self, states_NCW: Tensor, spans_S4: Tensor, values_TC: Tensor) -> None:
        """As ``recurrent_ops.roll_conv``, bit for bit."""
        check_conv(states_NCW, values_TC, None, None)
        self._run_conv(states_NCW, spans_S4, values_TC, None, None, None, False, 1)

    def _run_conv(
        self,
        states_NCW: Tensor,
        spans_S4: Tensor,
        values_TC: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        silu: bool,
        max_rows: int,
    ) -> None:
        _check_spans(spans_S4)
        _, channels, taps = states_NCW.shape
        values = values_TC if values_TC.stride(-1) == 1 else values_TC.contiguous()
        if not len(spans_S4) or not channels:
            return
        tile_rows = max(_CONV_ROWS, taps)
        self._launcher.launch(
            SCAN,
            conv_kernel(values.dtype),
            (len(spans_S4), ceil_div(channels, _THREADS), max(ceil_div(max_rows, tile_rows), 1)),
            _THREADS,
            0,
            (
                states_NCW, spans_S4, values, states_NCW if weight is None else weight,
                states_NCW if bias is None else bias, values if out is None else out,
                np.int64(states_NCW.stride(0)), np.int64(values.stride(0)), np.int32(channels),
                np.int32(taps), np.int32(tile_rows), np.int32(weight is not None),
                np.int32(bias is not None), np.int32(silu),
            ),
        )  # fmt: skip


def _check_spans(spans_S4: Tensor) -> None:
    whole = spans_S4.dtype == torch.int64 and spans_S4.is_contiguous()
    check(whole and spans_S4.dim() == 2 and spans_S4.shape[1] == 4, "spans are no int64 [S, 4]")


def _of(states: Tensor) -> CudaRecurrent:
    kernels = cuda_ops.loaded(states.device)
    if kernels is None:
        raise InternalError(f"a CUDA operator was given states on {states.device} before load()")
    return CudaRecurrent(kernels.launcher)


@torch.library.custom_op("memkv::scan_delta", mutates_args=("states",))
def scan_delta(
    states: Tensor,
    spans: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
) -> Tensor:
    """The gated delta rule from slot to slot: [T, H, V]; [0, H, V] without queries."""
    return _of(states).scan_delta(states, spans, query, key, value, gate, beta)


@torch.library.custom_op("memkv::short_conv", mutates_args=("states",))
def short_conv(
    states: Tensor,
    spans: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    max_rows: int,
) -> Tensor:
    """The short convolution from slot to slot: [T, C]."""
    return _of(states).short_conv(states, spans, values, weight, bias, silu=silu, max_rows=max_rows)


@torch.library.custom_op("memkv::roll_states", mutates_args=("states",))
def roll_states(states: Tensor, spans: Tensor, values: Tensor) -> None:
    """The short convolution's states alone, from slot to slot."""
    _of(states).roll_conv(states, spans, values)


@scan_delta.register_fake
def _(
    states: Tensor,
    spans: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
) -> Tensor:
    return value.new_empty((0 if query is None else value.shape[0], *value.shape[1:]))


@short_conv.register_fake
def _(
    states: Tensor,
    spans: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    max_rows: int,
) -> Tensor:
    return values.new_empty(values.shape)
