"""Read files as the dataclasses that wrote them. Pydantic does the conversion.

Unknown fields are ignored. A missing field, or a nested value of the wrong shape, raises an error
that names the file.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from paceline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

_Row = TypeVar("_Row")


def typed(fields: Mapping[str, Any], kind: type[_Row], path: Path) -> _Row:
    """Convert `fields` to the dataclass `kind`. Raises DataError that names `path`."""
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        raise _mismatch(path, kind, error) from error


def document(path: Path, kind: type[_Row]) -> _Row | None:
    """Read a JSON document as `kind`; None where there is no such file.

    Raises DataError if it is damaged.
    """
    try:
        return _adapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise _mismatch(path, kind, error) from error


def _adapter(kind: type[_Row]) -> TypeAdapter[_Row]:
    return cast("TypeAdapter[_Row]", _adapter_of(cast("Hashable", kind)))


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _mismatch(path: Path, kind: type[object], error: ValidationError) -> DataError:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the document"
    return DataError(f"{path}: expected the fields of {kind.__name__}: {where}: {first['msg']}")
