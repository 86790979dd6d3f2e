"""Rows of files as the dataclasses that wrote them.

Fields that this version does not know are ignored; one that is missing, or nested values of the
wrong shape, are errors that name the file.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import DataError
from paceline.records.files import read_json, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

_Row = TypeVar("_Row")


def typed(fields: Mapping[str, Any], kind: type[_Row], path: Path) -> _Row:
    """`fields` as the dataclass `kind`, dataclasses within it too. Raises DataError."""
    try:
        return _build(fields, kind)
    except (TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected the fields of {kind.__name__}: {error}") from error


def rows(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """All rows of a file of JSON lines; none where there is no such file."""
    if not path.exists():
        return ()
    return tuple(typed(row, kind, path) for row in read_jsonl(path))


def document(path: Path, kind: type[_Row]) -> _Row | None:
    """A JSON document; None where there is no such file."""
    return typed(read_json(path), kind, path) if path.exists() else None


def _build(fields: Mapping[str, Any], kind: type[_Row]) -> _Row:
    known, nested = _shape(typing.cast("Hashable", kind))
    values = {name: value for name, value in fields.items() if name in known}
    for name, build in nested.items():
        if values.get(name) is not None:
            values[name] = build(values[name])
    return kind(**values)


@cache
def _shape(kind: Any) -> tuple[frozenset[str], dict[str, typing.Callable[[Any], Any]]]:
    """The names of a dataclass's fields, and what builds those that hold dataclasses."""
    hints = typing.get_type_hints(kind)
    names = frozenset(f.name for f in dataclasses.fields(kind))
    nested = {name: build for name in names if (build := _builder(hints[name])) is not None}
    return names, nested


def _builder(hint: Any) -> typing.Callable[[Any], Any] | None:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        inner = hint
        return lambda value: _build(value, inner)
    parts = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        found = [build for part in parts if (build := _builder(part)) is not None]
        return found[0] if found else None
    build = _builder(parts[-1]) if origin in (list, dict) else None
    if build is None:
        return None
    if origin is list:
        return lambda value: [build(item) for item in value]
    return lambda value: {key: build(item) for key, item in value.items()}
