"""Sums over process trees: every process counts once, and counters never decrease."""

from __future__ import annotations

import pytest
from tests.unit.measure.telemetry.fake_processes import Table

from paceline.collectives.host import Process
from paceline.measure.telemetry import processes
from paceline.measure.telemetry.processes import ProcessTree, ProcessUsage


def tree(table: Table, *roots: int, excluded: tuple[int, ...] = ()) -> ProcessTree:
    found = ProcessTree(roots, excluded)
    found.read(expensive=False)
    return found


@pytest.fixture
def found(table: Table) -> ProcessTree:
    """The tree of process 10, which is alone at first."""
    table.add(10, 1)
    return tree(table, 10)


def identity(table: Table, pid: int) -> Process:
    return Process(pid, table.now[pid].started_ticks)


def read(found: ProcessTree, *, expensive: bool = False) -> ProcessUsage:
    found.read(expensive=expensive)
    return found.run


def one_process(cpu_s: float) -> ProcessUsage:
    return ProcessUsage(
        processes=1, threads=1, rss_bytes=1000, cpu_seconds=cpu_s, read_bytes=0, written_bytes=0
    )


def test_root_and_its_descendants_are_summed(table: Table) -> None:
    table.add(1, 0)
    table.add(10, 1, threads=2, rss_bytes=5)
    table.add(11, 10, threads=3, rss_bytes=7)
    table.add(12, 11, threads=4, rss_bytes=11)
    table.add(20, 1, threads=100)
    assert tree(table, 10).run == ProcessUsage(
        processes=3, threads=9, rss_bytes=23, read_bytes=0, written_bytes=0
    )


def test_processes_that_come_later_are_found_whatever_their_order(table, found) -> None:
    table.add(12, 13)
    table.add(13, 10)
    assert read(found).processes == 3


def test_process_of_somebody_else_is_looked_at_once(table: Table) -> None:
    table.add(10, 1)
    table.add(20, 1)
    found = tree(table, 10)
    table.looked_at.clear()
    read(found)
    assert 20 not in table.looked_at


def test_excluded_process_and_its_children_are_left_out(table: Table) -> None:
    table.add(10, 1)
    table.add(11, 10)
    table.add(12, 11)
    assert tree(table, 10, excluded=(11,)).run.processes == 1


def test_cpu_time_from_before_the_watch_does_not_count(table: Table) -> None:
    root = table.add(10, 1, cpu_s=100.0, children_cpu_s=50.0)
    child = table.add(11, 10, cpu_s=100.0)
    found = tree(table, 10)
    assert found.run.cpu_seconds == 0.0
    root.cpu_s += 2.5
    assert read(found).cpu_seconds == 2.5
    child.cpu_s += 1.5
    assert read(found).cpu_seconds == 4.0


def test_new_process_counts_from_its_birth(table, found) -> None:
    table.add(11, 10, cpu_s=4.0)
    assert read(found).cpu_seconds == 4.0


def test_ended_child_that_its_parent_waited_for_counts_once_and_to_its_end(table, found) -> None:
    child = table.add(11, 10, cpu_s=4.0)
    read(found)
    child.cpu_s = 4.75  # after the last tick
    table.end(11)
    assert read(found).cpu_seconds == 4.75
    assert read(found).cpu_seconds == 4.75


def test_child_that_lives_between_two_ticks_counts(table, found) -> None:
    table.add(11, 10, cpu_s=0.5)
    table.add(12, 11, cpu_s=0.25)
    table.end(12)
    table.end(11)
    assert read(found).cpu_seconds == 0.75


def test_child_that_is_waited_for_later_counts_once(table, found) -> None:
    root = table.now[10]
    child = table.add(11, 10, cpu_s=4.0)
    read(found)
    child.cpu_s = 4.75  # after the last tick
    table.end(11, reaped=False)
    assert read(found).cpu_seconds == 4.0
    root.children_cpu_s += 4.5
    root.cpu_s += 1.0
    assert read(found).cpu_seconds == 5.5


def test_debt_of_an_ended_child_passes_to_its_parent(table, found) -> None:
    child = table.add(11, 10, cpu_s=1.0)
    table.add(12, 11, cpu_s=4.0)
    assert read(found).cpu_seconds == 5.0
    table.end(12, reaped=False)  # its parent waits for it a moment after this tick
    assert read(found).cpu_seconds == 5.0
    child.children_cpu_s += 4.0
    table.end(11)
    assert read(found).cpu_seconds == 5.0


def test_counter_that_falls_takes_nothing_away_and_counts_nothing_twice(table: Table) -> None:
    root = table.add(10, 1, io=(1000, 0))
    found = tree(table, 10)
    seen = []
    for cpu_s, read_bytes in ((4.0, 1300), (3.0, 1100), (4.5, 1350)):
        root.cpu_s, root.io = cpu_s, (read_bytes, 0)
        usage = read(found)
        seen.append((usage.cpu_seconds, usage.read_bytes))
    assert seen == [(4.0, 300), (4.0, 300), (4.5, 350)]


def test_grandchild_that_ends_with_its_parent_counts_once(table, found) -> None:
    table.add(11, 10, cpu_s=1.0)
    table.add(12, 11, cpu_s=2.0)
    read(found)
    table.end(12)
    table.end(11)
    assert read(found).cpu_seconds == 3.0


def test_end_of_the_root_takes_nothing_away(table, found) -> None:
    table.now[10].cpu_s = 3.0
    read(found)
    table.end(10)
    assert read(found) == ProcessUsage(cpu_seconds=3.0, read_bytes=0, written_bytes=0)
    assert not found.any_alive()


