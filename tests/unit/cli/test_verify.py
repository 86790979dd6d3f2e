"""Sentences below the table of `paceline verify`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.shown import Statement
from paceline.cli import verify


@pytest.mark.parametrize(
    ("kind", "draws", "expected"),
    [
        ("module", True, ["To compare more, try --no-dropout."]),
        ("module", False, []),
        ("samples", False, ["To compare more, try --share BATCH_OPTION=N."]),
    ],
)
def test_dropout_is_turned_off_only_where_random_numbers_are_drawn(kind, draws, expected):
    finding = LayoutFinding(passed=False, reason="", kind=kind, draws=draws)
    shown = SimpleNamespace(statement=Statement.MEAN, acceptable=())
    layouts = [SimpleNamespace(finding=finding, shown=shown)]
    assert list(verify._advice(SimpleNamespace(options="", layouts=layouts))) == expected
