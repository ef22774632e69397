"""Small GGUF files for tests: any metadata, any directory, written by the format's rules.

Independent of the reader on purpose, so that each can convict the other.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TYPE_IDS = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7,
    "string": 8, "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip
_CODES = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?",
    "u64": "Q", "i64": "q", "f64": "d",
}  # fmt: skip
_ARRAY_ID = 9

# ggml type: (id, elements of a block, bytes of a block)
_TENSOR_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with its type spelled out, as in ``Typed("u64", 5)``; a list is an array."""

    type: str
    value: object


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: shape in ggml order (row length first), ggml type, and its bytes.

    Without ``data`` the bytes are zeros. ``offset`` replaces the right one, to write a wrong file.
    """

    name: str
    shape: tuple[int, ...]
    type: str = "F32"
    data: bytes | None = None
    offset: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        _, block, block_bytes = _TENSOR_TYPES[self.type]
        count = 1
        for size in self.shape:
            count *= size
        return count // block * block_bytes


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    with_data: bool = True,
) -> bytes:
    """The bytes of a GGUF file. ``with_data=False`` ends it before the first tensor's data.

    Python values become u32 (i64 if negative or too large), f32, bool, string, and arrays of these;
    ``Typed`` says otherwise. ``general.alignment`` is written when ``alignment`` is not 32.
    """
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        at = offset if tensor.offset is None else tensor.offset
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        out += struct.pack("<IQ", _TENSOR_TYPES[tensor.type][0], at)
        offset += -(-tensor.num_bytes // alignment) * alignment
    if with_data and tensors:
        out += bytes(-len(out) % alignment)
        for tensor in tensors:
            data = bytes(tensor.num_bytes) if tensor.data is None else tensor.data
            out += data + bytes(-len(data) % alignment)
    return bytes(out)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    with_data: bool = True,
) -> Path:
    """Write ``gguf_bytes`` to ``path`` and return it."""
    path.write_bytes(
        gguf_bytes(metadata, tensors, version=version, alignment=alignment, with_data=with_data)
    )
    return path


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if not isinstance(value, Typed):
        items = value if isinstance(value, (list, tuple)) else [value]
        value = Typed(_type_of(items), value)
    if isinstance(value.value, (list, tuple)):
        head = struct.pack("<IIQ", _ARRAY_ID, _TYPE_IDS[value.type], len(value.value))
        return head + b"".join(_item(value.type, item) for item in value.value)
    return struct.pack("<I", _TYPE_IDS[value.type]) + _item(value.type, value.value)


def _item(type_name: str, item: object) -> bytes:
    if type_name == "string":
        return _string(str(item))
    return struct.pack("<" + _CODES[type_name], item)


def _type_of(items: Sequence[object]) -> str:
    if all(isinstance(item, bool) for item in items):
        return "bool"
    if all(isinstance(item, str) for item in items):
        return "string"
    if all(isinstance(item, int) for item in items):
        fits = all(isinstance(item, int) and 0 <= item < 2**32 for item in items)
        return "u32" if fits else "i64"
    return "f32"
