"""A run in which some configurations fail: the others are rows, and `--resume` repeats the rest."""

import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, THREADS, small

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

QUICK = small(max_steps=3, warmup_steps=1, image_size=64).replace(*NO_SIDECAR)
# Preflight accepts the last one, because Open MPI has this parameter. mpirun refuses it at once,
# because Paceline sets it, too. With parameters that ranks refuse, mpirun 5.0.11 sometimes does not
# end.
SPEC = (
    QUICK
    + THREADS
    + """
[[trials]]
launcher = "mpi"
transport = "mpi"
local_strategy = "processes"
replicas = 2
mpi_parameters = { btl = "self" }
"""
)


def test_one_of_three_configurations_fails(paceline, tmp_path):
    spec, out = tmp_path / "three.toml", tmp_path / "run"
    spec.write_text(SPEC)
    ran = paceline.main("run", spec, "--out", out)
    shown = ran.stdout + ran.stderr
    assert ran.returncode == 5, shown
    assert "Traceback" not in shown
    assert "2 of 3 trials done." in shown

    rows = json.loads((out / "comparison.json").read_text())["rows"]
    failed = [row for row in rows if row["failed"]]
    assert len(rows) == 3
    assert [row["equivalent"] for row in rows if not row["failed"]] == [True] * 2
    assert [row["launcher"] for row in failed] == ["mpi"]
    assert len([line for line in shown.splitlines() if line.startswith("✗ tiny.mpi.")]) == 1
    report = (out / "report.html").read_text()
    for row in failed:
        assert "rank" in row["failed"]
        assert row["failed"].split(": ", 2)[1] in report

    before = {path: path.stat().st_mtime_ns for path in out.glob("trials/tiny.local*/outcome.json")}
    assert len(before) == 2
    again = paceline.main("run", "--resume", out)
    assert again.returncode == 5, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    attempts = {path.name.rpartition(".")[0] for path in (out / "attempts").iterdir()}
    assert attempts == {f"{row['configuration']}.r0" for row in failed}
