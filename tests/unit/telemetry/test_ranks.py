"""Which processes are a rank's, and what they used, on a table of processes with exact numbers."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.records.files import write_json
from paceline.records.layout import TrialFiles
from paceline.records.rows import RankSample, RankStatus
from paceline.telemetry.accounts import Figures
from paceline.telemetry.processes import ProcessTable, ProcessTree
from paceline.telemetry.procfs import ContextSwitches, IoBytes
from paceline.telemetry.rank_finder import RankFinder
from paceline.telemetry.ranks import Ranks

if TYPE_CHECKING:
    from tests.unit.telemetry.conftest import FakeProcesses

HOST = "here"


class Trial:
    """A launcher, process 10, and ranks that tell who they are."""

    def __init__(self, root: Path, processes: FakeProcesses, resumed: Any = None) -> None:
        self.files = TrialFiles(root)
        self.processes = processes
        processes.clock_ticks = 5000
        if 10 not in processes.table:
            processes.add(10, 1, start_ticks=4000)
        self.table = ProcessTable(processes)
        self.figures = Figures(processes)
        self.whole = ProcessTree(self.table, [10])
        finder = RankFinder(root, HOST)
        self.ranks = Ranks(finder, self.table, self.figures, self.whole, resumed)
        self.now_s = 0.0
        self.tick()

    def tell(self, rank: int, pid: int, *, late_s: float = 0.0, **changes: Any) -> None:
        start_ticks = self.processes.table[pid].start_ticks
        age_s = (self.processes.clock_ticks - start_ticks) / 100
        status = RankStatus(
            rank=rank,
            host=HOST,
            pid=pid,
            process_started_unix_s=time.time() - age_s + late_s,
            state="running",
        )
        write_json(self.files.rank(rank).status, asdict(replace(status, **changes)))

    def tick(self, *, deep: bool = False) -> list[RankSample]:
        self.now_s += 1.0
        self.figures.next_tick()
        self.ranks.look(self.now_s)
        self.table.walk()
        self.whole.read()
        return self.ranks.sample(self.now_s, self.now_s, deep=deep)


@pytest.fixture
def trial(tmp_path: Path, processes: FakeProcesses) -> Trial:
    return Trial(tmp_path, processes)


def test_rank_has_its_process_and_all_below_from_their_birth(
    trial: Trial, processes: FakeProcesses
) -> None:
    processes.add(20, 10, start_ticks=5100, own_ticks=150, threads=3, rss_bytes=100)
    processes.add(21, 20, start_ticks=5101, own_ticks=50, threads=1, rss_bytes=20)
    processes.add(30, 10, start_ticks=5100, own_ticks=7)
    trial.tell(0, 20)
    trial.tell(1, 30)
    first, second = trial.tick()
    assert (first.rank, first.pid, first.processes, first.threads) == (0, 20, 2, 4)
    assert (first.cpu_seconds, first.cpu_percent, first.rss_bytes) == (2.0, None, 120)
    assert (second.rank, second.cpu_seconds) == (1, 0.07)
    processes.change(21, own_ticks=80)
    processes.reap(21, by=20)
    processes.change(20, own_ticks=170)
    first, second = trial.tick()
    assert (first.processes, first.cpu_seconds, first.cpu_percent) == (1, 2.5, 50.0)
    assert (second.cpu_seconds, second.cpu_percent) == (0.07, 0.0)


def test_costly_figures_come_when_it_is_their_turn(trial: Trial, processes: FakeProcesses) -> None:
    processes.add(20, 10, start_ticks=5100)
    processes.pss[20], processes.files[20] = 900, 12
    processes.io[20] = IoBytes(64, 8)
    processes.switches[20] = {20: ContextSwitches(5, 6)}
    trial.tell(0, 20)
    (row,) = trial.tick()
    assert (row.pss_bytes, row.open_files, row.voluntary_context_switches) == (None, None, 0)
    assert (row.read_bytes, row.written_bytes) == (64, 8)
    (row,) = trial.tick(deep=True)
    assert (row.pss_bytes, row.open_files) == (900, 12)
    assert (row.voluntary_context_switches, row.involuntary_context_switches) == (5, 6)


def test_ended_rank_has_one_row_more_and_stays_in_the_latest(
    trial: Trial, processes: FakeProcesses
) -> None:
    processes.add(20, 10, start_ticks=5100, own_ticks=100)
    trial.tell(0, 20)
    trial.tick()
    processes.reap(20, by=10)
    (row,) = trial.tick()
    assert (row.processes, row.cpu_seconds) == (0, 1.0)
    assert trial.tick() == []
    assert [latest.cpu_seconds for latest in trial.ranks.latest] == [1.0]


def test_what_a_rank_held_is_told_after_its_end_as_it_was_last(
    trial: Trial, processes: FakeProcesses
) -> None:
    processes.add(20, 10, start_ticks=5100, own_ticks=100, rss_bytes=500, threads=4)
    processes.pss[20], processes.files[20] = 300, 7
    trial.tell(0, 20)
    trial.tick(deep=True)
    processes.change(20, rss_bytes=450, threads=3)
    trial.tick()
    processes.change(20, rss_bytes=0, threads=1)  # on its way out
    trial.tick()
    processes.reap(20, by=10)
    (row,) = trial.tick(deep=True)
    assert (row.rss_bytes, row.threads, row.pss_bytes, row.open_files) == (0, 0, 0, 0)
    (last,) = trial.ranks.outlived
    assert (last.rss_bytes, last.threads, last.pss_bytes, last.open_files) == (450, 3, 300, 7)
    assert (last.processes, last.cpu_seconds) == (0, 1.0)


def test_rank_outside_of_the_launchers_tree_joins_it_without_its_past(
    trial: Trial, processes: FakeProcesses
) -> None:
    """An executor of a Spark cluster that ran already."""
    processes.add(40, 1, start_ticks=3000, own_ticks=9000)
    trial.tell(0, 40)
    (row,) = trial.tick()
    assert (row.processes, row.cpu_seconds) == (1, 0.0)
    processes.change(40, own_ticks=9004)
    (row,) = trial.tick()
    assert row.cpu_seconds == 0.04
    assert trial.whole.read().processes == 2


def test_rank_with_another_process_goes_on_with_it(trial: Trial, processes: FakeProcesses) -> None:
    """A Spark task of the next round, in another Python worker."""
    processes.add(20, 10, start_ticks=5100, own_ticks=100)
    trial.tell(0, 20)
    trial.tick()
    processes.reap(20, by=10)
    processes.add(21, 10, start_ticks=5200, own_ticks=11)
    trial.tell(0, 21)
    (row,) = trial.tick()
    assert (row.pid, row.processes, row.cpu_seconds) == (21, 1, 1.11)


def test_rank_that_comes_when_all_were_found_is_found_at_the_next_look(
    trial: Trial, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, pid in enumerate((20, 30)):
        processes.add(pid, 10, start_ticks=5100)
        trial.tell(rank, pid)
    # folders settle: two that are made within a tick of their clock look alike
    monkeypatch.setattr("paceline.telemetry.rank_finder._SETTLED_AFTER_NS", 0)
    assert [row.rank for row in trial.tick()] == [0, 1]
    read: list[int] = []
    statuses = RankFinder.statuses

    def counted(finder: RankFinder) -> dict[int, RankStatus]:
        read.append(1)
        return statuses(finder)

    monkeypatch.setattr(RankFinder, "statuses", counted)
    trial.tick()
    assert not read, "all are there and live: no status is looked at"
    time.sleep(0.02)  # more than a tick of the files' clock
    processes.add(40, 10, start_ticks=5100)
    trial.tell(2, 40)
    assert [row.rank for row in trial.tick()] == [0, 1, 2]


def test_executor_in_which_several_ranks_wait_is_no_ranks(
    trial: Trial, processes: FakeProcesses
) -> None:
    processes.add(15, 10, start_ticks=5050, own_ticks=500)
    processes.add(20, 15, start_ticks=5100)
    processes.add(21, 15, start_ticks=5100)
    trial.tell(0, 20)
    trial.tell(1, 21)
    trial.tick()
    trial.tell(0, 15)
    trial.tell(1, 15)
    assert [row.pid for row in trial.tick()] == [20, 21]


@pytest.mark.parametrize(
    "told",
    [{"host": "elsewhere"}, {"late_s": 5.0}, {"late_s": -5.0}, {"state": "done"}],
)
def test_status_that_is_not_of_a_rank_running_here_is_not_followed(
    trial: Trial, processes: FakeProcesses, told: dict[str, Any]
) -> None:
    processes.add(20, 10, start_ticks=5100)
    trial.tell(0, 20, **told)
    assert trial.tick() == []


def test_status_that_cannot_be_read_is_looked_at_again(
    trial: Trial, processes: FakeProcesses
) -> None:
    processes.add(20, 10, start_ticks=5100)
    status = trial.files.rank(0).status
    status.parent.mkdir(parents=True)
    status.write_text('{"rank":')
    assert trial.tick() == []
    trial.tell(0, 20)
    assert [row.pid for row in trial.tick()] == [20]


def test_ranks_go_on_in_another_sampler(tmp_path: Path, processes: FakeProcesses) -> None:
    before = Trial(tmp_path, processes)
    processes.add(20, 10, start_ticks=5100, own_ticks=100)
    processes.switches[20] = {20: ContextSwitches(5, 6)}
    before.tell(0, 20)
    before.tick()
    (last,) = before.tick(deep=True)
    processes.change(20, own_ticks=130)

    after = Trial(tmp_path, processes)
    after.whole = ProcessTree(after.table, [10], account=before.whole.account())
    after.ranks = Ranks(
        RankFinder(tmp_path, HOST), after.table, after.figures, after.whole, {0: last}
    )
    (row,) = after.tick(deep=True)
    assert row.cpu_seconds == 1.3
    assert (row.voluntary_context_switches, row.involuntary_context_switches) == (5, 6)
