"""Load a spec: from a TOML file, by the name of a shipped experiment, or from Python values."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from paceline.errors import UsageError
from paceline.spec.models import SCHEMA, Experiment, keys_of_tables, nested_model
from paceline.spec.overrides import apply_settings, changed_text
from paceline.spec.rules import faults_of
from paceline.spec.sentences import did_you_mean, no_such_key, sentences
from paceline.spec.transport_rules import with_common_transports
from paceline.spec.values import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

PLACEHOLDER = BASELINE  # stands for a faulty trial while the rules check the others


def shipped_experiments() -> dict[str, str]:
    """Return the TOML texts of the experiments in the package, by name."""
    folder = resources.files("paceline") / "experiments"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


class Spec(NamedTuple):
    """A checked spec."""

    experiment: Experiment
    text: str  # TOML; with the changes from the command line


# A TOML file, the name of a shipped experiment, the content of such a file, or a checked spec.
SpecSource = str | os.PathLike[str] | Mapping[str, Any] | Experiment | Spec
# Only the keys that were set, by their names in the spec.
AS_WRITTEN: dict[str, Any] = {
    "mode": "json",
    "by_alias": True,
    "exclude_unset": True,
    "exclude_none": True,
}


def load_spec(source: SpecSource, settings: Sequence[str] = ()) -> Spec:
    """Return the spec with changes as in `paceline.spec.overrides`.

    Raises UsageError that lists every fault of the spec and of the changes.
    """
    text, origin = _text_and_origin(source)
    if not settings:
        return Spec(parse_spec(text, origin), text)
    document = _document(text, origin)
    faults = apply_settings(document, settings)
    text = changed_text(document, origin, settings)
    return Spec(check_spec(document, origin, faults), text)


def _text_and_origin(source: SpecSource) -> tuple[str, str]:
    """Return the TOML text and its name in messages."""
    if isinstance(source, Spec):
        return source.text, "the spec"
    if isinstance(source, Experiment):
        source = source.model_dump(**AS_WRITTEN)
    if not isinstance(source, Mapping):
        return _read(os.fspath(source))
    try:
        return tomli_w.dumps(source), "the spec"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the spec: expected values that TOML has (texts, numbers, true, false, lists, tables; "
            f"leave out a key instead of None): {error}"
        ) from error


def parse_spec(text: str, origin: str) -> Experiment:
    """Parse TOML `text`; `origin` names it in messages. Raises UsageError with every fault."""
    return check_spec(_document(text, origin), origin)


def _document(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: not TOML: {error}") from error


def check_spec(
    document: dict[str, Any], origin: str, known_faults: Sequence[str] = ()
) -> Experiment:
    """Return the experiment of a parsed spec. Raises UsageError with every fault."""
    if document.get("schema") == 1:
        raise UsageError(
            f"{origin}: expected schema = {SCHEMA}, got 1; run it with Paceline 0.1, or write the "
            f"spec for schema {SCHEMA} (docs/reference/spec.md)"
        )
    faults = [*known_faults]
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        faults += sentences(error.errors(), _unknown_key)
        faults += _rule_faults_of_the_rest(document, error.errors())
        raise _usage_error(origin, faults) from error
    experiment = with_common_transports(experiment)
    faults += faults_of(experiment)
    if faults:
        raise _usage_error(origin, faults)
    return experiment


def _rule_faults_of_the_rest(document: dict[str, Any], details: list[ErrorDetails]) -> list[str]:
    """Return the rules' faults of everything that pydantic did not refuse.

    A faulty trial is replaced by a placeholder, another faulty value is removed.
    """
    skip: set[int] = set()
    locations = [detail["loc"] for detail in details]
    for location in locations:
        if not location:  # of the whole file
            return []
        if any(other[: len(location)] == location for other in locations if other != location):
            continue  # a list that counts as too short, because its entries are faulty
        if location[0] == "trials" and len(location) > 1:
            document["trials"][location[1]] = PLACEHOLDER
            skip.add(int(location[1]) + 1)
        else:
            _remove(document, location)
    filled = {"schema": SCHEMA, "name": "unnamed", **document}
    try:
        return faults_of(Experiment.model_validate(filled), skip)
    except ValidationError:
        return []


def _remove(document: Any, location: tuple[int | str, ...]) -> None:
    """Remove the innermost key of `location` that the document has."""
    for depth, part in enumerate(location):
        inner = document.get(part) if isinstance(document, dict) else None
        if isinstance(document, list) and isinstance(part, int) and part < len(document):
            inner = document[part]
        deeper = depth + 1 < len(location) and isinstance(inner, dict | list)
        if not deeper:
            if isinstance(document, dict):
                document.pop(str(part), None)
            return
        document = inner


def _read(name_or_path: str) -> tuple[str, str]:
    shipped = shipped_experiments()
    if name_or_path in shipped:
        return shipped[name_or_path], f"shipped experiment {name_or_path!r}"
    path = Path(name_or_path)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"spec {name_or_path!r}: expected a TOML file or one of the shipped experiments "
            f"({', '.join(shipped)}); there is neither.{did_you_mean(name_or_path, shipped)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"spec {name_or_path!r}: expected a readable TOML file: {error}"
        ) from error


def _usage_error(origin: str, faults: list[str]) -> UsageError:
    listed = "\n".join(f"  - {fault}" for fault in faults)
    plural = "fault" if len(faults) == 1 else "faults"
    return UsageError(f"{origin}: {len(faults)} {plural}:\n{listed}")


def _unknown_key(location: tuple[int | str, ...]) -> str:
    """Return what to do about an unknown key of a table."""
    key = str(location[-1])
    model: Any = Experiment
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            model = nested_model(model.model_fields[part].annotation) or model
    known = (field.alias or name for name, field in model.model_fields.items())
    return no_such_key(key, known, keys_of_tables())
