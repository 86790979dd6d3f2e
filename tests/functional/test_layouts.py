"""One script in several layouts under one baseline: all train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from tests.functional.cli_runs import cli_in, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "examples/scripts/layouts.py"
SPEC = f"""
schema = 2
name = "layouts"
repeats = 1
[telemetry]
enabled = false
[[workloads]]
script = "{SCRIPT}"
max_steps = 4
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""
LAUNCHERS = {"torchrun": "gloo", "mpi": "mpi", "spark": "gloo"}
COMMON = ("fsdp", "tp", "pipeline")
OPERATIONS = {"fsdp": {"reduce_scatter"}, "pipeline": {"send", "recv"}}
# Spark brings the same transport as torchrun, and the code of the ranks is the same. test_verify.py
# compares each step of `ddp`, `fsdp` and `tp` under torchrun.
LAYOUTS = {"torchrun": ("pipeline", "ddp+compile"), "mpi": COMMON, "spark": ("fsdp",)}


@pytest.fixture(scope="module")
def run(cache, forks, tmp_path_factory):
    """Return the rows with two ranks of one run of all layouts, and its directory."""
    folder = tmp_path_factory.mktemp("layouts")
    trials = [
        trial(*each, arguments=[f"--layout={name}"])
        for each in LAUNCHERS.items()
        for name in LAYOUTS[each[0]]
    ]
    (folder / "layouts.toml").write_text(SPEC + "".join(trials), "utf-8")
    paceline = cli_in(cache, folder, forks)
    finished = paceline.main("run", "-q", "layouts.toml", "--out", "run")
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    return [row for row in rows if row["ranks"] == 2], folder / "run"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_layouts_are_equivalent_in_one_table(run, launcher):
    rows, run_dir = run
    own = [row for row in rows if row["launcher"] == launcher]
    found = {row["configuration"]: row["equivalent"] for row in own}
    assert len(found) == len(LAYOUTS[launcher])
    assert found == dict.fromkeys(found, True)
    for name in OPERATIONS.keys() & LAYOUTS[launcher]:
        [folder] = run_dir.glob(f"trials/*.{launcher}.*.layout-{name}.r0")
        tables = (folder / "ranks").glob("*/communication.parquet")
        seen = {each for table in tables for each in pl.read_parquet(table)["operation"]}
        assert OPERATIONS[name] <= seen


def test_layouts_can_be_named_by_an_option_instead(paceline):
    options = ("--launcher", "torchrun", "--ranks", "2", f"--vary=--layout={','.join(COMMON)}")
    shown = paceline.main("plan", "--json", *options, SCRIPT)
    assert shown.returncode == 0, shown.stderr
    planned = json.loads(shown.stdout)["trials"]
    expected = {(f"--layout={name}",) for name in COMMON}
    assert {tuple(each["arguments"]) for each in planned} - {()} == expected
