"""A spec from a TOML file or by the name of a shipped experiment."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.errors import UsageError
from paceline.spec.models import Experiment
from paceline.spec.rules import faults_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# pydantic names the branch of a union in a fault's place
_UNION_BRANCHES = {
    "int", "constrained-int", "constrained-float", "literal['auto']", "literal['model']",
    "literal['unbounded']",
}  # fmt: skip


def shipped_experiments() -> dict[str, str]:
    """The TOML texts of the experiments in the package, by name."""
    folder = resources.files("paceline") / "experiments"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


def load_spec(name_or_path: str) -> tuple[Experiment, str]:
    """Return the experiment and its TOML text.

    Raises UsageError that lists every fault of the spec.
    """
    text, origin = _read(name_or_path)
    return parse_spec(text, origin), text


def parse_spec(text: str, origin: str) -> Experiment:
    """Parse TOML `text`; `origin` names it in messages. Raises UsageError with every fault."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: not TOML: {error}") from error
    return check_spec(document, origin)


def check_spec(document: dict[str, Any], origin: str) -> Experiment:
    """Return the experiment of a parsed spec. Raises UsageError with every fault."""
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise _usage_error(origin, _sentences(error.errors())) from error
    faults = faults_of(experiment)
    if faults:
        raise _usage_error(origin, faults)
    return experiment


def _read(name_or_path: str) -> tuple[str, str]:
    shipped = shipped_experiments()
    if name_or_path in shipped:
        return shipped[name_or_path], f"shipped experiment {name_or_path!r}"
    path = Path(name_or_path)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError as error:
        near = difflib.get_close_matches(name_or_path, shipped, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"spec {name_or_path!r}: expected a TOML file or one of the shipped experiments "
            f"({', '.join(shipped)}); there is neither.{hint}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"spec {name_or_path!r}: expected a readable TOML file: {error}"
        ) from error


def _usage_error(origin: str, faults: list[str]) -> UsageError:
    listed = "\n".join(f"  - {fault}" for fault in faults)
    plural = "fault" if len(faults) == 1 else "faults"
    return UsageError(f"{origin}: {len(faults)} {plural}:\n{listed}")


def _sentences(details: list[ErrorDetails]) -> list[str]:
    places = [_place(detail["loc"]) for detail in details]
    sentences: dict[str, str] = {}
    for place, detail in zip(places, details, strict=True):
        # a list whose every entry is faulty also counts as too short: that is no fault of its own
        if detail["type"] == "too_short" and any(p.startswith(f"{place}[") for p in places):
            continue
        # a value that may be a number or a word is reported once for each; the first is enough
        sentences.setdefault(f"{place}", _sentence(detail))
    return list(sentences.values())


def _sentence(detail: ErrorDetails) -> str:
    where = _place(detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{where}: no such key.{_near_key(detail['loc'])}"
    if kind == "missing":
        return f"{where}: expected, but missing"
    if kind == "literal_error":
        return f"{where}: expected one of {detail['ctx']['expected']}, got {detail['input']!r}"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return message
    if kind == "string_pattern_mismatch":
        message = "expected letters, digits, '.', '_' and '-', at most 64"
    return f"{where}: {message[:1].lower()}{message[1:]}, got {_shortened(detail['input'])}"


def _place(location: tuple[int | str, ...]) -> str:
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part + 1}]"
        elif part not in _UNION_BRANCHES:
            place += f".{part}" if place else part
    return place or "spec"


def _near_key(location: tuple[int | str, ...]) -> str:
    model: Any = Experiment
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            inner = getattr(annotation, "__args__", (annotation,))[0]
            model = inner if hasattr(inner, "model_fields") else model
    known = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(known)}."


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
