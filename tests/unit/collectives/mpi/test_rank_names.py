"""Ranks of a sub-group as the user knows them; the collective part is tested under mpirun."""

from paceline.collectives.mpi.world import RankNames

NAMES = RankNames(world_ranks=(4, 0, 7), hosts=("a", "a", "b"))


def test_rank_of_a_group_has_the_worlds_number_and_its_host():
    assert [NAMES(rank) for rank in range(3)] == ["rank 4 (a)", "rank 0 (a)", "rank 7 (b)"]
