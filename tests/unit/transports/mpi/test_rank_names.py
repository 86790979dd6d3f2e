"""Ranks of a sub-group as the user knows them; the collective part is tested under mpirun."""

from paceline.transports.mpi.world import RankNames

NAMES = RankNames(world_ranks=(4, 0, 7), hosts=("a", "a", "b"))


def test_rank_of_a_group_has_the_worlds_number_and_its_host():
    assert [NAMES(rank) for rank in range(3)] == ["rank 4 (a)", "rank 0 (a)", "rank 7 (b)"]


def test_several_ranks_are_listed_in_the_order_asked_for():
    assert NAMES.format_ranks([2, 0]) == "7, 4"
