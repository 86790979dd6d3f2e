"""The committed dashboards with their panels and queries."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "monitoring" / "grafana" / "dashboards"
NAMES = ("run", "compare", "cluster")
DOCUMENTS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}


def panels(name: str) -> list[dict]:
    """All panels of a dashboard that show something, those in closed rows too."""
    found = []
    for panel in DOCUMENTS[name]["panels"]:
        found += [panel, *panel.get("panels", [])]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[tuple[str, str, dict]]:
    return [
        (f"{name}: {panel['title']}: {target['legendFormat']}", panel["type"], target)
        for name in NAMES
        for panel in panels(name)
        for target in panel["targets"]
    ]


def query(name: str, title: str, legend: str) -> str:
    """Return the query of a panel by its title and its legend."""
    [expr] = [
        target["expr"]
        for panel in panels(name)
        if panel["title"] == title
        for target in panel["targets"]
        if target["legendFormat"] == legend
    ]
    return str(expr)
