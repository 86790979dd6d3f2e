"""TensorBoard reads the export back. Needs the extra `tensorboard`."""

from __future__ import annotations

import pytest
from tests.unit.analysis import fabricate

pytestmark = pytest.mark.needs("tensorboard")


def _read(folder):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    return events.Reload()


def test_curves_are_those_of_the_trial(run, pair, tmp_path):
    written = run.export("tensorboard", tmp_path / "out")
    assert written == [tmp_path / "out" / record.trial.id for record in run.trials]
    events = _read(tmp_path / "out" / pair)
    loss = events.Scalars("loss")
    assert [event.step for event in loss] == list(range(fabricate.Case().steps))
    expected = [1.2 - fabricate.LEARNED * n for n in range(len(loss))]
    assert [event.value for event in loss] == pytest.approx(expected)
    assert loss[0].wall_time > fabricate.LAUNCHED
    assert "node0/cpu_busy_percent" in events.Tags()["scalars"]


def test_a_second_export_replaces_the_first(run, pair, tmp_path):
    for _ in range(2):
        run.export("tensorboard", tmp_path / "out", pair)
    assert len(_read(tmp_path / "out" / pair).Scalars("loss")) == fabricate.Case().steps
