"""Load a spec: from a TOML file, by the name of a shipped experiment, or from Python values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import tomli_w
from pydantic import ValidationError

from paceline.base.errors import UsageError
from paceline.plan.spec.models import SCHEMA, Experiment, keys_of_tables, nested_model
from paceline.plan.spec.rules.experiment import faults_of
from paceline.plan.spec.rules.transport import with_common_transports
from paceline.plan.spec.sentences import did_you_mean, no_such_key, sentences
from paceline.plan.spec.values import BASELINE, toml_document

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MOST_BYTES = 16 * 2**20  # of a spec
_MOST_FAULTS, _LONGEST_FAULT = 25, 1000  # of a message; characters
_LONGEST_SETTING = 200  # in a message, in characters
_EXAMPLES = "training.max_steps=8, workloads.0.global_batch=16"


def shipped_experiments() -> dict[str, str]:
    """Return the TOML texts of the experiments in the package, by name."""
    folder = resources.files("paceline.plan") / "experiments"
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
    """Return the spec with changes: `KEY=VALUE`, a dotted key and a TOML value.

    A fixed number of repeats takes the place of `repeats = "auto"` and of the keys that belong to
    it. Raises UsageError that lists every fault of the spec and of the changes.
    """
    text, origin = _text_and_origin(source)
    if not settings:
        return Spec(parse_spec(text, origin), text)
    document = _document(text, origin)
    if document.get("repeats") == "auto" and _fix_repeats(settings):
        _leave_out_keys_of_automatic_repeats(document)
    faults = apply_settings(document, settings)
    text = changed_text(document, origin, settings)
    return Spec(check_spec(document, origin, faults), text)


def with_repeats(spec: Spec, repeats: int) -> Spec:
    """Return the spec with a fixed number of repeats.

    Raises UsageError for a number that no spec may have.
    """
    return load_spec(spec, [f"repeats={repeats}"])


def _fix_repeats(settings: Sequence[str]) -> bool:
    values = [value for key, _, value in (s.partition("=") for s in settings) if key == "repeats"]
    return bool(values) and "auto" not in values[-1]


def _leave_out_keys_of_automatic_repeats(document: dict[str, Any]) -> None:
    for key in ("max_repeats", "tie_margin"):
        document.pop(key, None)
    if isinstance(limits := document.get("limits"), dict):
        limits.pop("run_s", None)


def with_trials(spec: Spec, added: Sequence[str]) -> Spec:
    """Return the spec with further [[trials]] at its end; each is given as `KEY=VALUE, …` in TOML.

    Raises UsageError that lists every fault, or if the further trials change the transport of those
    before them.
    """
    document, faults = toml_document(spec.text), []
    for text in added:
        try:
            document.setdefault("trials", []).append(_table(text))
        except _SettingError as fault:
            faults.append(f"--add {text}: {fault}")
    origin = "the spec"
    text = changed_text(document, origin, [f"--add {each}" for each in added])
    found = Spec(check_spec(document, origin, faults), text)
    before = spec.experiment.trials
    for place, (old, new) in enumerate(zip(before, found.experiment.trials, strict=False), start=1):
        if old != new:
            raise UsageError(
                f"--add: trials[{place}] ran with transport {old.transport or 'of its launcher'}, "
                f'and beside the added trials its default is "{new.transport}"; name a transport '
                'in --add, as in transport="gloo"'
            )
    return found


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
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the spec: expected values that TOML has (texts, numbers, true, false, lists, tables; "
            f"leave out a key instead of None): {error}"
        ) from error


def parse_spec(text: str, origin: str) -> Experiment:
    """Parse TOML `text`; `origin` names it in messages. Raises UsageError with every fault."""
    return check_spec(_document(text, origin), origin)


def _document(text: str, origin: str) -> dict[str, Any]:
    try:
        return toml_document(text)
    except ValueError as error:  # also for an integer of more than 4,300 digits
        raise UsageError(f"{origin}: not TOML: {error}") from error


def check_spec(
    document: dict[str, Any], origin: str, known_faults: Sequence[str] = ()
) -> Experiment:
    """Return the experiment of a parsed spec. Raises UsageError with every fault."""
    faults = [*known_faults]
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        details = error.errors()
        faults += sentences(details[:_MOST_FAULTS], _unknown_key)
        if len(details) <= _MOST_FAULTS:
            faults += _rule_faults_of_the_rest(document, details)
        else:
            faults.append(f"and {len(details) - _MOST_FAULTS} more")
        raise _usage_error(origin, faults) from error
    experiment = with_common_transports(experiment)
    faults += faults_of(experiment)
    if faults:
        raise _usage_error(origin, faults)
    return experiment


def _rule_faults_of_the_rest(document: dict[str, Any], details: list[ErrorDetails]) -> list[str]:
    """Return the rules' faults of everything that pydantic did not refuse.

    A faulty trial is replaced by the baseline, another faulty value is removed.
    """
    skip: set[int] = set()
    locations = [detail["loc"] for detail in details]
    for location in locations:
        if not location:  # of the whole file
            return []
        if any(other[: len(location)] == location for other in locations if other != location):
            continue  # a list that counts as too short, because its entries are faulty
        if location[0] == "trials" and len(location) > 1:
            document["trials"][location[1]] = BASELINE
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
        with _opened(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(
                f"spec {name_or_path!r}: expected a TOML file, got more than "
                f"{_MOST_BYTES >> 20} MiB"
            )
        return content.decode("utf-8"), str(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"spec {name_or_path!r}: expected a TOML file or one of the shipped experiments "
            f"({', '.join(shipped)}); there is neither.{did_you_mean(name_or_path, shipped)}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null byte in the path
        raise UsageError(
            f"spec {name_or_path!r}: expected a readable TOML file: {error}"
        ) from error


def _opened(path: Path) -> BinaryIO:
    """Open a spec: a file, or a pipe, as of `<(command)`. One without a writer counts as empty."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def _usage_error(origin: str, faults: list[str]) -> UsageError:
    shown = [fault[:_LONGEST_FAULT] for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        shown.append(f"and {len(faults) - _MOST_FAULTS} more")
    listed = "\n".join(f"  - {fault}" for fault in shown)
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
            faults.append(f"--set {setting[:_LONGEST_SETTING]}: {fault}")
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


def _table(text: str) -> dict[str, Any]:
    """Return the keys and values of `KEY=VALUE, …`."""
    try:
        found = toml_document(f"value={{{text}}}")
    except ValueError:
        found = {}
    inner = found.get("value")
    if list(found) != ["value"] or not isinstance(inner, dict) or not inner:
        raise _SettingError(
            "expected the keys of a [[trials]] entry as KEY=VALUE, … in TOML; a string needs "
            """quotes, as in 'launcher="local", local_strategy="threads"'"""
        )
    return inner


def _path(key: str) -> list[str] | None:
    """Return the parts of a dotted key; None if it is not one key of TOML."""
    try:
        inner: Any = toml_document(f"{key}=0")
    except ValueError:
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
        found = toml_document(f"value={text}")
    except ValueError:
        found = {}
    if list(found) != ["value"]:
        raise _SettingError(
            f"expected a TOML value, got {text[:_LONGEST_SETTING]}; a string needs quotes, as in "
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
