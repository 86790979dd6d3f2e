"""Training progress of a rank at a moment."""

from __future__ import annotations

import pytest
from tests.unit.show.monitor.recorded import MPI, PAYLOAD_BYTES, make_recorded_run

from paceline.measure.records.rows import StepRow
from paceline.measure.records.tables import rows
from paceline.show.export.openmetrics import RankHistory


@pytest.fixture
def history(tmp_path):
    [(_, files)] = make_recorded_run(tmp_path / "run", (MPI,)).trials()
    return RankHistory(0, files.rank(0), 1, failed=False), rows(files.rank(0).steps, StepRow)


def test_nothing_has_happened_before_the_first_step(history) -> None:
    rank, steps = history
    progress = rank.until(steps[0].started_unix_s)
    assert progress["training_steps"] == 0
    assert progress["training_epoch"] is None
    assert progress["operations"] == {}


def test_steps_and_operations_that_ended_are_added_up(history) -> None:
    rank, steps = history
    at = steps[9].started_unix_s + steps[9].step_s + 1e-6
    progress = rank.until(at)
    first = steps[:10]
    assert progress["training_steps"] == 10
    assert progress["training_samples"] == sum(step.samples for step in first)
    assert progress["phases"]["comm"] == pytest.approx(sum(step.comm_s for step in first))
    durations = progress["training_step_seconds"]
    assert durations.total == pytest.approx(sum(step.step_s for step in first))
    assert sum(durations.counts) == 10
    assert progress["operations"]["allreduce"]["operations"] == 10
    assert progress["operations"]["allreduce"]["payload_bytes"] == 10 * PAYLOAD_BYTES


def test_all_is_known_at_the_end(history) -> None:
    rank, steps = history
    progress = rank.until(steps[-1].started_unix_s + 100)
    assert progress["training_steps"] == len(steps)
    assert progress["rank_failed"] == 0
