"""The one door to a model's geometry: what ``MODEL`` is decides who reads it."""

import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from memkv_pp.errors import ConfigError, GeometryError
from memkv_pp.geometry import ModelGeometry
from memkv_pp.model.from_config import geometry_from_config
from memkv_pp.model.from_gguf import geometry_from_header
from memkv_pp.model.geometry_file import geometry_from_json
from memkv_pp.model.gguf_header import read_header
from memkv_pp.units import MIB

MAX_JSON_BYTES = 64 * MIB


def shipped_names() -> tuple[str, ...]:
    """The models that can be named without a file, sorted."""
    names = (entry.name for entry in _shipped().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def open_geometry(model: str | Path) -> ModelGeometry:
    """Read the geometry of a ``.gguf`` file, a folder, a ``.json`` file or a shipped name.

    A folder holds a ``config.json``; a ``.json`` is our geometry file if it has a ``schema``, else
    a Hugging Face configuration. No weights are read. Raises ConfigError naming MODEL for what is
    missing or unknown, GeometryError for what cannot be right.
    """
    path = Path(model)
    if str(model) in shipped_names() and not path.exists():
        return _from_json_text(
            (_shipped() / f"{model}.json").read_text("utf-8"), str(model), str(model)
        )
    if not path.exists():
        raise ConfigError(
            f"MODEL: {str(model)!r} is no file and no shipped name",
            f"give a .gguf, a folder, a .json, or one of {', '.join(shipped_names())}",
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"MODEL: the folder {path} has no config.json")
        return _from_json_file(path / "config.json", path.resolve().name)
    if path.suffix.lower() == ".gguf":
        return geometry_from_header(read_header(path), path.stem)
    if path.suffix.lower() == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _from_json_file(path, name)
    raise ConfigError(f"MODEL: {path} is neither .gguf nor .json nor a folder")


def _from_json_file(path: Path, name: str) -> ModelGeometry:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"MODEL: {path} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_JSON_BYTES:
        raise ConfigError(f"MODEL: {path} is over {MAX_JSON_BYTES} bytes, far more than a model's")
    try:
        return _from_json_text(raw.decode("utf-8"), name, str(path))
    except UnicodeDecodeError as error:
        raise GeometryError(f"{path}: at byte {error.start}: is no UTF-8") from error


def _from_json_text(text: str, name: str, where: str) -> ModelGeometry:
    try:
        document = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except RecursionError as error:
        raise GeometryError(f"{where}: is nested too deeply") from error
    except GeometryError:
        raise
    except ValueError as error:
        raise GeometryError(f"{where}: is no JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise GeometryError(f"{where}: must hold a JSON object")
    if "schema" in document:
        return geometry_from_json(document, name)
    return geometry_from_config(document, name)


def _unique(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise GeometryError(f"{where}: {key[:80]!r} is given twice")
        found[key] = value
    return found


def _shipped() -> Traversable:
    return resources.files("memkv_pp.model") / "shipped"
