"""What a CUDA kernel is launched with: the launcher's protocol, kernel names, checks of arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import Format

# The places of the names are the ids of `Format` in kernels/codec/blocks.h. A format with the suffix
# e has the kernels of the one without it.
CUDA_FORMATS = (
    *("f32", "f16", "bf16", "fp8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    *("nvfp4", "turbo8", "turbo4", "turbo3", "turbo2"),
)
CODEC, ATTEND, COPY, ROTATE = "codec", "attend", "copy", "rotate"

CUDA_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_QUERIES = (1, 2, 4, 8)

Argument = Tensor | np.generic


class Launcher(Protocol):
    """Runs one kernel; ordered on the current stream of the tensors' device."""

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Run ``kernel`` (a C++ expression such as ``append<4, 0>``) of ``kernels/cuda/<source>.cu``.

        A tensor is passed as its address, a numpy scalar as its value.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSide:
    """K or V of one layer in every record; ``scale`` is fp8's.

    ``exponents`` is uint8 [N, H, 1, 1], or [N, H, 1, 0] for a format without them.
    """

    format: Format
    head_size: int
    codes: Tensor
    scales: Tensor
    exponents: Tensor
    scale: float = 1.0


def append_kernel(fmt: Format, dtype: torch.dtype) -> str:
    """The kernel that packs rows of ``dtype`` into ``fmt``."""
    return f"append<{_format_id(fmt)}, {dtype_id(dtype)}>"


def exponents_kernel(fmt: Format, dtype: torch.dtype) -> str:
    """The kernel that sets the exponents of records for rows of ``dtype``."""
    return f"set_exponents<{_format_id(fmt)}, {dtype_id(dtype)}>"


def gather_kernel(fmt: Format, dtype: torch.dtype) -> str:
    """The kernel that unpacks rows of ``fmt`` into ``dtype``."""
    return f"gather<{_format_id(fmt)}, {dtype_id(dtype)}>"


def attend_kernel(key: Format, value: Format, dtype: torch.dtype, query_vectors: int) -> str:
    """The kernel that attends over ``key`` and ``value`` rows, for so many vectors per KV head."""
    queries = queries_held(query_vectors)
    return f"attend<{_format_id(key)}, {_format_id(value)}, {dtype_id(dtype)}, {queries}>"


def queries_held(query_vectors: int) -> int:
    """How many query vectors a block of that kernel takes."""
    return next((n for n in _QUERIES if n >= query_vectors), _QUERIES[-1])


def merge_kernel(dtype: torch.dtype) -> str:
    """The kernel that joins the splits of ``attend``."""
    return f"merge<{dtype_id(dtype)}>"


def rotate_kernel(dtype: torch.dtype, size: int) -> str:
    """The kernel that rotates rows of ``size`` elements."""
    return f"rotate<{dtype_id(dtype)}, {size}>"


def _format_id(fmt: Format) -> int:
    return CUDA_FORMATS.index(fmt.name.removesuffix("e"))


def dtype_id(dtype: torch.dtype) -> int:
    """The number of a row dtype in the kernels; ConfigError for one they do not have."""
    if dtype not in CUDA_DTYPES:
        raise ConfigError(
            f"rows of {dtype} have no CUDA kernel", "use float32, float16 or bfloat16"
        )
    return CUDA_DTYPES[dtype]


def check(holds: bool, message: str) -> None:
    """Raise InternalError with ``message`` unless ``holds``."""
    if not holds:
        raise InternalError(f"CUDA kernel: {message}")


def check_ids(count: int, *ids: Tensor) -> None:
    """Raise InternalError unless each of ``ids`` holds ``count`` int64."""
    for tensor in ids:
        good = tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.shape == (count,)
        check(good, f"ids are no contiguous int64 [{count}]")


def check_side(side: PackedSide, heads: int) -> tuple[int, int]:
    """Bytes from record to record, and rows of a record; InternalError for views of another form."""
    codes, scales = side.codes, side.scales
    row_bytes = side.format.code_row_bytes(side.head_size)
    check(codes.shape[1:] == (heads, codes.shape[2], row_bytes), "codes do not fit the format")
    scale_bytes = side.format.scale_row_bytes(side.head_size)
    check(scales.shape == (*codes.shape[:3], scale_bytes), "scales do not fit the format")
    check(codes.dtype == scales.dtype == torch.uint8, "codes and scales are no bytes")
    check(
        side.exponents.shape == (*codes.shape[:2], 1, 1 if side.format.exponent else 0)
        and side.exponents.dtype == torch.uint8,
        "exponents do not fit the format",
    )
    for part, size in ((codes, row_bytes), (scales, scale_bytes)):
        steps = (codes.stride(0), codes.shape[2] * size, size, 1)
        check(not size or part.stride() == steps, "a part is not laid [head][row] in records")
        check(not size or part.data_ptr() % 4 == 0, "a part is not aligned")
    if side.format.exponent:
        laid = side.exponents.stride(0) == codes.stride(0) and side.exponents.stride(1) == 1
        check(laid, "exponents are not laid [head] in records")
    return codes.stride(0), codes.shape[2]
