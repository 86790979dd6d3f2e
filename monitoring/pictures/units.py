"""Values as Grafana writes them, for the units that the dashboards have.

After packages/grafana-data/src/valueFormats in Grafana's sources: which steps a unit has and how
many digits a value is given. A unit that is not known here raises: a picture must not be wrong.
"""

from __future__ import annotations

import math

_COUNTS = ("", "K", "M", "B", "T")
_METRIC = {"Bps": "B/s", "hertz": "Hz", "watt": "W", "pps": "p/s"}
_STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "short": (1000, ("", " K", " Mil", " Bil", " Tri")),
    "ops": (1000, tuple(f"{prefix} ops/s" for prefix in _COUNTS)),
    "bytes": (1024, tuple(f" {prefix}B" for prefix in ("", "Ki", "Mi", "Gi", "Ti"))),
    **{
        unit: (1000, tuple(f" {prefix}{name}" for prefix in ("", "k", "M", "G", "T")))
        for unit, name in _METRIC.items()
    },
}
_SECONDS = (
    (1e-6, 1e9, " ns"),
    (1e-3, 1e6, " µs"),
    (1.0, 1e3, " ms"),
    (60.0, 1.0, " s"),
    (3600.0, 1 / 60, " mins"),
    (86400.0, 1 / 3600, " hours"),
    (math.inf, 1 / 86400, " days"),
)
_PLAIN = {"none": "", "celsius": " °C"}
_MOST_DECIMALS = 6


def text(value: float, unit: str, decimals: int | None = None) -> str:
    """`value` in `unit`, with so many digits after the point, or as many as it deserves."""
    if not math.isfinite(value):
        return str(value)
    number, suffix = scaled(value, unit)
    return f"{number:.{_deserved(number) if decimals is None else decimals}f}{suffix}"


def tick_texts(values: list[float], unit: str) -> list[str]:
    """Of an axis: with as few digits as tell the values exactly."""
    texts = []
    for value in values:
        number, suffix = scaled(value, unit)
        exact = (d for d in range(_MOST_DECIMALS) if abs(round(number, d) - number) < 1e-9)
        texts.append(f"{number:.{next(exact, _MOST_DECIMALS)}f}{suffix}")
    return texts


def scaled(value: float, unit: str) -> tuple[float, str]:
    """The number that is written, and what follows it. Raises ValueError for an unknown unit."""
    kind, _, own = unit.partition(":")
    if own and kind == "suffix":
        return value, f" {own}"  # Grafana, too, puts a space before it
    if own and kind == "count":
        return _stepped(value, 1000, tuple(f"{prefix} {own}" for prefix in _COUNTS))
    if unit == "percentunit":
        return value * 100, "%"
    if unit == "s":
        return _seconds(value)
    if unit in _STEPS:
        return _stepped(value, *_STEPS[unit])
    if unit not in _PLAIN:
        raise ValueError(f"unit {unit!r}: not one of those that the dashboards have so far")
    return value, _PLAIN[unit]


def is_binary(unit: str) -> bool:
    """Whether the unit goes up in steps of 1024."""
    return unit == "bytes"


def _seconds(value: float) -> tuple[float, str]:
    if value == 0:
        return 0.0, " s"
    return next(
        (value * factor, suffix) for below, factor, suffix in _SECONDS if abs(value) < below
    )


def _stepped(value: float, step: int, suffixes: tuple[str, ...]) -> tuple[float, str]:
    place = 0 if abs(value) < step else math.floor(math.log(abs(value), step) + 1e-12)
    place = min(place, len(suffixes) - 1)
    return value / step**place, suffixes[place]


def _deserved(number: float) -> int:
    """Three digits that mean something, or all before the point: getDecimalsForValue."""
    if number == int(number):
        return 0
    return max(0, 2 - math.floor(math.log10(abs(number))))
