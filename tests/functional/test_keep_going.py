"""A run in which some configurations fail: the others are rows, and `--resume` repeats the rest."""

import json

import pytest
from tests.functional.cli_runs import SMALL

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

LIMIT_S = 300  # a busy machine needs several times as long as an idle one

QUICK = (
    SMALL.replace("max_steps = 20", "max_steps = 3")
    .replace("warmup_steps = 2", "warmup_steps = 1")
    .replace("image_size = 128", "image_size = 64")
    .replace("interval_s = 0.1", "enabled = false")
)
# Each of them is one process, so that the test starts few.
THREADS = 'local_strategy = "threads"\noversubscribe = true\nreplicas = '
LAST = '\nmemory_format = "channels_last"'
GOOD = (
    'local_strategy = "sequential"' + LAST,
    *(f"{THREADS}{replicas}{layout}" for replicas in (2, 4, 8, 16) for layout in ("", LAST)),
)
# Preflight accepts both, because Open MPI has this parameter. mpirun refuses them at once, because
# Paceline sets it, too. With parameters that ranks refuse, mpirun 5.0.11 sometimes does not end.
BAD = ('mpi_parameters = { btl = "self" }', 'mpi_parameters = { btl = "tcp" }')
SPEC = (
    QUICK
    + "".join(f'[[trials]]\nlauncher = "local"\n{keys}\n' for keys in GOOD)
    + "".join(
        '[[trials]]\nlauncher = "mpi"\nlocal_strategy = "processes"\nreplicas = 2\n'
        f'transport = "mpi"\n{keys}\n'
        for keys in BAD
    )
)


def test_two_of_twelve_configurations_fail(paceline, tmp_path):
    spec, out, log = tmp_path / "twelve.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(SPEC)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        code = process.wait(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
    shown = log.read_text("utf-8")
    assert code == 5, shown
    assert "Traceback" not in shown
    assert "2 trials failed:" in shown

    rows = json.loads((out / "comparison.json").read_text())["rows"]
    failed = [row for row in rows if row["failed"]]
    assert len(rows) == 12
    assert [row["equivalent"] for row in rows if not row["failed"]] == [True] * 10
    assert {row["launcher"] for row in failed} == {"mpi"}
    assert len([line for line in shown.splitlines() if line.startswith("✗ tiny.mpi.")]) == 2
    report = (out / "report.html").read_text()
    for row in failed:
        assert "rank" in row["failed"]
        assert row["failed"].split(": ", 2)[1] in report

    before = {path: path.stat().st_mtime_ns for path in out.glob("trials/tiny.local*/outcome.json")}
    assert len(before) == 10
    again = paceline("run", "--resume", out)
    assert again.returncode == 5, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    attempts = {path.name.rpartition(".")[0] for path in (out / "attempts").iterdir()}
    assert attempts == {f"{row['configuration']}.r0" for row in failed}
