"""Changes to a spec from the command line: `KEY=VALUE`, a dotted key and a TOML value."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import tomli_w

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = "training.max_steps=8, workloads.0.global_batch=16"


class _SettingError(ValueError):
    """A change that cannot be applied; the text says why."""


def apply_settings(document: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Change the parsed spec in place; return the faults of the settings that cannot be applied.

    A number in a key is the place in an array, counted from 0. Missing tables are made.
    """
    faults = []
    for setting in settings:
        try:
            path, value = _parsed(setting)
            _assign(document, path, value)
        except _SettingError as fault:
            faults.append(f"--set {setting}: {fault}")
    return faults


def changed_text(document: dict[str, Any], origin: str, settings: Sequence[str]) -> str:
    """Return the changed spec as TOML; a comment in the first line names the changes."""
    listed = "; ".join(" ".join(setting.split()) for setting in settings)
    return f"# {origin} with {listed}\n{tomli_w.dumps(document)}"


def _parsed(setting: str) -> tuple[list[str], Any]:
    """Return the parts of the key and the value of `KEY=VALUE`."""
    equal_signs = (place for place, character in enumerate(setting) if character == "=")
    for place in equal_signs:  # a quoted part of a key may contain one
        path = _path(setting[:place])
        if path is not None:
            return path, _value(setting[place + 1 :])
    raise _SettingError(f"expected KEY=VALUE, as in {_EXAMPLES}")


def _path(key: str) -> list[str] | None:
    """Return the parts of a dotted key; None if it is not one key of TOML."""
    try:
        inner: Any = tomllib.loads(f"{key}=0")
    except tomllib.TOMLDecodeError:
        return None
    path = []
    while isinstance(inner, dict):
        if len(inner) != 1:
            return None
        ((part, inner),) = inner.items()
        path.append(part)
    return path


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value={text}")
    except tomllib.TOMLDecodeError:
        found = {}
    if list(found) != ["value"]:
        raise _SettingError(
            f"expected a TOML value, got {text}; a string needs quotes, as in "
            """'training.precision="bf16"'"""
        )
    return found["value"]


def _assign(document: dict[str, Any], path: Sequence[str], value: Any) -> None:
    inner: Any = document
    for depth, part in enumerate(path):
        key = _key(inner, part, ".".join(path[:depth]))
        if depth == len(path) - 1:
            inner[key] = value
        elif isinstance(inner, dict):
            inner = inner.setdefault(key, {})
        else:
            inner = inner[key]


def _key(inner: Any, part: str, place: str) -> str | int:
    """Return the key of a table or the index of an array."""
    if isinstance(inner, dict):
        return part
    if not isinstance(inner, list):
        raise _SettingError(f"{place} is a value, expected a table or an array")
    if not (part.isdecimal() and int(part) < len(inner)):
        raise _SettingError(
            f"expected a number from 0 to {len(inner) - 1} after {place}, got {part}"
        )
    return int(part)
