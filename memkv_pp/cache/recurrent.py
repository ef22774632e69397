"""Recurrent layers over state slots: what a stage asks of a kernel, on any device.

Shape legend: as in ``recurrent_ops``.
"""

from typing import Protocol

import torch
from torch import Tensor

from memkv_pp.cache import cuda_ops, cuda_recurrent, host_recurrent, recurrent_ops
from memkv_pp.cache.host_recurrent import HostRecurrent
from memkv_pp.cache.recurrent_chunks import CHUNK_ROWS, scan_delta_chunks
from memkv_pp.cache.recurrent_ops import SpanTable


class Recurrent(Protocol):
    """The convolution and the scan of one device."""

    def short_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """As ``recurrent_ops.short_conv``."""
        ...

    def scan_delta(
        self,
        states_NHKV: Tensor,
        table: SpanTable,
        query_TGK: Tensor,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
        *,
        fixed: bool,
    ) -> Tensor:
        """As ``recurrent_ops.scan_delta``; ``fixed``: a row's bits do not depend on its company."""
        ...


class TorchRecurrent:
    """Plain torch: long spans by chunks, whose products depend on where a call begins."""

    def short_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        return recurrent_ops.short_conv(states_NCW, table, values_TC, weight_CX, bias_C, silu=silu)

    def scan_delta(
        self,
        states_NHKV: Tensor,
        table: SpanTable,
        query_TGK: Tensor,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
        *,
        fixed: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        longest = max((rows for _, rows, _, _ in table.entries), default=0)
        scan = recurrent_ops.scan_delta
        if longest >= CHUNK_ROWS and not fixed:
            scan = scan_delta_chunks
        out = scan(states_NHKV, table, query_TGK, key_TGK, value_THV, gate_TH, beta_TH)
        assert out is not None
        return out


class HostKernelRecurrent:
    """The host kernels, on the threads of the stage; what they do not serve, plain torch does.

    The scan is sequential for any number of rows, so prefill, decode and windows share their bits.
    """

    def __init__(self, kernels: HostRecurrent) -> None:
        self._kernels = kernels
        self._torch = TorchRecurrent()

    def short_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        if not host_recurrent.serves(values_TC.dtype, taps=states_NCW.shape[2]):
            return self._torch.short_conv(
                states_NCW, table, values_TC, weight_CX, bias_C, silu=silu
            )
        return self._kernels.short_conv(
            states_NCW, table, values_TC, weight_CX, bias_C, silu=silu,
            threads=torch.get_num_threads(),
        )  # fmt: skip

    def scan_delta(
        self,
        states_NHKV: Tensor,
        table: SpanTable,
        query_TGK: Tensor,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
        *,
        fixed: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        rows = states_NHKV, table, query_TGK, key_TGK, value_THV, gate_TH, beta_TH
        if not host_recurrent.serves(value_THV.dtype, key_size=key_TGK.shape[2]):
            return self._torch.scan_delta(*rows, fixed=fixed)
        return self._kernels.scan_delta(*rows, threads=torch.get_num_threads())


class CudaKernelRecurrent:
    """The kernels that ``cuda_ops`` has loaded for the states' device; the scan is sequential."""

    def short_conv(
        self,
        states_NCW: Tensor,
        table: SpanTable,
        values_TC: Tensor,
        weight_CX: Tensor,
        bias_C: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        return torch.ops.memkv.short_conv(
            states_NCW, table.spans, values_TC, weight_CX, bias_C, silu, len(values_TC)
        )

    def scan_delta(
        self,
        states_NHKV: Tensor,
        table: SpanTable,
        query_TGK: Tensor,
        key_TGK: Tensor,
        value_THV: Tensor,
        gate_TH: Tensor,
        beta_TH: Tensor,
        *,
        fixed: bool,
    ) -> Tensor:
        """See ``Recurrent``."""
        rows = query_TGK, key_TGK, value_THV, gate_TH, beta_TH
        if key_TGK.shape[2] > cuda_recurrent.MAX_KEY_SIZE:
            return TorchRecurrent().scan_delta(states_NHKV, table, *rows, fixed=fixed)
        return torch.ops.memkv.scan_delta(states_NHKV, table.spans, *rows)


def recurrent_for(device: torch.device) -> Recurrent:
    """What serves recurrent layers on ``device``: its kernels if they are loaded, or torch."""
    if cuda_ops.loaded(device) is not None:
        return CudaKernelRecurrent()
    kernels = host_recurrent.loaded() if device.type == "cpu" else None
    return TorchRecurrent() if kernels is None else HostKernelRecurrent(kernels)
