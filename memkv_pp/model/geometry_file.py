"""Our own geometry file: the layers of a model as JSON, for models without one of another kind.

::

    {"schema": "memkv-pp/geometry/1", "name": "tiny", "family": "llama", "context_tokens": 4096,
     "layers": [{"kind": "full_attention", "kv_heads": 8, "key_head_size": 128,
                 "value_head_size": 128, "repeat": 32}], "nextn_layers": []}

A layer has the fields of ``LayerGeometry``; ``repeat`` stands for that many equal layers in a row.
Fields that are 0 may be left out; a field nobody knows is an error. ``"default_kv": "fp8:fp8"``
names the formats that a model is served with where ``--kv`` is not given. ``"source"`` says where
the figures are from: sentences under ``says``, and under ``config`` the configuration that
``from_config`` derives the geometry of; it is no part of the geometry.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import NoReturn, TypeVar

from memkv_pp.errors import FormatError, GeometryError
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.model.figures import MAX_LAYERS

_T = TypeVar("_T")

SCHEMA = "memkv-pp/geometry/1"
MAX_ELEMENTS = 2**63 - 1

_LAYER_FIELDS = tuple(field.name for field in fields(LayerGeometry))
_LAYER_DEFAULTS = {"source_layer": -1}
_TEXT_FIELDS = ("name", "family")
_SOURCE_FIELDS = ("says", "config")

_MODEL_FIELDS = tuple(field.name for field in fields(ModelGeometry))


def to_json(geometry: ModelGeometry, source: Mapping[str, object] | None = None) -> str:
    """The file's text, with its ``source`` if given; ``geometry_from_json`` gives the geometry back."""
    document: dict[str, object] = {"schema": SCHEMA}
    if source is not None:
        document["source"] = dict(source)
    for field in _MODEL_FIELDS:
        value = getattr(geometry, field)
        if field in ("layers", "nextn_layers"):
            document[field] = _layers_to_json(value)
        elif value or field in _TEXT_FIELDS:
            document[field] = list(value) if isinstance(value, tuple) else value
    return json.dumps(document, indent=1) + "\n"


def geometry_from_json(document: Mapping[str, object], name: str) -> ModelGeometry:
    """The geometry of a parsed file; ``name`` is for messages and stands in for a missing name.

    Raises GeometryError naming the field that is unknown, missing or of a wrong type or value.
    """
    if document.get("schema") != SCHEMA:
        _fail(name, "schema", f"is {document.get('schema')!r}, not {SCHEMA!r}")
    unknown = sorted(set(document) - {"schema", "source", *_MODEL_FIELDS})
    if unknown:
        _fail(name, unknown[0][:80], f"is unknown; known: {', '.join(_MODEL_FIELDS)}, source")
    if "source" in document:
        _check_source(document["source"], name)
    values: dict[str, object] = {"name": name, "family": "unknown"}
    for field in document:
        if field in ("layers", "nextn_layers"):
            values[field] = _layers_from_json(document[field], name, field)
        elif field in _TEXT_FIELDS:
            values[field] = _typed(document[field], str, name, field)
        elif field == "default_kv":
            values[field] = _pair(_typed(document[field], str, name, field), name, field)
        elif field == "tied_embedding":
            values[field] = _typed(document[field], bool, name, field)
        elif field == "file_bytes_by_layer":
            items = enumerate(_typed(document[field], list, name, field))
            values[field] = tuple(_count(item, name, f"{field}[{i}]") for i, item in items)
        elif field == "warnings":
            items = enumerate(_typed(document[field], list, name, field))
            values[field] = tuple(_typed(item, str, name, f"{field}[{i}]") for i, item in items)
        elif field not in ("schema", "source"):
            values[field] = _count(document[field], name, field)
    if "layers" not in values:
        _fail(name, "layers", "is missing")
    return ModelGeometry(**values)  # pyright: ignore[reportArgumentType]


def _layers_to_json(layers: Sequence[LayerGeometry]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for layer, run in groupby(layers):
        entry: dict[str, object] = {
            field: getattr(layer, field)
            for field in _LAYER_FIELDS
            if getattr(layer, field) != _LAYER_DEFAULTS.get(field, 0)
        }
        entry["kind"] = str(layer.kind)
        repeat = sum(1 for _ in run)
        if repeat > 1:
            entry["repeat"] = repeat
        entries.append(entry)
    return entries


def _layers_from_json(value: object, name: str, field: str) -> tuple[LayerGeometry, ...]:
    layers: list[LayerGeometry] = []
    for index, entry in enumerate(_typed(value, list, name, field)):
        where = f"{field}[{index}]"
        entry = dict(_typed(entry, dict, name, where))
        repeat = _count(entry.pop("repeat", 1), name, f"{where}.repeat")
        if not 1 <= repeat <= MAX_LAYERS - len(layers):
            _fail(name, f"{where}.repeat", f"is {repeat}; a model has 1 to {MAX_LAYERS} layers")
        layers += [_layer_from_json(entry, name, where)] * repeat
    return tuple(layers)


def _layer_from_json(entry: dict[str, object], name: str, where: str) -> LayerGeometry:
    unknown = sorted(set(entry) - set(_LAYER_FIELDS))
    if unknown:
        _fail(
            name,
            f"{where}.{unknown[0][:80]}",
            f"is unknown; known: {', '.join(_LAYER_FIELDS)}, repeat",
        )
    kind = entry.pop("kind", None)
    if kind not in tuple(LayerKind):
        _fail(name, f"{where}.kind", f"is {kind!r}; known: {', '.join(LayerKind)}")
    figures = {key: _count(value, name, f"{where}.{key}") for key, value in entry.items()}
    try:
        return LayerGeometry(kind=LayerKind(str(kind)), **figures)
    except GeometryError as error:
        raise GeometryError(f"{name}: {where}: {error.message}") from error


def _check_source(value: object, name: str) -> None:
    source = _typed(value, dict, name, "source")
    unknown = sorted(set(source) - set(_SOURCE_FIELDS))
    if unknown:
        _fail(name, f"source.{unknown[0][:80]}", f"is unknown; known: {', '.join(_SOURCE_FIELDS)}")
    for index, sentence in enumerate(_typed(source.get("says", []), list, name, "source.says")):
        _typed(sentence, str, name, f"source.says[{index}]")
    _typed(source.get("config", {}), dict, name, "source.config")


def _pair(text: str, name: str, field: str) -> str:
    if text:
        try:
            parse_pair(text)
        except FormatError as error:
            raise GeometryError(
                f"{name}: {field}: {error.message.removeprefix('--kv: ')}", error.hint
            ) from error
    return text


def _typed(value: object, kind: type[_T], name: str, field: str) -> _T:
    if not isinstance(value, kind):
        _fail(name, field, f"must be {kind.__name__}, not {type(value).__name__}")
    return value


def _count(value: object, name: str, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ELEMENTS:
        _fail(name, field, f"must be an integer from 0 up, not {repr(value)[:60]}")
    return value


def _fail(name: str, field: str, why: str) -> NoReturn:
    raise GeometryError(f"{name}: {field} {why}")
