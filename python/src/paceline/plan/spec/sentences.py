"""pydantic's faults as sentences: the key, what was expected, what was found."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.plan.spec.values import NAME_PATTERN

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Names that pydantic gives to the branches of a union in a fault's place.
_UNION_BRANCHES = {
    "int", "constrained-int", "constrained-float", "literal['auto']", "literal['model']",
    "literal['unbounded']", "tuple[constrained-int, ...]",
}  # fmt: skip
_LONGEST_NAME = 100  # characters
_PATTERNS = {NAME_PATTERN: "expected letters a to z, digits, '.', '_' and '-', at most 64"}


def sentences(
    details: list[ErrorDetails], unknown_key: Callable[[tuple[int | str, ...]], str] | None = None
) -> list[str]:
    """Return one sentence for each faulty place.

    unknown_key: says what to do about a key that does not exist, from its place.
    """
    places = [place_of(detail["loc"]) for detail in details]
    found: dict[str, str] = {}
    for place, detail in zip(places, details, strict=True):
        # A list whose every entry is faulty also counts as too short, and as no number where a
        # number may stand: neither is a fault of its own.
        is_of_list = detail["type"] in ("too_short", "int_type")
        if is_of_list and any(p.startswith(f"{place}[") for p in places):
            continue
        # A value that may be a number or a word is reported once for each; the first is enough.
        if detail["type"] == "extra_forbidden" and unknown_key is not None:
            found[place] = f"{place}: {unknown_key(detail['loc'])}"
        else:
            found.setdefault(place, _sentence(place, detail))
    return list(found.values())


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names, at most so many, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most similar; empty if none is."""
    # the comparison takes a time that grows with the square of the length
    near = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def no_such_key(key: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return what to do about a key that does not exist, without its place.

    elsewhere: dotted keys of other tables; one that ends with the key is what was meant.
    """
    names = list(known)
    meant = [dotted for dotted in elsewhere if dotted.endswith(f".{key}")]
    hint = did_you_mean(meant[0] if meant else key, [*names, *meant])
    hint = hint or f" Known keys: {', '.join(names) or 'none'}."
    return f"no such key.{hint}"


def place_of(location: tuple[int | str, ...]) -> str:
    """Return a place as in `trials[2].nodes`."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part + 1}]"
        elif part not in _UNION_BRANCHES:
            place += f".{part}" if place else part
    return place or "spec"


def _sentence(place: str, detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{place}: no such key"
    if kind == "missing":
        return f"{place}: expected, but missing"
    if kind == "literal_error":
        return f"{place}: expected one of {detail['ctx']['expected']}, got {detail['input']!r}"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return message
    if kind == "string_pattern_mismatch":
        pattern = detail["ctx"]["pattern"]
        message = _PATTERNS.get(pattern, f"expected text that matches {pattern}")
    return f"{place}: {message[:1].lower()}{message[1:]}, got {_shortened(detail['input'])}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
