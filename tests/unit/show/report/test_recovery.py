"""The section on failures: a row for each configuration and kind."""

from types import SimpleNamespace

import pytest
from tests.support.rows import survived

from paceline.show.report import sections
from paceline.show.report.section import Detail


def comparison(**by_configuration):
    """recoveries of each configuration."""
    rows = [SimpleNamespace(configuration=name) for name in by_configuration]
    trials = {
        name: [SimpleNamespace(recoveries=recoveries, checkpoint_delay_s=None)]
        for name, recoveries in by_configuration.items()
    }
    return SimpleNamespace(rows=rows, trials=trials)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setattr(sections, "name_in", lambda _, configuration: configuration)


def test_each_kind_of_failure_has_a_row():
    found = sections.recovery_section(
        comparison(
            mpi=[survived("rank", 60.0), survived("host", 60.0)],
            spark=[survived("rank", 5.0), survived("executor", 5.0), survived(None, 5.0)],
        )
    )
    lines = [[cell.text for cell in cells] for _, cells in found.table.lines(Detail.PAGE)]
    assert [line[:2] for line in lines] == [
        ["mpi", "rank"], ["mpi", "host"], ["spark", "rank"], ["spark", "executor"],
        ["spark", "not caused by the run"],
    ]  # fmt: skip
    assert lines[0][2:] == ["1", "0.100", "0.200", "60.0", "0.300", "60.6", "1.00", "1.00", "0"]


def test_without_a_failure_there_is_no_section():
    assert sections.recovery_section(comparison(mpi=[])) is None
