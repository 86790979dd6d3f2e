"""From when to when the dashboards look."""

from __future__ import annotations

import pytest
from monitoring.pictures.moments import windows
from tests.unit.analysis.fabricate import LAUNCHED
from tests.unit.monitor.recorded import make_recorded_run

from paceline.errors import DataError, UsageError
from paceline.records.layout import RunFiles


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFiles:
    return make_recorded_run(tmp_path_factory.mktemp("moments") / "recorded")


def test_run_shows_the_trial_with_most_ranks_and_the_others_show_all(run) -> None:
    found = windows(run, "told", None)
    assert set(found) == {"run", "compare", "cluster"}
    assert all(window.run == "told" for window in found.values())
    assert found["run"].range_s < 100
    # four trials, a thousand seconds apart
    assert found["compare"].range_s == pytest.approx(3030, abs=40)
    assert found["compare"].start_unix_s <= LAUNCHED
    assert found["cluster"].end_unix_s <= found["compare"].end_unix_s


def test_run_shows_the_trial_that_is_asked_for(run) -> None:
    last = "tiny.mpi.mpi.processes.n2r1t1.fp32.r0"
    assert windows(run, "r", last)["run"].start_unix_s > LAUNCHED + 2900


def test_long_times_have_wide_steps(run) -> None:
    found = windows(run, "r", None)
    assert found["run"].step_s == 1
    assert found["compare"].step_s > 5


def test_trial_that_is_not_there_is_refused_with_those_that_are(run) -> None:
    with pytest.raises(UsageError, match=r"expected one of tiny\."):
        windows(run, "r", "nobody")


def test_run_without_trials_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="there is none"):
        windows(RunFiles(tmp_path), "r", None)
