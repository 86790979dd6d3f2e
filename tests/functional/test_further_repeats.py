"""A finished run gets further repeats or configurations, as if it had been started with them."""

import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, THREADS, small

from paceline.analysis.trial.reading import load_run
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.phases import LONG_STEPS

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

# So many steps that the others replay some from states of a baseline, which a finished run has not.
LONG = small(max_steps=LONG_STEPS + 2, epochs=30, image_size=64).replace(*NO_SIDECAR) + THREADS


def test_finished_run_gets_further_repeats(paceline, tmp_path):
    spec, out = tmp_path / "long.toml", tmp_path / "run"
    spec.write_text(LONG)
    ran = paceline.main("run", spec, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert "`paceline run --resume RUN_DIR --repeats 5`" in " ".join(ran.stdout.split())
    before = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/outcome.json")}
    assert len(before) == 2

    more = paceline.main("run", "--resume", out, "--repeats", "2")
    assert more.returncode == 0, more.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    rows = json.loads((out / "comparison.json").read_text())["rows"]
    assert [(row["repeats"], row["equivalent"]) for row in rows] == [(2, True)] * 2
    records = load_run(RunFiles(out))
    assert [record.trial.repeat for record in records] == [0, 0, 1, 1]
    assert [record.result.replayed.missing for record in records] == [{}] * 4

    finished = paceline.main("run", "--resume", out, "--repeats", "2")
    assert finished.returncode == 2
    assert "expected more repeats than the 2 of this run, got 2" in finished.stderr


def test_finished_run_gets_a_further_configuration(paceline, tmp_path):
    spec, out = tmp_path / "long.toml", tmp_path / "run"
    spec.write_text(LONG)
    assert paceline.main("run", spec, "--out", out).returncode == 0
    keys = 'launcher="local", local_strategy="processes", ranks_per_node=2, oversubscribe=true'
    more = paceline.main("run", "--resume", out, "--add", keys)
    assert more.returncode == 0, more.stderr
    rows = json.loads((out / "comparison.json").read_text())["rows"]
    assert [row["equivalent"] for row in rows] == [True] * 3
    found = {record.trial.id: record for record in load_run(RunFiles(out))}
    assert sum(name.endswith(".r0.again") for name in found) == 1
    assert all(record.result.replayed.missing == {} for record in found.values())

    twice = paceline.main("run", "--resume", out, "--add", keys)
    assert twice.returncode == 2
    assert "equal to an earlier one" in twice.stderr
