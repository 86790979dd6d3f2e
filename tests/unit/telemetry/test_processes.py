"""Who belongs to a tree, and the account of CPU time, on a table of processes with exact numbers.

Every expectation is what the processes really used after the first walk, added up by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.telemetry.processes import ProcessTable, TreeAccount, TreeReading
from paceline.telemetry.processes import ProcessTree as TreeOfTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.unit.telemetry.conftest import FakeProcesses


class ProcessTree:
    """A tree with a table of its own."""

    def __init__(
        self, source: FakeProcesses, roots: Iterable[int], excluded: Iterable[int] = ()
    ) -> None:
        self.table = ProcessTable(source, excluded)
        self.tree = TreeOfTable(self.table, roots)

    def walk(self) -> TreeReading:
        self.table.walk()
        return self.tree.read()

    def any_alive(self) -> bool:
        return self.tree.any_alive()


def test_sums_are_over_the_tree_and_leave_out_strangers_and_the_sidecar(
    processes: FakeProcesses,
) -> None:
    processes.add(10, 1, threads=2, rss_bytes=100)
    processes.add(11, 10, threads=3, rss_bytes=20)
    processes.add(12, 11, threads=4, rss_bytes=3)
    processes.add(13, 10, threads=1000, rss_bytes=1000)  # the sidecar, a child of the root
    processes.add(14, 13, threads=1000, rss_bytes=1000)
    processes.add(20, 1, threads=1000, rss_bytes=1000)
    reading = ProcessTree(processes, [10], [13]).walk()
    assert (reading.processes, reading.threads, reading.rss_bytes) == (3, 9, 123)


def test_overlapping_roots_count_once(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    assert ProcessTree(processes, [11, 10, 11]).walk().processes == 2


def test_time_used_before_the_first_walk_is_not_the_runs(processes: FakeProcesses) -> None:
    processes.add(10, 1, own_ticks=5000, children_ticks=700)
    processes.add(11, 10, own_ticks=300)
    tree = ProcessTree(processes, [10])
    assert tree.walk().cpu_seconds == 0.0
    processes.change(10, own_ticks=5001)
    processes.change(11, own_ticks=350)
    assert tree.walk().cpu_seconds == 0.51


def test_process_born_later_counts_in_full(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.add(11, 10, own_ticks=40)
    processes.add(12, 11, own_ticks=2)
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (3, 0.42)


def test_child_that_came_and_went_between_walks_is_counted(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.add(11, 10, own_ticks=123)
    processes.reap(11, by=10)
    assert tree.walk().cpu_seconds == 1.23


def test_child_seen_and_then_waited_for_counts_once(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=100)
    assert tree.walk().cpu_seconds == 1.0
    processes.change(11, own_ticks=130)  # 0.3 s more that no walk sees
    processes.reap(11, by=10)
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (1, 1.3)
    assert tree.walk().cpu_seconds == 1.3


def test_zombie_counts_its_time_once_and_is_no_live_process(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=100, ended=True)
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (1, 1.0)
    processes.reap(11, by=10)
    assert tree.walk().cpu_seconds == 1.0


def test_child_that_nobody_waited_for_keeps_its_last_seen_time(processes: FakeProcesses) -> None:
    """The parent ignores SIGCHLD, or init reaped a daemon."""
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=100)
    tree.walk()
    processes.reap(11, by=None)
    assert tree.walk().cpu_seconds == 1.0


def test_root_that_ends_keeps_its_time_and_that_of_its_children(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(10, own_ticks=50, children_ticks=7)
    processes.change(11, own_ticks=100)
    tree.walk()
    processes.reap(11, by=10)
    processes.reap(10, by=None)
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (0, 1.57)


def test_parent_and_child_that_end_together_count_once(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    processes.add(12, 11)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=20)
    processes.change(12, own_ticks=300)
    tree.walk()
    processes.reap(12, by=11)
    processes.reap(11, by=10)
    assert tree.walk().cpu_seconds == 3.2


def test_parent_ends_and_its_child_goes_to_init_and_ends_there(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    processes.add(12, 11)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=20)
    processes.change(12, own_ticks=300)
    tree.walk()
    processes.reap(11, by=10)
    reading = tree.walk()
    assert processes.table[12].ppid == 1
    assert (reading.processes, reading.cpu_seconds) == (2, 3.2)  # the orphan stays watched
    processes.change(12, own_ticks=350)
    assert tree.walk().cpu_seconds == 3.7
    processes.reap(12, by=None)
    assert tree.walk().cpu_seconds == 3.7


@pytest.mark.parametrize("moment", [10, 11, 12])
def test_child_that_ends_within_a_walk_counts_once(processes: FakeProcesses, moment: int) -> None:
    """Whichever of parent and children is being read just then."""
    processes.add(10, 1)
    processes.add(11, 10)
    processes.add(12, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=200)
    processes.change(12, own_ticks=5)
    tree.walk()

    def end_one(pid: int) -> None:
        if pid == moment and 11 in processes.table:
            processes.reap(11, by=10)

    processes.before_stat = end_one
    tree.walk()
    processes.before_stat = None
    assert tree.walk().cpu_seconds == 2.05
    assert tree.walk().cpu_seconds == 2.05


def test_two_children_that_end_within_a_walk_count_once(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    for pid in (11, 12, 13):
        processes.add(pid, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    for pid, ticks in ((11, 100), (12, 20), (13, 3)):
        processes.change(pid, own_ticks=ticks)
    tree.walk()
    doomed = [13, 11]  # one before it is read, one after

    def end_next(pid: int) -> None:
        if pid == 12 and doomed:
            processes.reap(doomed.pop(), by=10)

    processes.before_stat = end_next
    tree.walk()
    processes.before_stat = None
    assert tree.walk().cpu_seconds == 1.23


def test_reused_process_number_is_another_process(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=100)
    tree.walk()
    processes.reap(11, by=10)
    processes.add(11, 1, own_ticks=99999, start_ticks=5000)  # a stranger
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (1, 1.0)


def test_number_of_a_stranger_reused_by_a_descendant_is_found_in_time(
    processes: FakeProcesses,
) -> None:
    processes.add(10, 1)
    processes.add(50, 1)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.add(50, 10, own_ticks=70, start_ticks=5000)
    readings = [tree.walk() for _ in range(11)]
    assert (readings[-1].processes, readings[-1].cpu_seconds) == (2, 0.7)


def test_orphan_never_seen_with_its_parent_is_found_by_its_session(
    processes: FakeProcesses,
) -> None:
    processes.add(10, 1, session=10)
    processes.add(30, 1, session=30)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.add(12, 1, session=10, own_ticks=9)  # its parent came and went
    processes.add(31, 1, session=30, own_ticks=9)
    reading = tree.walk()
    assert (reading.processes, reading.cpu_seconds) == (2, 0.09)


def test_session_number_is_forgotten_with_its_last_process(processes: FakeProcesses) -> None:
    processes.add(9, 1, session=1)
    processes.add(10, 9, session=10)
    tree = ProcessTree(processes, [9])
    tree.walk()
    processes.reap(10, by=9)
    tree.walk()
    processes.add(10, 1, session=10, start_ticks=5000)
    assert tree.walk().processes == 1


def test_process_that_may_not_be_read_keeps_its_last_values(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10, rss_bytes=77)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.change(11, own_ticks=10)
    tree.walk()
    processes.denied.add(11)
    processes.change(11, own_ticks=1000)
    reading = tree.walk()
    assert (reading.processes, reading.rss_bytes, reading.cpu_seconds) == (2, 1077, 0.1)


def test_a_walk_lists_once_and_reads_each_watched_process_once(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    for pid in range(11, 31):
        processes.add(pid, 10)
    for pid in range(100, 400):
        processes.add(pid, 1)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.listings, processes.reads = 0, []
    tree.walk()
    assert processes.listings == 1
    assert sorted(processes.reads) == list(range(10, 31))


def test_nothing_is_listed_while_no_process_was_added_anywhere(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.newest = 10
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.listings = 0
    tree.walk()
    assert processes.listings == 0
    processes.add(11, 10)
    processes.newest = 11
    assert tree.walk().processes == 2
    assert processes.listings == 1


def test_process_with_a_number_that_was_not_listed_yet_is_found_soon(
    processes: FakeProcesses,
) -> None:
    processes.add(10, 1)
    processes.newest = 11  # given away, but its process is not there yet
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.add(11, 10)
    assert 2 in [tree.walk().processes for _ in range(10)]


def test_new_roots_are_looked_through_although_no_process_was_added(
    processes: FakeProcesses,
) -> None:
    for pid in (10, 20, 21):
        processes.add(pid, 20 if pid == 21 else 1)
    processes.newest = 21
    tree = ProcessTree(processes, [10])
    tree.walk()
    tree.tree.add_roots([20])
    assert tree.walk().processes == 3


def test_tree_that_is_dropped_lets_go_of_what_it_alone_had(processes: FakeProcesses) -> None:
    for pid, parent in ((10, 1), (11, 10), (20, 1)):
        processes.add(pid, parent)
    table = ProcessTable(processes)
    first, second = TreeOfTable(table, [10]), TreeOfTable(table, [20])
    table.walk()
    first.read(), second.read()
    first.drop()
    assert processes.let_go_of == {10, 11}


def test_tree_is_alive_until_its_last_process_ended(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    tree = ProcessTree(processes, [10])
    tree.walk()
    processes.reap(10, by=None)
    assert tree.any_alive()
    processes.change(11, ended=True)
    assert not tree.any_alive()
    processes.reap(11, by=None)
    assert not tree.any_alive()


def test_reused_number_does_not_keep_a_tree_alive(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    tree = ProcessTree(processes, [10])
    processes.reap(10, by=None)
    processes.add(10, 1, start_ticks=5000)
    assert not tree.any_alive()


def test_two_trees_take_each_its_own_and_are_read_once(processes: FakeProcesses) -> None:
    for root in (10, 20):
        processes.add(root, 1)
        processes.add(root + 1, root)
    table = ProcessTable(processes)
    first, second = TreeOfTable(table, [10]), TreeOfTable(table, [20])
    table.walk()
    assert (first.read().processes, second.read().processes) == (2, 2)
    processes.add(12, 11, own_ticks=30)
    processes.add(22, 21, own_ticks=4)
    processes.listings, processes.reads = 0, []
    table.walk()
    assert (first.read().cpu_seconds, second.read().cpu_seconds) == (0.3, 0.04)
    assert processes.listings == 1
    assert sorted(processes.reads) == [10, 11, 12, 20, 21, 22]


def test_tree_that_comes_later_takes_what_another_has_already(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10, own_ticks=500)
    processes.add(12, 11)
    processes.add(13, 10)
    table = ProcessTable(processes)
    whole = TreeOfTable(table, [10])
    table.walk()
    whole.read()
    part = TreeOfTable(table, [11])
    table.walk()
    assert (whole.read().processes, part.read().processes) == (4, 2)
    processes.change(12, own_ticks=7)
    table.walk()
    assert (whole.read().cpu_seconds, part.read().cpu_seconds) == (0.07, 0.07)


def test_root_above_the_root_of_another_tree_keeps_parents_first(
    processes: FakeProcesses,
) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    table = ProcessTable(processes)
    inner = TreeOfTable(table, [11])
    table.walk()
    inner.read()
    outer = TreeOfTable(table, [10])
    assert list(table.now) == [10, 11]
    table.walk()
    inner.read()
    outer.read()
    processes.change(11, own_ticks=200)

    def end_it(pid: int) -> None:
        if pid == 10 and 11 in processes.table:
            processes.reap(11, by=10)

    table.walk()
    inner.read()
    outer.read()
    processes.before_stat = end_it
    table.walk()
    assert (inner.read().cpu_seconds, outer.read().cpu_seconds) == (2.0, 2.0)


def test_what_nobody_watches_any_more_is_not_read(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    processes.add(11, 10)
    processes.add(20, 1)
    table = ProcessTable(processes)
    whole, part, other = (TreeOfTable(table, [root]) for root in (10, 11, 20))
    table.walk()
    for tree in (whole, part, other):
        tree.read()
    whole.drop()
    assert sorted(table.now) == [11, 20]
    part.drop()
    assert sorted(table.now) == [20]
    other.drop()
    assert table.now == {}


def test_tree_that_misses_walks_still_takes_in_who_came(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    table = ProcessTable(processes)
    tree = TreeOfTable(table, [10])
    table.walk()
    tree.read()
    processes.add(11, 10, own_ticks=5)
    table.walk()
    processes.add(12, 11, own_ticks=6)
    table.walk()
    table.walk()
    assert tree.read() == TreeReading(3, 3, 3000, 0.11)


def test_part_of_a_tree_counts_from_the_birth_of_what_came_after_the_watch(
    processes: FakeProcesses,
) -> None:
    """A rank says who it is only after it has imported its modules."""
    processes.add(10, 1)
    processes.add(11, 10, own_ticks=1000)
    table = ProcessTable(processes)
    whole = TreeOfTable(table, [10])
    table.walk()
    whole.read()
    processes.add(12, 10, own_ticks=250)
    processes.change(11, own_ticks=1003)
    young = TreeOfTable(table, [12], born_after=whole)
    table.walk()
    whole.read()
    old = TreeOfTable(table, [11], born_after=whole)
    young.add_roots([12])
    table.walk()
    assert young.read().cpu_seconds == 2.5
    assert old.read().cpu_seconds == 0.03


def test_root_that_joins_later_but_is_older_than_the_watch_brings_no_past(
    processes: FakeProcesses,
) -> None:
    processes.clock_ticks = 100
    processes.add(10, 1, start_ticks=90)
    processes.add(20, 1, start_ticks=50, own_ticks=7000)
    table = ProcessTable(processes)
    tree = TreeOfTable(table, [10])
    table.walk()
    tree.read()
    processes.add(30, 1, start_ticks=150, own_ticks=40)
    tree.add_roots([20, 30])
    processes.change(20, own_ticks=7002)
    table.walk()
    reading = tree.read()
    assert (reading.processes, reading.cpu_seconds) == (3, 0.42)


def test_account_goes_on_in_another_sampler(processes: FakeProcesses) -> None:
    processes.add(10, 1, own_ticks=1000)
    processes.add(11, 10)
    before = ProcessTree(processes, [10])
    before.walk()
    processes.change(11, own_ticks=100)
    processes.add(12, 11, own_ticks=20)
    processes.add(13, 10)
    before.walk()
    processes.reap(13, by=None)
    before.walk()
    kept = before.tree.account()

    processes.change(10, own_ticks=1003)
    processes.reap(11, by=10)  # 12 goes to init, and no root leads to it any more
    processes.add(14, 10, own_ticks=5)
    table = ProcessTable(processes)
    tree = TreeOfTable(table, [10], account=kept)
    table.walk()
    reading = tree.read()
    assert (reading.processes, reading.cpu_seconds) == (3, 1.28)


def test_account_of_a_tree_that_has_ended_keeps_its_time(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    before = ProcessTree(processes, [10])
    before.walk()
    processes.change(10, own_ticks=100)
    before.walk()
    kept = before.tree.account()
    processes.reap(10, by=None)
    processes.add(10, 1, start_ticks=5000, own_ticks=33)  # a stranger
    table = ProcessTable(processes)
    tree = TreeOfTable(table, [], account=kept)
    assert not tree.any_alive()
    table.walk()
    assert tree.read() == TreeReading(0, 0, 0, 1.0)


def test_account_tells_when_who_is_watched_has_changed(processes: FakeProcesses) -> None:
    processes.add(10, 1)
    one = ProcessTree(processes, [10])
    changed = []
    for step in range(5):
        if step == 2:
            processes.add(11, 10)
        if step == 4:
            processes.reap(11, by=10)
        one.walk()
        changed.append(one.tree.changed)
    assert changed == [True, False, True, False, True]
    assert one.tree.account() == TreeAccount(
        began_ticks=0, first_ticks={"10:10": 0}, members=[list(processes.table[10])]
    )
