"""ggml's own codec, where ``llama_cpp`` is installed: a peer to measure and to compare with.

``ggml_quantize_chunk`` and ``dequantize_row_…`` are in its ``libggml-base``. Of the five formats
only q8_0 has a vector path to quantise, ``quantize_row_q8_0`` of ``libggml-cpu``; it rounds in
another way, so a few codes are a neighbour of the other's.
"""

import ctypes
import importlib.util
from pathlib import Path

import torch

from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import Format

# ggml's numbers of its types.
TYPES = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
VECTOR_FORMATS = ("q8_0",)

_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64


class Ggml:
    """The codec in ``folder``'s libraries; ConfigError where they cannot be loaded.

    Values are dense f32 of whole groups, blocks dense uint8 of ``fmt.group_bytes`` a group.
    InternalError for others.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._base, self._cpu = (
                ctypes.CDLL(str(folder / f"libggml-{part}.so")) for part in ("base", "cpu")
            )
        except OSError as error:
            raise ConfigError(f"ggml: {error}", "reinstall llama-cpp-python") from error
        self._chunk = self._base.ggml_quantize_chunk
        self._chunk.argtypes = (ctypes.c_int, _POINTER, _POINTER, _I64, _I64, _I64, _POINTER)
        self._chunk.restype = ctypes.c_size_t

    def quantise_chunk(self, fmt: Format, values: torch.Tensor, blocks: torch.Tensor) -> None:
        """``values`` into ``blocks`` by ``ggml_quantize_chunk``."""
        _check(fmt, values, blocks)
        source, target = values.data_ptr(), blocks.data_ptr()
        self._chunk(TYPES[fmt.name], source, target, 0, 1, values.numel(), None)

    def quantise_vectors(self, fmt: Format, values: torch.Tensor, blocks: torch.Tensor) -> None:
        """``values`` into ``blocks`` by the vector path; ``fmt`` in VECTOR_FORMATS."""
        _check(fmt, values, blocks)
        call = getattr(self._cpu, f"quantize_row_{fmt.name}")
        call.argtypes, call.restype = (_POINTER, _POINTER, _I64), None
        call(values.data_ptr(), blocks.data_ptr(), values.numel())

    def dequantise(self, fmt: Format, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """``blocks`` into ``values``."""
        _check(fmt, values, blocks)
        call = getattr(self._base, f"dequantize_row_{fmt.name}")
        call.argtypes, call.restype = (_POINTER, _POINTER, _I64), None
        call(blocks.data_ptr(), values.data_ptr(), values.numel())


def find() -> Ggml | None:
    """ggml as ``llama_cpp`` brings it; None where it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return Ggml(Path(spec.origin).parent / "lib")


def _check(fmt: Format, values: torch.Tensor, blocks: torch.Tensor) -> None:
    groups, rest = divmod(values.numel(), fmt.group)
    if (
        rest
        or fmt.name not in TYPES
        or (values.dtype, blocks.dtype) != (torch.float32, torch.uint8)
        or not (values.is_contiguous() and blocks.is_contiguous())
        or blocks.numel() != groups * fmt.group_bytes
    ):
        raise InternalError(
            f"ggml: {values.numel()} values of {values.dtype} and {blocks.numel()} bytes are no"
            f" whole groups of {fmt.name}"
        )
