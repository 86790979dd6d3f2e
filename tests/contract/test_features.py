"""The table of features in docs/reference/back-ends.md is what programs/features.py finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

PAGE = Path(__file__).parents[2] / "docs/reference/back-ends.md"
BACK_ENDS = ("gloo", "paceline", "mpi4py")
HEADER = "| feature | `gloo` | `paceline` | `mpi4py` |"


def documented():
    """Return for each feature which back ends have it, as the page says."""
    _, _, table = PAGE.read_text().partition(f"{HEADER}\n|---|---|---|---|\n")
    rows = [line.strip("|").split("|") for line in table.partition("\n\n")[0].splitlines()]
    return {
        name.strip().replace("`", ""): [m.strip() == "✓" for m in marks] for name, *marks in rows
    }


@pytest.mark.parametrize("backend", BACK_ENDS)
def test_page_says_which_features_a_back_end_has(backend, run_ranks, tmp_path):
    run_ranks(2, "mpi", "features", tmp_path, backend)
    for rank in range(2):
        found = json.loads((tmp_path / f"features.{rank}.json").read_text())
        place = BACK_ENDS.index(backend)
        expected = {name: marks[place] for name, marks in documented().items()}
        assert {name: not error for name, error in found.items()} == expected, found
