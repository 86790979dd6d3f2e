"""The table of features in docs/reference/back-ends.md is what programs/features.py finds, and
restarts.py under torchrun.

With PACELINE_WRITE_OUTPUTS=1 the table is written anew, with the features of the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.forking import PYTHON_PATH
from tests.support.outputs import WRITES

pytestmark = pytest.mark.contract

PAGE = Path(__file__).parents[2] / "docs/reference/back-ends.md"
BACK_ENDS = ("gloo", "paceline", "mpi4py")
RESTARTS = "torchrun --max-restarts"
AGAIN = "init_process_group again, after destroy_process_group"
# A new group of Gloo sometimes connects to the addresses of the former one, which the store keeps.
SOMETIMES = {"gloo": {RESTARTS, AGAIN}}
LIMIT_S = 200  # four processes import torch, two after two
HEADER = "| feature | `gloo` | `paceline` | `mpi4py` |\n|---|---|---|---|\n"


def error_after_restart(backend, folder):
    """Return what went wrong where torchrun starts two ranks again after one was killed."""
    if backend == "mpi4py":
        return "mpirun starts its ranks"
    program = Path(__file__).parent / "programs/restarts.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, "2", "--max-restarts", "1", program, backend, folder],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    sums = [file.read_text() for file in sorted(folder.glob("restarted.*"))]
    return "" if (done.returncode, sums) == (0, ["9.0", "9.0"]) else done.stdout[-2000:]


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
    restart = {RESTARTS: error_after_restart(backend, tmp_path)}
    for rank in range(2):
        found = json.loads((tmp_path / f"features.{rank}.json").read_text()) | restart
        place = BACK_ENDS.index(backend)
        if WRITES and rank == 0:
            write_column(place, found)
        expected = {name: marks[place] for name, marks in documented().items()}
        works = {name: not error for name, error in found.items()}
        works |= dict.fromkeys(SOMETIMES.get(backend, ()), False)
        assert works == expected, found
