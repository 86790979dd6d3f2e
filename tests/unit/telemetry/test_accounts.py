"""Context switches, bytes and what is costly, on a table of processes with exact numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.telemetry.accounts import DeepReading, Figures, IoAccount, SwitchAccount, read_deep
from paceline.telemetry.procfs import ContextSwitches, IoBytes

if TYPE_CHECKING:
    from tests.unit.telemetry.conftest import FakeProcesses


def test_switches_of_ended_threads_and_processes_stay_counted(processes: FakeProcesses) -> None:
    processes.switches = {
        10: {10: ContextSwitches(1000, 100), 11: ContextSwitches(50, 5)},
        20: {20: ContextSwitches(0, 0)},
    }
    account = SwitchAccount(processes)
    account.read([10, 20])
    assert (account.voluntary, account.involuntary) == (0, 0)
    processes.switches = {
        10: {10: ContextSwitches(1003, 101), 12: ContextSwitches(7, 2)},  # 11 ended, 12 is new
        20: {20: ContextSwitches(40, 4)},
    }
    account.read([10, 20])
    assert (account.voluntary, account.involuntary) == (50, 7)
    account.read([10])
    assert (account.voluntary, account.involuntary) == (50, 7)


def test_switches_from_birth_and_those_of_a_sampler_before_count(
    processes: FakeProcesses,
) -> None:
    processes.switches = {10: {10: ContextSwitches(1000, 100)}}
    young = SwitchAccount(processes, from_birth=True)
    young.read([10])
    resumed = SwitchAccount(processes, voluntary=7, involuntary=3)
    resumed.read([10])
    processes.switches = {10: {10: ContextSwitches(1001, 102)}}
    for account in (young, resumed):
        account.read([10])
    assert (young.voluntary, young.involuntary) == (1001, 102)
    assert (resumed.voluntary, resumed.involuntary) == (8, 5)


def io_of(processes: FakeProcesses, account: IoAccount) -> IoBytes | None:
    return account.read(dict(processes.table))


@pytest.fixture
def figures(processes: FakeProcesses) -> Figures:
    class Fresh(Figures):
        """Asks anew each time, as if each were a tick."""

        def io_bytes(self, pid: int) -> IoBytes | None:
            self.next_tick()
            return super().io_bytes(pid)

    return Fresh(processes)


def test_bytes_from_before_the_watch_are_not_the_runs(
    processes: FakeProcesses, figures: Figures
) -> None:
    processes.add(10, 1)
    processes.io[10] = IoBytes(5000, 700)
    account = IoAccount(figures)
    assert io_of(processes, account) == (0, 0)
    processes.io[10] = IoBytes(5001, 702)
    assert io_of(processes, account) == (1, 2)


def test_bytes_of_a_child_that_was_waited_for_count_once(
    processes: FakeProcesses, figures: Figures
) -> None:
    processes.add(10, 1)
    account = IoAccount(figures, lambda stat: stat.pid == 10)
    io_of(processes, account)
    processes.add(11, 10)
    processes.io[11] = IoBytes(100, 10)
    assert io_of(processes, account) == (100, 10)
    processes.reap(11, by=10)
    processes.io[10] = IoBytes(130, 10)  # 30 more that no tick saw
    assert io_of(processes, account) == (130, 10)


def test_bytes_of_a_root_that_ended_stay_counted(
    processes: FakeProcesses, figures: Figures
) -> None:
    processes.add(10, 1)
    processes.add(20, 1)
    account = IoAccount(figures)
    io_of(processes, account)
    processes.io = {10: IoBytes(64, 1), 20: IoBytes(8, 2)}
    assert io_of(processes, account) == (72, 3)
    processes.reap(10, by=None)
    assert io_of(processes, account) == (72, 3)


def test_process_that_is_gone_before_its_bytes_are_read_counts_as_last_seen(
    processes: FakeProcesses, figures: Figures
) -> None:
    processes.add(10, 1)
    account = IoAccount(figures, lambda _stat: False)
    processes.io[10] = IoBytes(64, 1)
    members = dict(processes.table)
    assert account.read(members) == (64, 1)
    processes.reap(10, by=None)
    assert account.read(members) == (64, 1)
    assert account.read({}) == (64, 1)


def test_bytes_that_may_not_be_read_are_no_number(
    processes: FakeProcesses, figures: Figures
) -> None:
    processes.add(10, 1)
    processes.denied.add(10)
    assert IoAccount(figures).read(dict(processes.table)) is None


def test_bytes_go_on_in_another_sampler(processes: FakeProcesses, figures: Figures) -> None:
    processes.add(10, 1)
    processes.io[10] = IoBytes(1000, 0)
    before = IoAccount(figures)
    io_of(processes, before)
    processes.io[10] = IoBytes(1064, 0)
    assert io_of(processes, before) == (64, 0)
    processes.io[10] = IoBytes(1065, 5)
    assert io_of(processes, IoAccount(figures, added=before.added)) == (65, 5)


def test_each_process_is_asked_once_a_tick(processes: FakeProcesses) -> None:
    asked = []
    figures = Figures(processes)
    processes.add(10, 1)
    read = processes.io_bytes

    def counted(pid: int) -> IoBytes | None:
        asked.append(pid)
        return read(pid)

    processes.io_bytes = counted  # type: ignore[method-assign]
    for _ in range(3):
        figures.io_bytes(10)
    assert asked == [10]
    figures.next_tick()
    figures.io_bytes(10)
    assert asked == [10, 10]


def test_costly_sums_leave_out_the_gone_and_refuse_to_guess_the_hidden(
    processes: FakeProcesses,
) -> None:
    processes.pss, processes.files = {10: 100, 11: 20}, {10: 3, 11: 4}
    figures = Figures(processes)
    assert read_deep(figures, [10, 11, 12]) == DeepReading(120, 7)
    assert read_deep(figures, [12]) == DeepReading(None, None)
    assert read_deep(figures, []) == DeepReading(0, 0)
    processes.denied.add(13)
    assert read_deep(figures, [10, 13]) == DeepReading(None, None)
