"""The table of features in docs/reference/back-ends.md is what programs/features.py finds.

With PACELINE_WRITE_OUTPUTS=1 the table is written anew, with the features of the program.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.outputs import WRITES

pytestmark = pytest.mark.contract

PAGE = Path(__file__).parents[2] / "docs/reference/back-ends.md"
BACK_ENDS = ("gloo", "paceline", "mpi4py")
HEADER = "| feature | `gloo` | `paceline` | `mpi4py` |\n|---|---|---|---|\n"


def documented():
    """Return for each feature which back ends have it, as the page says."""
    _, _, table = PAGE.read_text().partition(HEADER)
    rows = [line.strip("|").split("|") for line in table.partition("\n\n")[0].splitlines()]
    return {
        name.strip().replace("`", ""): [m.strip() == "✓" for m in marks] for name, *marks in rows
    }


def write_column(place, found):
    """Write the marks of one back end, and a row for each feature; new rows have no other marks."""
    before, _, rest = PAGE.read_text().partition(HEADER)
    _, blank, after = rest.partition("\n\n")
    old, rows = documented(), []
    for name, error in found.items():
        marks = old.get(name, [False] * len(BACK_ENDS))
        marks[place] = not error
        rows.append(f"| {name} | {' | '.join('✓' if mark else '–' for mark in marks)} |")  # noqa: RUF001
    PAGE.write_text(before + HEADER + "\n".join(rows) + blank + after)


@pytest.mark.parametrize("backend", BACK_ENDS)
def test_page_says_which_features_a_back_end_has(backend, run_ranks, tmp_path):
    run_ranks(2, "mpi", "features", tmp_path, backend)
    for rank in range(2):
        found = json.loads((tmp_path / f"features.{rank}.json").read_text())
        place = BACK_ENDS.index(backend)
        if WRITES and rank == 0:
            write_column(place, found)
        expected = {name: marks[place] for name, marks in documented().items()}
        assert {name: not error for name, error in found.items()} == expected, found
