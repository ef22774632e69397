"""Typed reads of metadata, whether from a GGUF header or a JSON configuration.

Every refusal names the model, the key and the value; what had to be assumed is collected in
``warnings``.
"""

from collections.abc import Mapping
from typing import NoReturn

from memkv_pp.errors import GeometryError

MAX_LAYERS = 10_000
MAX_FIGURE = 2**31 - 1


class Figures:
    """A model's keys. ``prefix`` precedes every key (``llama.`` in GGUF); None means missing.

    ``unread`` maps the keys of arrays that the reader stepped over to their lengths.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, object],
        *,
        prefix: str = "",
        unread: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.prefix = prefix
        self.warnings: list[str] = []
        self._values = values
        self._unread = unread or {}

    def fail(self, key: str, why: str) -> NoReturn:
        """Raise GeometryError about ``key``."""
        raise GeometryError(f"{self.name}: {self.prefix}{key} {why}")

    def warn(self, text: str) -> None:
        """Say once what had to be assumed."""
        if text not in self.warnings:
            self.warnings.append(text)

    def value(self, key: str) -> object:
        """The value as it stands, or None."""
        full = self.prefix + key
        if full in self._unread:
            self.fail(key, f"is an array of {self._unread[full]} items, far more than layers")
        return self._values.get(full)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.value(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """The integer under ``key``; ``default`` when missing, GeometryError when that is None."""
        found = self.value(key)
        if found is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        return self._checked(key, found, least)

    def flag(self, key: str, default: bool) -> bool:
        """The bool under ``key``, or ``default`` when missing."""
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            self.fail(key, f"must be true or false, not {_brief(found)}")
        return found

    def text(self, key: str, default: str = "") -> str:
        """The text under ``key``, or ``default`` when missing."""
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, str):
            self.fail(key, f"must be text, not {_brief(found)}")
        return found

    def per_layer(
        self, key: str, num_layers: int, *, num_extra: int = 0, default: int | None = None
    ) -> tuple[int, ...]:
        """One integer per layer: a scalar repeated, or an array read whole.

        An array has an item for each of ``num_layers``, and may leave out the last ``num_extra``
        of them (NextN layers, which then take the largest item). GeometryError names the key, the
        length and the layers otherwise, and the key when it is missing without a ``default``.
        Bools count as 0 and 1 in arrays.
        """
        found = self.value(key)
        if not isinstance(found, (list, tuple)):
            return (self.integer(key, default),) * num_layers
        if len(found) not in (num_layers, num_layers - num_extra):
            self.fail(key, f"has {len(found)} items for {num_layers} layers")
        items = tuple(
            int(item) if isinstance(item, bool) else self._checked(f"{key}[{i}]", item, 0)
            for i, item in enumerate(found)
        )
        return items + (max(items, default=0),) * (num_layers - len(items))

    def layer_count(self, key: str) -> int:
        """The number of layers under ``key``, at least 1 and within reason."""
        count = self.integer(key, least=1)
        if count > MAX_LAYERS:
            self.fail(key, f"is {count}, over {MAX_LAYERS} layers")
        return count

    def _checked(self, key: str, found: object, least: int) -> int:
        if isinstance(found, bool) or not isinstance(found, int):
            self.fail(key, f"must be an integer, not {_brief(found)}")
        if not least <= found <= MAX_FIGURE:
            self.fail(key, f"is {found}, not {least} to {MAX_FIGURE}")
        return found


def _brief(value: object) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
