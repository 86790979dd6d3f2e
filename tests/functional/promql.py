"""Which metrics and labels a query names, checked against the declared metrics."""

from __future__ import annotations

import re

from paceline.measure.records.metrics import METRICS

LABELS = {
    name: {
        *metric.scope.labels,
        *metric.labels,
        *metric.info_labels,
        *(("le",) if name.endswith("_bucket") else ()),
    }
    for metric in METRICS
    for name in metric.series
}
# made by Prometheus, not by a sidecar
OTHERS = {"up": {"job", "instance"}}
_SERIES = re.compile(r"(?<![a-z_:\"])((?:paceline_[a-z_0-9]+|up))\b(\{[^}]*\})?")
_KEYS = re.compile(r"\b(?:by|on|group_left|group_right) \(([^)]*)\)")
_MATCHER = re.compile(r"([a-z_]+)(?:=~|!~|!=|=)\"")


def series_in(expr: str) -> dict[str, set[str]]:
    """The series that `expr` names, with the labels that it is asked for by."""
    found: dict[str, set[str]] = {}
    for name, selector in _SERIES.findall(_without_recorded(expr)):
        found.setdefault(name, set()).update(_MATCHER.findall(selector))
    return found


def grouping_labels_in(expr: str) -> set[str]:
    return {label.strip() for keys in _KEYS.findall(expr) for label in keys.split(",")} - {""}


def faults(expr: str) -> list[str]:
    """What `expr` asks for and no sidecar tells."""
    known = {**LABELS, **OTHERS}
    named = series_in(expr)
    found = [f"no metric {name}" for name in named if name not in known]
    for name, labels in named.items():
        found += [f"{name} has no label {label}" for label in labels - known.get(name, labels)]
    everywhere = set().union(*(known.get(name, set()) for name in named), {"le", "epoch"})
    if named:
        found += [
            f"none of {', '.join(named)} has {label}"
            for label in grouping_labels_in(expr) - everywhere
        ]
    return found


def _without_recorded(expr: str) -> str:
    """Names of recorded series have colons; what they are made of is checked where they are."""
    return re.sub(r"[a-z_]+:[a-zA-Z0-9_:]+", "recorded", expr)
