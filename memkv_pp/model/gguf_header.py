"""A lean scan of a GGUF header: metadata and the tensor directory, no tensor data.

::

    "GGUF" | version u32 | tensors u64 | keys u64 | key-values … | tensor infos … | pad | data

    key-value    key (string) | type u32 | value
    string       length u64 | bytes           array   item type u32 | count u64 | items
    tensor info  name (string) | dims u32 | dim u64 … | type u32 | offset u64 (from the data)

The file is hostile until it is read: every count, length, offset and product is held against the
bytes that remain before anything is allocated for it. Arrays that nobody asked for (a vocabulary)
are stepped over without an object per item.
"""

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from memkv_pp.errors import ConfigError, GeometryError, ModelError
from memkv_pp.model.ggml_types import GGML_TYPES
from memkv_pp.model.gguf_cursor import Cursor
from memkv_pp.units import MIB, align_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 64 * MIB
MAX_UNASKED_ITEMS = 1 << 20
MAX_DIMS = 4
MAX_OFFSET = (1 << 63) - 1

# struct code of each scalar value type of the format, by its id
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
BOOL, STRING, ARRAY = 7, 8, 9

_LEAST_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One entry of the directory. ``shape`` is in ggml order: the row length comes first.

    ``offset`` and ``num_bytes`` are bytes; ``offset`` counts from the file's data.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """What a GGUF file says about itself. ``skipped`` holds the length of each array not read."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    skipped: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        """``general.architecture``; GeometryError if it is missing or no text."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise GeometryError(f"{self.path}: general.architecture is missing or no text")
        return value

    def check_extents(self) -> None:
        """Raise ModelError naming the first tensor whose bytes run past the end of the file.

        A file of metadata alone describes a model; only loading its weights needs the data.
        """
        for tensor in self.tensors:
            end = self.data_offset + tensor.offset + tensor.num_bytes
            if end > self.file_bytes:
                raise ModelError(
                    f"{self.path}: tensor {tensor.name!r} ends at byte {end}, the file has"
                    f" {self.file_bytes} bytes",
                    "the file is truncated or holds metadata alone; fetch it again",
                )


