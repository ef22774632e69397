"""Attention over packed rows where they lie, on CUDA devices: ``kernels/cuda/attend.cu``."""

import torch

from memkv_pp.cache import cuda_ops
from memkv_pp.cache.attention import SegmentTable
from memkv_pp.cache.cuda_kernels import MAX_HEAD_SIZE, SPLIT_ROWS
from memkv_pp.cache.ops import SideView


class CudaAttention:
    """A ``PackedAttention`` of the kernels that ``cuda_ops`` has loaded for the sides' device.

    Splits of the keys begin at multiples of ``cuda_kernels.SPLIT_ROWS`` whatever the company, so
    one kernel serves with and without ``--deterministic``.
    """

    def serves(self, side: SideView) -> bool:
        """Whether kernels are loaded for the side's device, and its heads are not too large."""
        return cuda_ops.loaded(side.codes.device) is not None and side.head_size <= MAX_HEAD_SIZE

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
        """As ``PackedAttention.attend`` says; the log-sum-exp of a row of no segment is -inf."""
        out, log_sum_exp = torch.ops.memkv.attend(
            query_TQD,
            *(k.codes, k.scales, k.exponents, k.format.name, k.fp8.value),
            *(v.codes, v.scales, v.exponents, v.format.name, v.fp8.value, v.head_size),
            *(table.records, table.segments, table.max_rows, table.max_length),
            *(scale, window, cap, sinks_Q, SPLIT_ROWS),
        )
        if log_sum_exp_TQ is not None:
            log_sum_exp_TQ.copy_(log_sum_exp)
        return out
