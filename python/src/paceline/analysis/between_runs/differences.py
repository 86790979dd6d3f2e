"""Differences between two runs in machine, packages, git commit, spec and files of the user's code.

They are those of manifests with sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs; None: a run does not have it."""

    of: str  # machine, package, git, spec or file
    name: str
    before: str | None
    after: str | None


def run_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """List what differs between two manifests."""
    return [
        Difference(of=of, name=name, before=ours.get(name), after=theirs.get(name))
        for of, ours, theirs in zip(_KINDS, _facts(before), _facts(after), strict=True)
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name) and (of != _FILE or (ours and theirs))
    ]


def machine_identity(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values that are equal for two runs on the same machine."""
    host = _table(manifest, "host")
    return tuple(str(host.get(name)) for name in _IDENTITY if name != _TURNS or name in host)


_FILE = "file"  # older runs have no checksums of files
_KINDS = ("machine", "package", "git", "spec", _FILE)
_TURNS = "turns"  # of lab hosts; only there
_IDENTITY = ("host", "cpu_model", "usable_cores", _TURNS)


def _facts(manifest: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    packages = _table(manifest, "versions") | _table(manifest, "packages")
    return (
        _strings(_table(manifest, "host")),
        _strings(packages),
        _strings(_table(manifest, "git")),
        _spec(manifest),
        _strings(_table(manifest, "sources")),
    )


def _spec(manifest: Mapping[str, Any]) -> dict[str, str]:
    try:
        spec = tomllib.loads(str(manifest.get("spec_toml", "")))
    except tomllib.TOMLDecodeError:
        return {}
    return dict(_flat(spec, ""))


def _flat(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables and arrays of tables with their dotted keys."""
    inner: dict[str, object] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = {str(number): each for number, each in enumerate(value)}
    if not inner:
        yield place, str(value)
    for key, each in inner.items():
        yield from _flat(each, f"{place}.{key}" if place else key)


def _table(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    return found if isinstance(found, dict) else {}


def _strings(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in table.items() if value is not None}