def test_zombie_has_no_threads_and_no_memory(table, found) -> None:
    root = table.now[10]
    root.is_zombie, root.cpu_s = True, 2.0
    assert read(found) == ProcessUsage(cpu_seconds=2.0, read_bytes=0, written_bytes=0)
    assert not found.any_alive()


@pytest.mark.parametrize("expensive", [False, True])
def test_process_id_that_was_given_to_another_process_is_dropped(table, expensive) -> None:
    table.add(10, 1)
    table.add(11, 10, cpu_s=1.0)
    found = tree(table, 10)
    del table.now[11]
    table.add(11, 1, cpu_s=50.0)
    assert read(found, expensive=expensive).cpu_seconds == 0.0
    assert found.run.processes == 1


def test_expensive_figures_are_read_only_when_asked_for(table: Table) -> None:
    table.add(10, 1, pss_bytes=5, files=2)
    table.add(11, 10, pss_bytes=7, files=3)
    found = tree(table, 10)
    usage = found.run
    assert (usage.pss_bytes, usage.open_files, usage.voluntary_context_switches) == (None,) * 3
    usage = read(found, expensive=True)
    assert (usage.pss_bytes, usage.open_files, usage.voluntary_context_switches) == (12, 5, 0)


def test_context_switches_of_ended_threads_stay(table: Table) -> None:
    root = table.add(10, 1, switches={10: (100, 200)})
    found = tree(table, 10)
    root.switches = {10: (103, 201), 14: (10, 20)}
    usage = read(found, expensive=True)
    assert (usage.voluntary_context_switches, usage.involuntary_context_switches) == (13, 21)
    root.switches = {10: (104, 201), 15: (1, 1)}
    usage = read(found, expensive=True)
    assert (usage.voluntary_context_switches, usage.involuntary_context_switches) == (15, 22)


def test_bytes_of_children_count_once(table: Table) -> None:
    root = table.add(10, 1, io=(1000, 0))
    found = tree(table, 10)
    child = table.add(11, 10, io=(50, 5))
    usage = read(found)
    assert (usage.read_bytes, usage.written_bytes) == (50, 5)
    child.io = (60, 5)
    table.end(11)
    assert root.io == (1060, 5)
    usage = read(found)
    assert (usage.read_bytes, usage.written_bytes) == (60, 5)


def test_bytes_that_may_not_be_read_are_missing_not_zero(table: Table) -> None:
    table.add(10, 1, io=None)
    found = tree(table, 10)
    assert (found.run.read_bytes, found.run.written_bytes) == (None, None)
    table.add(11, 10, io=(0, 0))
    assert read(found).read_bytes == 0


def test_rank_gets_what_its_process_used_before_it_was_known(table, found) -> None:
    rank = table.add(11, 10, cpu_s=2.0)
    table.add(12, 10, cpu_s=16.0)
    read(found)
    found.set_ranks({3: identity(table, 11)})
    rank.cpu_s = 3.0
    read(found)
    assert found.ranks == {3: (11, one_process(3.0))}
    assert found.run.cpu_seconds == 19.0


def test_children_of_a_rank_belong_to_it_whenever_they_come(table: Table) -> None:
    table.add(10, 1)
    table.add(11, 10)
    table.add(12, 11)
    found = tree(table, 10)
    found.set_ranks({0: identity(table, 11)})
    table.add(13, 12, cpu_s=1.0)
    read(found)
    (_, usage) = found.ranks[0]
    assert (usage.processes, usage.cpu_seconds) == (3, 1.0)


def test_rank_outside_the_tree_joins_the_run(table: Table) -> None:
    table.add(10, 1)
    executor = table.add(20, 1, cpu_s=100.0)
    table.add(21, 20)
    found = tree(table, 10)
    found.set_ranks({0: identity(table, 20)})
    executor.cpu_s += 1.5
    assert read(found).processes == 3
    assert found.run.cpu_seconds == 1.5
    assert found.ranks[0][1].processes == 2


def test_process_id_of_an_ended_rank_is_not_believed(table: Table) -> None:
    table.add(10, 1)
    table.add(11, 10)
    ended = identity(table, 11)
    table.end(11)
    table.add(11, 10)
    table.add(12, 10)
    found = tree(table, 10)
    found.set_ranks({0: ended, 1: identity(table, 12)})
    read(found)
    assert list(found.ranks) == [1]


def test_rank_has_one_more_row_after_its_end(table: Table) -> None:
    table.add(10, 1)
    table.add(11, 10, cpu_s=1.0)
    found = tree(table, 10)
    found.set_ranks({0: identity(table, 11)})
    read(found)
    table.end(11)
    read(found)
    assert found.ranks[0][1].processes == 0
    read(found)
    assert found.ranks == {}


def test_rank_that_starts_again_goes_on_counting(table, found) -> None:
    table.add(11, 10, cpu_s=1.0)
    found.set_ranks({0: identity(table, 11)})
    read(found)
    found.set_ranks({0: identity(table, 11)})
    read(found)
    table.end(11)
    table.add(12, 10, cpu_s=2.0)
    read(found)
    found.set_ranks({0: identity(table, 12)})
    read(found)
    assert found.ranks[0] == (12, one_process(3.0))


def test_missing_roots_are_no_error(table: Table) -> None:
    found = tree(table, 99)
    assert found.run == ProcessUsage()
    assert not found.any_alive()


@pytest.mark.parametrize("pid", [10, 11])
def test_process_that_ends_while_it_is_read_counts_no_more(table, monkeypatch, pid) -> None:
    table.add(10, 1)
    table.add(11, 10)
    found = tree(table, 10)

    def bytes_of(asked: int) -> tuple[int, int]:
        if asked == pid:
            raise ProcessLookupError(asked)
        return 0, 0

    monkeypatch.setattr(processes, "read_process_io", bytes_of)
    assert read(found).processes == 1
