"""A step of the wall clock, of chrony or of a resumed machine, does not end a healthy trial."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from tests.functional.cli_runs import LIMIT_S, slowed, small, trial

from paceline.collectives.host import wait_until
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.tables import row_dicts

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

TWO_RANKS = "processes"


@pytest.mark.usefixtures("tiny_dataset")  # made before the run begins
@pytest.mark.parametrize(("seconds", "launcher"), [(10.0, "torchrun"), (-10.0, "mpi")])
def test_run_ends_well_after_a_step_of_the_clock(paceline, tmp_path, seconds, launcher):
    step = tmp_path / "step"
    cli = slowed(paceline, 0.2)
    environment = {**cli.environment, "CLOCK_STEP": f"{seconds}:{step}"}
    spec = small(image_size=64) + trial(launcher, "gloo")
    (tmp_path / "small.toml").write_text(spec, "utf-8")
    command = dataclasses.replace(cli, environment=environment).start(
        "run", "small.toml", "--out", "run", log=tmp_path / "log.txt"
    )
    try:
        wait_until(lambda: two_ranks_train(tmp_path) or command.poll() is not None, LIMIT_S)
        assert two_ranks_train(tmp_path), (tmp_path / "log.txt").read_text()
        step.touch()
        step_unix_s = time.time()
        assert command.wait(LIMIT_S) == 0, (tmp_path / "log.txt").read_text()
    finally:
        command.kill()
        command.wait(LIMIT_S)
    files = trial_of_two(tmp_path)
    assert json.loads(files.outcome.read_text())["status"] == "ok"
    assert [len(list(row_dicts(rank.steps))) for _, rank in files.ranks()] == [20, 20]
    # The sidecar does not take the ranks for others, and its times have no step.
    [(_, host)] = files.hosts()
    times = [row["unix_s"] for row in row_dicts(host.trace) if "unix_s" in row]
    assert times == sorted(times)
    assert times[-1] - times[0] < LIMIT_S
    after = [row for row in row_dicts(host.ranks) if row["unix_s"] > step_unix_s + 1]
    assert {row["rank"] for row in after} == {0, 1}
    for _, rank in files.ranks():
        assert all(r["ended_unix_s"] >= r["started_unix_s"] for r in row_dicts(rank.spans))
    [row] = [r for r in compared(paceline) if TWO_RANKS in r["configuration"]]
    assert row["equivalent"] is True


def trial_of_two(folder) -> TrialFiles:
    [files] = [files for name, files in RunFiles(folder / "run").trials() if TWO_RANKS in name]
    return files


def two_ranks_train(folder) -> bool:
    return len(list(folder.glob(f"run/trials/*{TWO_RANKS}*/ranks/*/steps.jsonl"))) == 2


def compared(paceline) -> list[dict[str, object]]:
    shown = paceline.main("compare", "run", "--json")
    assert shown.returncode == 0, shown.stderr
    rows: list[dict[str, object]] = json.loads(shown.stdout)["rows"]
    return rows
