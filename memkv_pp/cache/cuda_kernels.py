"""The host side of the CUDA kernels: shapes checked, grids and shared memory computed, launched.

What launches is a ``Launcher``: CuPy on a device (``cuda_ops.py``), or the block-and-thread
emulation of ``memkv_pp.testing.emulated`` on the CPU; both run the same sources with the same
arguments.

Shape legend: T rows of the step, H KV heads, G query heads per KV head, D head size, N records,
B rows of a record, S sequences. ``codes`` and ``scales`` are uint8 [N, H, B, row bytes] views of an
arena that starts at a multiple of 16; ids are int64 on the arena's device.
"""

import math

import numpy as np
import torch
from torch import Tensor

from memkv_pp.cache.cuda_launch import (
    ATTEND,
    CODEC,
    COPY,
    ROTATE,
    Argument,
    Launcher,
    PackedSide,
    append_kernel,
    attend_kernel,
    check,
    check_ids,
    check_side,
    exponents_kernel,
    gather_kernel,
    merge_kernel,
    queries_held,
    rotate_kernel,
)
from memkv_pp.cache.rotation import sign_rows
from memkv_pp.errors import ConfigError, FormatError
from memkv_pp.formats import Family
from memkv_pp.packing import fp8_reciprocal
from memkv_pp.rotation import rotation_norm
from memkv_pp.units import MIB, ceil_div

SPLIT_ROWS = 512
PARTIAL_BYTES = 64 * MIB
MAX_HEAD_SIZE = 512

_THREADS = 128
_TILE = 32
_CODEC_ELEMENTS = 4096
_SHARES = 16  # blocks that share a copied unit, at most
_NULL = np.uint64(0)


