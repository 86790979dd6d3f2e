from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trials import placement, rank_context
from tests.unit.fabricated_system import fabricate_system, two_sockets

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import PhysicalCore
from paceline.train.training import resources
from paceline.train.training.resources import choose_cores, deal, worker_cores


def dealt(allowed, ranks, threads, system):
    return [
        choose_cores(allowed, rank_context(rank, ranks), placement(ranks, threads), system)
        for rank in range(ranks)
    ]


@pytest.fixture
def unknown(tmp_path):
    """A system without topology files."""
    return tmp_path / "nothing"


def test_cores_are_dealt_out_in_ascending_order_where_the_kernel_says_nothing(unknown):
    assert dealt([2, 3, 8, 9, 11], 2, 2, unknown) == [[2, 3], [8, 9]]


def test_rank_bound_by_its_launcher_keeps_its_own_cores(unknown):
    assert choose_cores([5], rank_context(1, 2), placement(2, 1), unknown) == [5]


def test_oversubscribed_ranks_share_all_cores(unknown):
    shared = placement(3, 1, oversubscribe=True)
    assert choose_cores([0, 1], rank_context(2, 3), shared, unknown) == [0, 1]


def test_oversubscribed_ranks_share_the_core_budget(tmp_path):
    system = two_sockets(tmp_path)
    shared = placement(4, 1, oversubscribe=True, allocated_cores=2)
    got = [choose_cores(range(16), rank_context(rank, 4), shared, system) for rank in range(4)]
    assert got == [[0, 1]] * 4


def test_core_budget_beyond_the_machine_is_the_machine(unknown):
    shared = placement(8, 1, oversubscribe=True, allocated_cores=4)
    assert choose_cores([0, 1], rank_context(0, 8), shared, unknown) == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_few_cores_names_both_numbers(ranks, unknown):
    with pytest.raises(EnvironmentLacks, match=rf"need {3 * ranks} cores.*may use 2 "):
        choose_cores([0, 1], rank_context(0, ranks), placement(ranks, 3), unknown)


# Two sockets of four cores: 0-3 and 4-7, with their second hardware threads 8-11 and 12-15.
@pytest.mark.parametrize(
    ("ranks", "threads", "expected"),
    [
        (1, 4, [[0, 1, 2, 3]]),
        (2, 2, [[0, 1], [2, 3]]),
        (4, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 3, [[0, 1, 2], [4, 5, 6]]),  # not three and one on the first, two on the other
        (3, 2, [[0, 1], [2, 3], [4, 5]]),
        (1, 8, [list(range(8))]),  # whole cores of both sockets before second threads of one
        (2, 5, [[0, 1, 2, 3, 8], [4, 5, 6, 7, 12]]),
        (4, 4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (2, 8, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (10, 1, [[0], [1], [8], [2], [3], [9], [4], [5], [6], [7]]),
        (3, 3, [[0, 1, 8], [2, 3, 10], [4, 5, 6]]),  # one socket each, though core 7 stays idle
    ],
)
def test_ranks_fill_node_after_node_with_whole_cores_first(tmp_path, ranks, threads, expected):
    assert dealt(range(16), ranks, threads, two_sockets(tmp_path)) == expected


def test_interleaved_numbers_do_not_spread_a_rank_over_nodes(tmp_path):
    system = fabricate_system(tmp_path, [[(0,), (2,)], [(1,), (3,)]])
    assert dealt(range(4), 2, 2, system) == [[0, 2], [1, 3]]


def test_second_thread_counts_as_a_core_where_the_first_may_not_be_used(tmp_path):
    assert dealt([8, 9, 10, 11], 2, 2, two_sockets(tmp_path)) == [[8, 9], [10, 11]]


def test_workers_split_their_ranks_cores(tmp_path):
    system = two_sockets(tmp_path)
    own = [0, 1, 8, 9]  # two cores with both threads: each worker gets a whole one
    assert [worker_cores(own, worker, 2, False, system) for worker in range(2)] == [[0, 8], [1, 9]]


def test_workers_of_a_rank_on_two_nodes_stay_on_one_each(tmp_path):
    system = two_sockets(tmp_path)
    own = list(range(8))
    got = [worker_cores(own, worker, 2, False, system) for worker in range(2)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_oversubscribed_workers_share_their_ranks_cores(unknown):
    assert worker_cores([1, 0], 3, 4, True, unknown) == [0, 1]


def test_worker_without_a_core_names_both_numbers(unknown):
    with pytest.raises(EnvironmentLacks, match=r"3 replicas.*has 2 \(0, 1\)"):
        worker_cores([0, 1], 0, 3, False, unknown)


MACHINES = st.lists(  # NUMA nodes of physical cores with so many usable threads each
    st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=3
)


@settings(max_examples=300, deadline=None)
@given(machine=MACHINES, data=st.data())
def test_any_machine_is_dealt_without_overlap_and_without_needless_siblings(machine, data):
    numbers = iter(range(100))
    physical = [
        PhysicalCore(node, node, tuple(next(numbers) for _ in range(threads)))
        for node, sizes in enumerate(machine)
        for threads in sizes
    ]
    allowed = [thread for core in physical for thread in core.threads]
    shares = data.draw(st.integers(1, len(allowed)))
    count = data.draw(st.integers(1, len(allowed) // shares))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "physical_cores", lambda _allowed, _root: physical)
        got = deal(allowed, shares, count)
    flat = [core for share in got for core in share]
    assert len(got) == shares
    assert {len(share) for share in got} == {count}
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(allowed)
    assert all(share == sorted(share) for share in got)
    if shares * count <= len(physical):
        assert all(sum(t in flat for t in core.threads) <= 1 for core in physical)
