"""Orders in which other engines keep cached rows, as permutations of a record's bytes.

``B`` rows of one side of one layer, ``H`` heads of ``G`` groups each::

    record    codes  [head][row][group], then scales [head][row][group]     records.py
    ggml      [row][head][group] of whole ggml blocks                       llama.cpp's K, and its V
                                                                            where not transposed
    sections  codes  [row][head][group], then scales [row][head][group]     a block of the source's
                                                                            pools

``paged-cache-and-swap.md`` 1.3 has the sections, ``dual-cache-and-pipeline.md`` 1.3 a plane in ggml
order with 8 bytes behind it. A ggml block is its header, then the fifth bits where there are any,
then the nibbles or bytes (``packing.py``); f32, f16 and bf16 are their own blocks of one element.

Bytes move, nothing is packed anew: elements keep their places in a head. llama.cpp rotates the
heads of some architectures (``model.weights.INTERLEAVED_ARCHITECTURES``) in neighbouring pairs
where transformers rotates halves, so K of those is not the same elements in the same order; V is,
and so is K of the others.
"""

from collections.abc import Iterator
from enum import StrEnum

from memkv_pp.errors import FormatError
from memkv_pp.formats import Family, Format
from memkv_pp.records import Side

FIFTH_BIT_FORMATS = ("q5_0", "q5_1")
NIBBLE_BYTES = 16


class RowOrder(StrEnum):
    """See the module's table."""

    GGML = "ggml"
    SECTIONS = "sections"


def check_order(fmt: Format, order: RowOrder) -> None:
    """FormatError, naming both, for a format that rows in ``order`` cannot have."""
    if order is RowOrder.GGML and fmt.family not in (Family.GGML, Family.PLAIN):
        raise FormatError(
            f"{fmt.name} is no type of ggml: its rows have no ggml order", "use the sections order"
        )
    if fmt.exponent:
        raise FormatError(
            f"{fmt.name} keeps an exponent per record and head, which the {order} order has no"
            " place for",
            f"cache these layers in {fmt.name.removesuffix('e')}",
        )


def record_offsets(side: Side, order: RowOrder) -> tuple[int, ...]:
    """For each byte of a full record's rows of ``side`` in ``order``: its offset in the record.

    Every byte of the side's codes and scales comes exactly once. FormatError as ``check_order``.

    >>> from memkv_pp.formats import parse_format
    >>> from memkv_pp.records import Part
    >>> codes, none = Part(0, 2, 2, 2), Part(16, 2, 2, 0)
    >>> record_offsets(Side(parse_format("f16"), 2, 1, codes, none, none), RowOrder.GGML)
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    check_order(side.format, order)
    offsets = _ggml_offsets if order is RowOrder.GGML else _section_offsets
    return tuple(offsets(side))


def rows_of_record(side: Side, record: bytes | bytearray, order: RowOrder) -> bytes:
    """All rows of ``side`` in ``record``, in ``order``."""
    return bytes(record[offset] for offset in record_offsets(side, order))


def rows_into_record(side: Side, rows: bytes, order: RowOrder, record: bytearray) -> None:
    """Write all rows of ``side`` into ``record``: the inverse of ``rows_of_record``.

    FormatError, with nothing written, for another number of bytes.
    """
    offsets = record_offsets(side, order)
    if len(rows) != len(offsets):
        raise FormatError(
            f"{side.codes.rows} rows of {side.heads} heads of {side.head_size} elements of"
            f" {side.format.name} are {len(offsets)} bytes, got {len(rows)}"
        )
    for offset, byte in zip(offsets, rows, strict=True):
        record[offset] = byte


def _ggml_offsets(side: Side) -> Iterator[int]:
    fmt = side.format
    codes = list(range(fmt.code_bytes))
    if fmt.name in FIFTH_BIT_FORMATS:
        codes = codes[NIBBLE_BYTES:] + codes[:NIBBLE_BYTES]
    for row in range(side.codes.rows):
        for head in range(side.heads):
            scale_row = side.scales.offset + _row_at(side, head, row) * side.scales.row_bytes
            code_row = side.codes.offset + _row_at(side, head, row) * side.codes.row_bytes
            for group in range(side.head_size // fmt.group):
                first = scale_row + group * fmt.scale_bytes
                yield from range(first, first + fmt.scale_bytes)
                yield from (code_row + group * fmt.code_bytes + code for code in codes)


def _section_offsets(side: Side) -> Iterator[int]:
    for part in (side.codes, side.scales):
        for row in range(part.rows):
            for head in range(part.heads):
                first = part.offset + _row_at(side, head, row) * part.row_bytes
                yield from range(first, first + part.row_bytes)


def _row_at(side: Side, head: int, row: int) -> int:
    return head * side.codes.rows + row
