"""One script in several layouts under one baseline: all train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

LAYOUTS = Path(__file__).parents[2] / "examples/scripts/layouts.py"
STEPS = 4


@pytest.mark.parametrize(
    ("launcher", "transport", "layouts"),
    [
        ("torchrun", "gloo", ("ddp", "fsdp", "tp", "pipeline", "ddp+compile")),
        ("mpi", "mpi", ("fsdp", "tp", "pipeline")),
        ("spark", "gloo", ("fsdp", "tp", "pipeline")),
    ],
)
def test_all_layouts_are_equivalent_in_one_table(paceline, tmp_path, launcher, transport, layouts):
    options = ["--launcher", launcher, "--transport", transport, "--ranks", "2", "-q"]
    options += ["--max-steps", str(STEPS), "--repeats", "1", "--out", "run"]
    finished = paceline("run", *options, f"--vary=--layout={','.join(layouts)}", LAYOUTS)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    found = {row["configuration"]: row["equivalent"] for row in rows if row["ranks"] == 2}
    assert len(found) == len(layouts)
    assert found == dict.fromkeys(found, True)
    for name, operations in (("fsdp", {"reduce_scatter"}), ("pipeline", {"send", "recv"})):
        [trial] = (tmp_path / "run/trials").glob(f"*.layout-{name}.r0")
        tables = (trial / "ranks").glob("*/communication.parquet")
        seen = {each for table in tables for each in pl.read_parquet(table)["operation"]}
        assert operations <= seen
