"""Rows into records and out of records on the CPU: ``kernels/host/codec_host.cpp``.

Byte for byte what ``codec.py`` does, at the speed of memory. Calls release the GIL.

Shape legend: T rows of the step, H KV heads, D head size, N records, B rows of a record.
"""

import ctypes
from functools import cache

import torch

from memkv_pp.errors import InternalError
from memkv_pp.formats import FORMATS, Format
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.rotation import rotation_norm, sign_tables
from memkv_pp.small_floats import to_f32

# The ids of `Format` in kernels/codec/blocks.h, where an `e` format is the one without the suffix,
# and of `MemkvType` in kernels/host/codec_host.cpp.
BASE_FORMATS = (
    *("f32", "f16", "bf16", "fp8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    *("nvfp4", "turbo8", "turbo4", "turbo3", "turbo2"),
)
FORMAT_IDS = {
    name: BASE_FORMATS.index(name.removesuffix("e") if fmt.exponent else name)
    for name, fmt in FORMATS.items()
}
TYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_DONE = 0


class _Part(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("record_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


class _Side(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_size", ctypes.c_int64),
        ("num_records", ctypes.c_int64),
        ("record_rows", ctypes.c_int64),
        ("codes", _Part),
        ("scales", _Part),
        ("exponents", _Part),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
    )


class HostCodec:
    """The kernels of a loaded library. ``path`` is its vector code: avx512, avx2 or portable.

    ``codes`` and ``scales`` are uint8 [N, H, B, row bytes], views of an arena with a dense last
    dimension; ``exponents``, of an ``e`` format, are uint8 [N, H, 1, 1], and None means 127 for all.
    All tensors are on the CPU.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.memkv_path.restype = ctypes.c_char_p
        self.path: str = library.memkv_path().decode()
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        side, f32 = ctypes.POINTER(_Side), ctypes.c_float
        self._append = library.memkv_append
        self._append.argtypes = (side, pointer, i32, i64, i64, i64, pointer, pointer, f32)
        self._append.restype = i32
        self._gather = library.memkv_gather
        self._gather.argtypes = (side, pointer, i64, pointer, i32, f32)
        self._gather.restype = i32

    @staticmethod
    def covers(fmt: Format, codes: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether rows of ``dtype`` can be packed into ``codes``, or ``codes`` unpacked to them."""
        return codes.device.type == "cpu" and fmt.name in FORMAT_IDS and dtype in TYPE_IDS

    def append(
        self,
        fmt: Format,
        codes: torch.Tensor,
        scales: torch.Tensor,
        records_T: torch.Tensor,
        rows_T: torch.Tensor,
        values_THD: torch.Tensor,
        scale: float = 1.0,
        *,
        exponents: torch.Tensor | None = None,
    ) -> None:
        """Pack ``values_THD`` into (record, row) pairs, int64; a negative record writes nothing.

        Rows of a rotated format are rotated first. Row 0 of a record sets its exponents, for all
        rows of the call. ``scale`` is fp8's. InternalError, with nothing written, for shapes that do not fit and for
        records or rows that are not there.
        """
        heads, head_size = values_THD.shape[1:]
        side = _side(fmt, codes, scales, exponents, head_size)
        if heads != codes.shape[1] or not len(records_T) == len(rows_T) == len(values_THD):
            raise InternalError(
                f"append: {len(records_T)} records, {len(rows_T)} rows, values"
                f" {list(values_THD.shape)} for {codes.shape[1]} heads"
            )
        if head_size and values_THD.stride(2) != 1:
            values_THD = values_THD.contiguous()
        records, rows = _int64(records_T), _int64(rows_T)
        result = self._append(
            ctypes.byref(side),
            values_THD.data_ptr(),
            TYPE_IDS[values_THD.dtype],
            len(records),
            values_THD.stride(0),
            values_THD.stride(1),
            records.data_ptr(),
            rows.data_ptr(),
            fp8_reciprocal(scale) if fmt.name == "fp8" else 1.0,
        )
        if result != _DONE:
            raise InternalError(
                f"append: a record or a row is outside [0, {side.num_records}) or"
                f" [0, {side.record_rows})"
            )

    def gather(
        self,
        fmt: Format,
        head_size: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        records_N: torch.Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        *,
        exponents: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All rows of ``records_N``, unpacked in order, rotated as stored: [H, N * B, D] in ``dtype``.

        Written to ``out`` if it is given, dense and of that shape. InternalError for a record that
        is not there and for an ``out`` that does not fit.
        """
        side = _side(fmt, codes, scales, exponents, head_size)
        records = _int64(records_N)
        shape = (codes.shape[1], len(records) * codes.shape[2], head_size)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        elif out.shape != shape or out.dtype is not dtype or not out.is_contiguous():
            raise InternalError(f"gather: out is no dense {list(shape)} of {dtype}")
        result = self._gather(
            ctypes.byref(side),
            records.data_ptr(),
            len(records),
            out.data_ptr(),
            TYPE_IDS[dtype],
            to_f32(scale),
        )
        if result != _DONE:
            raise InternalError(f"gather: a record is outside [0, {side.num_records})")
        return out


def _side(
    fmt: Format,
    codes: torch.Tensor,
    scales: torch.Tensor,
    exponents: torch.Tensor | None,
    head_size: int,
) -> _Side:
    widths = fmt.code_row_bytes(head_size), fmt.scale_row_bytes(head_size)
    if (codes.shape[3], scales.shape[3]) != widths or codes.shape[:3] != scales.shape[:3]:
        raise InternalError(
            f"rows of {head_size} elements of {fmt.name} are {widths[0]} + {widths[1]} bytes, got"
            f" codes {list(codes.shape)} and scales {list(scales.shape)}"
        )
    num_records, heads, record_rows, _ = codes.shape
    if not fmt.exponent or exponents is None:
        exponent_part = _Part(None, 0, 0, 0)
    elif exponents.shape == (num_records, heads, 1, 1):
        exponent_part = _Part(exponents.data_ptr(), *exponents.stride()[:3])
    else:
        raise InternalError(
            f"exponents of {num_records} records and {heads} heads are one byte each, got"
            f" {list(exponents.shape)}"
        )
    before, after = (x.data_ptr() for x in _factors(head_size)) if fmt.rotated else (None, None)
    return _Side(
        FORMAT_IDS[fmt.name],
        heads,
        head_size,
        num_records,
        record_rows,
        _Part(codes.data_ptr(), *codes.stride()[:3]),
        _Part(scales.data_ptr(), *scales.stride()[:3]),
        exponent_part,
        before,
        after,
    )


@cache
def _factors(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row is multiplied by before it is transformed, and after: signs, signs and the norm."""
    before, after = sign_tables(size)
    norm = rotation_norm(size)
    return torch.tensor(before, dtype=torch.float32), torch.tensor([norm * x for x in after])


def _int64(ids: torch.Tensor) -> torch.Tensor:
    return ids.to(torch.int64).contiguous()