class CudaKernels:
    """Every kernel as a function of tensors. Methods raise InternalError for tensors that do not fit."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def launcher(self) -> Launcher:
        """What launches them, for kernels beside these."""
        return self._launcher

    def append(
        self, side: PackedSide, values_THD: Tensor, records_T: Tensor, rows_T: Tensor
    ) -> None:
        """Pack each row into its (record, row); a negative record writes nothing.

        Pairs are distinct. The bytes are those of ``packing.pack_group``; NaN becomes its one NaN
        even where rows are in the format's own dtype. Rows of a rotated format are rotated on the
        way. Row 0 of a record sets the exponents of an ``e`` format, so it comes before the others,
        or with them.
        """
        num_rows, heads, head_size = values_THD.shape
        record_bytes, record_rows = check_side(side, heads)
        check(head_size == side.head_size, f"rows of {head_size}, a side of {side.head_size}")
        check_ids(num_rows, records_T, rows_T)
        if not values_THD.numel():
            return
        fmt = side.format
        fmt.check_head_size(head_size)
        values_THD = values_THD.contiguous()
        first, second, norm = _NULL, _NULL, 1.0
        if fmt.rotated:
            first, second = sign_rows(head_size, values_THD.device)
            norm = rotation_norm(head_size)
        if fmt.exponent:
            self._launcher.launch(
                CODEC,
                exponents_kernel(fmt, values_THD.dtype),
                (ceil_div(num_rows * heads * 32, _THREADS), 1, 1),
                _THREADS,
                0,
                (
                    values_THD, records_T, rows_T, first, second, side.exponents,
                    np.int64(record_bytes), np.int64(num_rows), np.int32(heads),
                    np.int32(head_size), np.float32(norm),
                ),
            )  # fmt: skip
        groups = _CODEC_ELEMENTS // fmt.group
        self._launcher.launch(
            CODEC,
            append_kernel(fmt, values_THD.dtype),
            (ceil_div(values_THD.numel(), _CODEC_ELEMENTS), 1, 1),
            _THREADS,
            groups * ((fmt.group | 1) * 4 + fmt.group_bytes),
            (
                values_THD, records_T, rows_T, first, second, side.codes, side.scales,
                _exponents(side), np.int64(record_bytes), np.int64(num_rows), np.int32(heads),
                np.int32(record_rows), np.int32(head_size), np.float32(norm),
                np.float32(_encoding_factor(side)),
            ),
        )  # fmt: skip

    def gather(self, side: PackedSide, records_N: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows of the records, unpacked in order: [H, N * B, D] in ``dtype``, rotated as stored.

        Rows of a negative record, and rows that were never written, come out as anything.
        """
        heads = side.codes.shape[1]
        record_bytes, record_rows = check_side(side, heads)
        num_records = len(records_N)
        check_ids(num_records, records_N)
        out = side.codes.new_empty((heads, num_records * record_rows, side.head_size), dtype=dtype)
        if not out.numel():
            return out
        fmt = side.format
        self._launcher.launch(
            CODEC,
            gather_kernel(fmt, dtype),
            (ceil_div(out.numel(), _CODEC_ELEMENTS), 1, 1),
            _THREADS,
            _CODEC_ELEMENTS // fmt.group * (fmt.group | 1) * 4,
            (
                side.codes, side.scales, _exponents(side), np.int64(record_bytes), records_N,
                np.int64(num_records), out, np.int32(heads), np.int32(record_rows), np.int32(side.head_size),
                np.float32(_decoding_factor(side)),
            ),
        )  # fmt: skip
        return out

    def attend(
        self,
        query_THD: Tensor,
        key: PackedSide,
        value: PackedSide,
        records: Tensor,
        segments: Tensor,
        *,
        max_rows: int,
        max_length: int,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks_Q: Tensor | None = None,
        split_rows: int = SPLIT_ROWS,
        partial_bytes: int = PARTIAL_BYTES,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the new rows of each sequence over all of its cached rows.

        ``query_THD`` [T, H * G, D]. ``segments`` int64 [S, 4]: a sequence's first row in the query,
        its number of rows, its cached rows (the new ones among them), and where its records begin
        in ``records``; ``max_rows`` and ``max_length`` bound the second and third. Scores are
        ``cap * tanh(q . k * scale / cap)``, without the cap where it is 0. ``window``: a row sees so
        many keys, itself among them; 0 is all. ``sinks_Q``, f32 [H * G]: a further score of each
        query head, without a value. Queries and outputs are rotated as K and V are stored.

        Returns [T, H * G, D of V] in the query's dtype and the natural log-sum-exp of the keys'
        scores, f32 [T, H * G]; a row of no sequence, or that sees no key, is 0 with minus infinity.
        Sums are f32, over splits of ``split_rows`` keys whatever the company; their partial sums
        take at most ``partial_bytes``, or those of one row. ConfigError for a head size beyond 512.
        """
        heads = key.codes.shape[1]
        num_rows, query_heads, head_size = query_THD.shape
        record_bytes, record_rows = check_side(key, heads)
        fits = check_side(value, heads) == (record_bytes, record_rows)
        check(fits, "K and V lie in different records")
        check(head_size == key.head_size, f"queries of {head_size}, keys of {key.head_size}")
        check(query_heads % heads == 0, f"{query_heads} query heads over {heads} KV heads")
        check(split_rows > 0, f"split_rows {split_rows} is not positive")
        check(window >= 0 and cap >= 0, f"a window of {window}, a cap of {cap}")
        check_ids(len(records), records)
        whole = segments.dtype == torch.int64 and segments.is_contiguous()
        check(whole and segments.shape[1:] == (4,), "segments are no int64 [S, 4]")
        if sinks_Q is not None:
            whole = sinks_Q.dtype == torch.float32 and sinks_Q.is_contiguous()
            check(whole and sinks_Q.shape == (query_heads,), "sinks are no f32 of each query head")
        largest = max(head_size, value.head_size)
        if largest > MAX_HEAD_SIZE:
            raise ConfigError(
                f"head size {largest} is beyond {MAX_HEAD_SIZE}, what packed attention holds",
                "gather the rows and use the framework's attention for this layer",
            )
        splits = max(ceil_div(max_length, split_rows), 1)
        check(splits < 1 << 16, f"{splits} splits of {split_rows} rows are beyond a launch")
        query_THD = query_THD.contiguous()
        out = query_THD.new_empty((num_rows, query_heads, value.head_size))
        lse = query_THD.new_empty((num_rows, query_heads), dtype=torch.float32)
        group, row_bytes = query_heads // heads, 4 * splits * query_heads * value.head_size
        taken = max(partial_bytes // row_bytes, 1)
        vectors = max(max_rows, 1) * group
        queries = queries_held(vectors)
        chunks = ceil_div(max(min(max_rows, taken), 1) * group, queries)
        for first in range(0, num_rows, taken):
            rows = min(taken, num_rows - first)
            shape = (splits, rows, query_heads)
            partial = query_THD.new_empty((*shape, value.head_size), dtype=torch.float32)
            partial_lse = query_THD.new_full(shape, -math.inf, dtype=torch.float32)
            if len(segments):
                self._launcher.launch(
                    ATTEND,
                    attend_kernel(key.format, value.format, query_THD.dtype, vectors),
                    (len(segments), heads * chunks, splits),
                    _THREADS,
                    4 * (queries * (head_size + _TILE + 2) + _TILE * (largest | 1)),
                    (
                        query_THD, key.codes, key.scales, _exponents(key), value.codes,
                        value.scales, _exponents(value), records, segments, partial, partial_lse,
                        np.int64(record_bytes), np.int64(first), np.int64(rows), np.int64(window),
                        np.int32(heads), np.int32(group), np.int32(record_rows),
                        np.int32(head_size), np.int32(value.head_size), np.int32(split_rows),
                        np.float32(scale), np.float32(cap), np.float32(_decoding_factor(key)),
                        np.float32(_decoding_factor(value)),
                    ),
                )  # fmt: skip
            held = slice(first, first + rows)
            self._launcher.launch(
                ATTEND,
                merge_kernel(query_THD.dtype),
                (rows * query_heads, 1, 1),
                _THREADS,
                0,
                (
                    partial, partial_lse, _NULL if sinks_Q is None else sinks_Q, out[held],
                    lse[held], np.int64(rows * query_heads), np.int32(query_heads),
                    np.int32(value.head_size), np.int32(splits),
                ),
            )  # fmt: skip
        return out, lse

    def rotate(self, values: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """``second * H(first * x) / sqrt(D)`` of rows [..., D]; the inverse with the signs swapped.

        ``first`` and ``second`` are signs, f32 [D]; D is 64, 128, 256 or 512 (else FormatError).
        The bits are those of ``rotation.rotate``, rounded to the rows' dtype.
        """
        size = values.shape[-1]
        if size not in (64, 128, 256, 512):
            raise FormatError(f"a head of {size} elements cannot be rotated", "use 64 to 512")
        for signs in (first, second):
            whole = signs.dtype == torch.float32 and signs.is_contiguous()
            check(whole and signs.shape == (size,), f"signs are no f32 [{size}]")
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        num_rows = values.numel() // size
        if num_rows:
            self._launcher.launch(
                ROTATE,
                rotate_kernel(values.dtype, size),
                (ceil_div(num_rows * 32, _THREADS), 1, 1),
                _THREADS,
                0,
                (
                    values.contiguous(), first, second, out, np.int64(num_rows),
                    np.float32(rotation_norm(size)),
                ),
            )  # fmt: skip
        return out

    def copy_records(
        self, target: Tensor, source: Tensor, into: Tensor, out_of: Tensor, record_bytes: int
    ) -> None:
        """Copy record ``out_of[i]`` of ``source`` to record ``into[i]`` of ``target``, both 1-D bytes.

        A pair with a negative id is skipped. No record is written twice, or both read and written.
        """
        places = record_bytes, target.data_ptr(), source.data_ptr()
        check(not any(place % 16 for place in places), "records do not lie at multiples of 16")
        check_ids(len(into), into, out_of)
        if len(into):
            self._launcher.launch(
                COPY,
                "copy_records",
                (len(into), _shares(record_bytes // 16), 1),
                _THREADS,
                0,
                (target, source, into, out_of, np.int64(record_bytes)),
            )

    def copy_state(
        self,
        target: Tensor,
        source: Tensor,
        into: Tensor,
        out_of: Tensor,
        *,
        slot_bytes: int,
        offset: int,
        num_elements: int,
    ) -> None:
        """Copy ``num_elements`` f32 at byte ``offset`` of each slot, as ``copy_records`` does."""
        check(slot_bytes % 4 == offset % 4 == 0, f"offset {offset} of {slot_bytes} is no f32's")
        check(0 <= offset <= slot_bytes - 4 * num_elements, f"{num_elements} f32 leave the slot")
        check_ids(len(into), into, out_of)
        if len(into) and num_elements:
            self._launcher.launch(
                COPY,
                "copy_state",
                (len(into), _shares(num_elements), 1),
                _THREADS,
                0,
                (
                    target, source, into, out_of, np.int64(slot_bytes), np.int64(offset),
                    np.int64(num_elements),
                ),
            )  # fmt: skip


def _exponents(side: PackedSide) -> Argument:
    return side.exponents if side.format.exponent else _NULL


def _encoding_factor(side: PackedSide) -> float:
    return fp8_reciprocal(side.scale) if side.format.family is Family.SCALED else 1.0


def _decoding_factor(side: PackedSide) -> float:
    return side.scale if side.format.family is Family.SCALED else 1.0


def _shares(items: int) -> int:
    return min(ceil_div(items, _THREADS), _SHARES)