def read_header(path: str | Path, *, want: Collection[str] | None = None) -> GGUFHeader:
    """Scan the header of the little-endian GGUF v2 or v3 file at ``path``.

    ``want`` names keys, or beginnings of keys, whose arrays are read whatever their length, as in
    ``{"tokenizer.ggml.tokens"}``. Without it every array is read but those under ``tokenizer.``
    and those of over a million items. Raises ConfigError if the file cannot be opened, and
    GeometryError, naming the file, byte and field, for everything that is wrong inside.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise GeometryError(f"{path}: at byte 0: magic: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_header(data, path, want=want)
    except OSError as error:
        raise ConfigError(f"MODEL: {path} cannot be read: {error.strerror}") from error


def parse_header(
    data: bytes | mmap.mmap, path: Path, *, want: Collection[str] | None = None
) -> GGUFHeader:
    """As ``read_header``, over bytes already at hand; ``path`` is for messages."""
    cursor = Cursor(data, path)
    version, num_tensors, num_keys = _preamble(cursor)
    metadata: dict[str, Value] = {}
    skipped: dict[str, int] = {}
    asked = tuple(want or ())
    for _ in range(num_keys):
        at = cursor.offset
        key = cursor.string("key", MAX_KEY_BYTES)
        if not key or key in metadata or key in skipped:
            cursor.fail(f"key {key[:80]!r}", "is a duplicate" if key else "is empty", at)
        value = _read_value(cursor, key, asked)
        if isinstance(value, _Skipped):
            skipped[key] = value.count
        else:
            metadata[key] = value
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        cursor.fail("general.alignment", "is no integer")
    if not 0 < alignment <= 1 << 30 or alignment & (alignment - 1):
        cursor.fail("general.alignment", f"{alignment} is no power of two up to 2^30")
    tensors = _read_directory(cursor, num_tensors, alignment)
    return GGUFHeader(
        path=path,
        version=version,
        metadata=metadata,
        skipped=skipped,
        tensors=tensors,
        alignment=alignment,
        data_offset=align_up(cursor.offset, alignment),
        file_bytes=cursor.end,
    )


class _Skipped:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    """(version, tensors, keys)"""
    if bytes(cursor.data[:4]) != MAGIC:
        cursor.fail("magic", f"{bytes(cursor.data[:4])!r} is not {MAGIC!r}")
    cursor.offset = 4
    version = cursor.integer("I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        cursor.fail(
            "version",
            f"big-endian GGUF (version {swapped}) is not read"
            if swapped in (1, *VERSIONS)
            else f"GGUF version {version} is not read, only 2 and 3 are",
            4,
        )
    num_tensors = cursor.integer("Q", "tensor count")
    num_keys = cursor.integer("Q", "key count")
    cursor.need(num_tensors * _LEAST_TENSOR_BYTES, f"tensor count {num_tensors}")
    cursor.need(num_keys * _LEAST_KEY_VALUE_BYTES, f"key count {num_keys}")
    return version, num_tensors, num_keys


def _read_value(cursor: Cursor, key: str, asked: tuple[str, ...]) -> Value | _Skipped:
    field = f"value of {key[:80]!r}"
    at = cursor.offset
    kind = cursor.integer("I", f"type of {key[:80]!r}")
    if kind == ARRAY:
        return _read_array(cursor, key, field, asked)
    if kind == STRING:
        return cursor.string(field, MAX_STRING_BYTES)
    if kind not in SCALARS:
        cursor.fail(field, f"unknown value type {kind}", at)
    value = cursor.scalar(SCALARS[kind], field)
    return cursor.boolean(value, field) if kind == BOOL else value


def _read_array(
    cursor: Cursor, key: str, field: str, asked: tuple[str, ...]
) -> tuple[Scalar, ...] | _Skipped:
    at = cursor.offset
    kind = cursor.integer("I", f"item type of {key[:80]!r}")
    count = cursor.integer("Q", f"item count of {key[:80]!r}")
    if kind == ARRAY:
        cursor.fail(field, "arrays of arrays are not read", at)
    if kind != STRING and kind not in SCALARS:
        cursor.fail(field, f"unknown item type {kind}", at)
    size = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind])
    cursor.need(count * size, f"{field}, {count} items")
    wanted = bool(asked) and key.startswith(asked)
    if not wanted and (key.startswith("tokenizer.") or count > MAX_UNASKED_ITEMS):
        if kind == STRING:
            cursor.skip_strings(count, field)
        else:
            cursor.offset += count * size
        return _Skipped(count)
    if kind == STRING:
        return tuple(cursor.string(field, MAX_STRING_BYTES) for _ in range(count))
    items = struct.unpack_from(f"<{count}{SCALARS[kind]}", cursor.data, cursor.offset)
    if kind == BOOL:
        items = tuple(cursor.boolean(item, field) for item in items)
    cursor.offset += count * size
    return items


def _read_directory(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    seen: set[str] = set()
    for _ in range(count):
        at = cursor.offset
        tensor = _read_tensor(cursor, alignment)
        if tensor.name in seen:
            cursor.fail(f"tensor {tensor.name!r}", "is a duplicate", at)
        seen.add(tensor.name)
        tensors.append(tensor)
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            cursor.fail(
                f"offset of tensor {after.name!r}",
                f"{after.offset} lies within tensor {before.name!r}, which ends at"
                f" {before.offset + before.num_bytes}",
            )
    return tuple(tensors)


def _read_tensor(cursor: Cursor, alignment: int) -> TensorInfo:
    at = cursor.offset
    name = cursor.string("tensor name", MAX_KEY_BYTES)
    if not name:
        cursor.fail("tensor name", "is empty", at)
    field = f"of tensor {name[:80]!r}"
    at = cursor.offset
    num_dims = cursor.integer("I", f"dimensions {field}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"dimensions {field}", f"{num_dims} is not 1 to {MAX_DIMS}", at)
    at = cursor.offset
    shape = tuple(cursor.integer("Q", f"shape {field}") for _ in range(num_dims))
    num_elements = 1
    for size in shape:
        num_elements *= size
    if not 0 < num_elements <= MAX_OFFSET:
        cursor.fail(f"shape {field}", f"{list(shape)} has no usable number of elements", at)
    at = cursor.offset
    type_id = cursor.integer("I", f"type {field}")
    if type_id not in GGML_TYPES:
        cursor.fail(f"type {field}", f"unknown ggml type {type_id}", at)
    ggml = GGML_TYPES[type_id]
    if shape[0] % ggml.block_elements:
        cursor.fail(
            f"shape {field}",
            f"rows of {shape[0]} are no multiple of {ggml.name}'s {ggml.block_elements}",
            at,
        )
    at = cursor.offset
    offset = cursor.integer("Q", f"offset {field}")
    num_bytes = num_elements // ggml.block_elements * ggml.block_bytes
    if offset % alignment:
        cursor.fail(f"offset {field}", f"{offset} is no multiple of the alignment {alignment}", at)
    if offset + num_bytes > MAX_OFFSET:
        cursor.fail(f"offset {field}", f"{offset} + {num_bytes} bytes is past 2^63", at)
    return TensorInfo(
        name=name,
        shape=shape,
        type_id=type_id,
        type_name=ggml.name,
        offset=offset,
        num_elements=num_elements,
        num_bytes=num_bytes,
    )
