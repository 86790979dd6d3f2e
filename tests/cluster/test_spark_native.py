"""Rounds of Spark tasks; real Spark. tests/cluster/test_launch.py kills a worker."""

from __future__ import annotations

import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, small, trial

from paceline.measure.records.tables import row_dicts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),  # the first test carries the run
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = 4
PERIOD = 3  # the second round has one step


@pytest.fixture(scope="module")
def rows(tmp_path_factory, shared_cache):
    """Return the comparison's rows by transport, and the run directory."""
    folder = tmp_path_factory.mktemp("native")
    spec, out = folder / "native.toml", folder / "run"
    spec.write_text(
        small(max_steps=STEPS, image_size=32).replace(*NO_SIDECAR)
        + trial("spark", "spark-rounds", averaging_period_steps=PERIOD)
    )
    cli = cli_in(shared_cache, folder)
    done = cli("run", spec, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(cli.main("compare", out, "--json").stdout)["rows"]
    return {row["transport"]: row for row in found}, out


def lines(run_dir, transport, rank, name):
    (folder,) = run_dir.glob(f"trials/tiny.*.{transport}.*/ranks/{rank}")
    return list(row_dicts(folder / f"{name}.jsonl"))


def test_rounds_train_on_the_same_samples_to_about_the_same_loss(rows):
    by_transport, run_dir = rows
    row, exact = by_transport["spark-rounds"], by_transport["none"]
    assert row["final_loss"] == pytest.approx(exact["final_loss"], rel=0.05)
    sample_logs = [lines(run_dir, "spark-rounds", rank, "sample_log") for rank in (0, 1)]
    for step, alone in enumerate(lines(run_dir, "none", 0, "sample_log")):
        seen = [i for sample_log in sample_logs for i in sample_log[step]["sample_ids"]]
        assert sorted(seen) == sorted(alone["sample_ids"])


def test_rounds_record_what_they_exchange_with_the_step_that_ends_them(rows):
    _, run_dir = rows
    for rank in (0, 1):
        steps = lines(run_dir, "spark-rounds", rank, "steps")
        assert [s["step"] for s in steps] == list(range(STEPS))
        assert [s["comm_s"] > 0 for s in steps] == [False, False, True, True]
        rounds = lines(run_dir, "spark-rounds", rank, "communication")
        assert [r["operation"] for r in rounds] == ["round", "round"]
        for step, operation in zip(steps[2:], rounds, strict=True):
            took_s = operation["ended_unix_s"] - operation["arrived_unix_s"]
            assert took_s == pytest.approx(step["comm_s"])
    assert not list(run_dir.glob("trials/*/claims"))
