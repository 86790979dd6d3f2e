"""The section on failures: a row for each configuration and kind, and sentences on rates."""

from types import SimpleNamespace

import pytest

from paceline.analysis.recovery import Recovery
from paceline.report import recovery as module


def survived(kind, restore_s):
    return Recovery(
        kind=kind,
        failed_rank=0,
        steps_done=5,
        resumed_steps=4,
        lost_work_s=1.0,
        detect_s=0.1,
        restart_s=0.2,
        restore_s=restore_s,
        next_step_s=0.3,
    )


def comparison(**by_configuration):
    """step_s and recoveries of each configuration."""
    rows = [
        SimpleNamespace(configuration=name, step_s=SimpleNamespace(median=step_s))
        for name, (step_s, _) in by_configuration.items()
    ]
    trials = {
        name: [SimpleNamespace(recoveries=recoveries, checkpoints=None)]
        for name, (_, recoveries) in by_configuration.items()
    }
    return SimpleNamespace(rows=rows, trials=trials)


@pytest.fixture
def section(monkeypatch):
    monkeypatch.setattr(module, "_name", lambda _, configuration: configuration)
    return module.recovery


def test_each_kind_of_failure_has_a_row_and_a_sentence(section):
    found = section(
        comparison(
            mpi=(1.0, [survived("rank", 60.0), survived("host", 60.0)]),
            spark=(1.05, [survived("rank", 5.0), survived("executor", 5.0), survived(None, 5.0)]),
        )
    )
    kinds = [(row["name"], row["kind"]) for row in found["rows"]]
    assert kinds == [
        ("mpi", "rank"), ("mpi", "host"), ("spark", "rank"), ("spark", "executor"),
        ("spark", module.UNKNOWN),
    ]  # fmt: skip
    assert found["rows"][0]["downtime_s"] == pytest.approx(60.6)
    (sentence,) = found["sentences"]
    assert sentence.startswith(
        "mpi is expected to be faster while failures of kind rank are rarer than one in "
    )


def test_without_a_failure_there_is_no_section(section):
    assert section(comparison(mpi=(1.0, []))) is None
