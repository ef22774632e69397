"""A position in a hostile file: nothing is read, and nothing allocated, that is not there."""

import mmap
import struct
from pathlib import Path
from typing import NoReturn

from memkv_pp.errors import GeometryError


class Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: bytes | mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0
        self.end = len(data)

    def fail(self, field: str, why: str, at: int | None = None) -> NoReturn:
        """Raise GeometryError naming the file, the byte (here, or ``at``) and ``field``."""
        where = self.offset if at is None else at
        raise GeometryError(f"{self.path}: at byte {where}: {field}: {why}")

    def need(self, num_bytes: int, field: str) -> None:
        """Fail unless ``num_bytes`` remain."""
        if num_bytes > self.end - self.offset:
            self.fail(field, f"needs {num_bytes} bytes, {self.end - self.offset} remain")

    def scalar(self, code: str, field: str) -> int | float:
        """The little-endian value of struct ``code``."""
        size = struct.calcsize("<" + code)
        self.need(size, field)
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += size
        return value

    def integer(self, code: str, field: str) -> int:
        """As ``scalar``, for codes of integers."""
        return int(self.scalar(code, field))

    def boolean(self, value: float, field: str) -> bool:
        """0 or 1 as a bool; anything else fails."""
        if value not in (0, 1):
            self.fail(field, f"{value} is no bool")
        return bool(value)

    def string(self, field: str, most: int) -> str:
        """A length and as many bytes of UTF-8, at most ``most``."""
        at = self.offset
        length = self.integer("Q", field + " length")
        if length > most:
            self.fail(field + " length", f"{length} is over {most}", at)
        self.need(length, field)
        raw = self.data[self.offset : self.offset + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(field, f"is no UTF-8: {error.reason}", self.offset + error.start)
        self.offset += length
        return text

    def skip_strings(self, count: int, field: str) -> None:
        """Step over ``count`` strings without making them."""
        offset, last = self.offset, self.end - 8
        read = struct.Struct("<Q").unpack_from
        data = self.data
        for _ in range(count):
            if offset > last:
                self.fail(field, "runs past the end of the file", min(offset, self.end))
            offset += 8 + read(data, offset)[0]
        if offset > self.end:
            self.fail(field, "runs past the end of the file", self.end)
        self.offset = offset
