"""Defaults of a spec are those that its reference page states."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel
from tests.support.documentation import ROOT

from paceline.plan.spec import models
from paceline.plan.spec import values as tables


def documented() -> dict[tuple[str, str], str]:
    """Return the default of each key by table ("" above [tune]), from the rows with four columns:
    keys, values, defaults, meaning."""
    page = (ROOT / "docs/reference/spec.md").read_text("utf-8")
    rows = re.findall(r"^\|([^|\n]*)\|[^|\n]*\|([^|\n]*)\|[^|\n]*\|$", page, re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    table = ""
    for names, defaults in rows:
        keys = re.findall(r"`([\w\[\]]+)`", names)
        if keys and keys[0].startswith("["):
            table = keys[0]
        pairs = zip(keys, defaults.strip().split(", "), strict=False)
        found |= {(table, key): default for key, default in pairs}
    return found


@pytest.mark.parametrize(
    ("table", "model"),
    [
        ("", models.Experiment), ("", models.TrialRequest), ("[tune]", models.TuneSettings),
        ("[telemetry]", models.TelemetrySettings), ("[limits]", models.Limits),
        ("[checkpoint]", tables.CheckpointSettings), ("[failures]", tables.FailureSettings),
    ],
)  # fmt: skip
def test_numbers_and_switches_are_those_of_the_page(table: str, model: type[BaseModel]) -> None:
    defaults = {name: field.default for name, field in model.model_fields.items()}
    numbers = {name: value for name, value in defaults.items() if isinstance(value, int | float)}
    shown = {k: str(v).lower() if isinstance(v, bool) else f"{v:g}" for k, v in numbers.items()}
    assert shown
    assert {name: documented().get((table, name)) for name in shown} == shown
