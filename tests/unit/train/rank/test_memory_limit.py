from __future__ import annotations

import pytest

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.train.rank.train import limited_memory

ROOM_MIB = 1_000_000  # so that nothing fails but what the tests raise


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …")],
)
def test_allocation_that_fails_names_rank_and_limit(error):
    with (
        pytest.raises(EnvironmentLacks, match=r"rank 3: expected .* at most 1000000 MiB"),
        limited_memory(ROOM_MIB, 3),
    ):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), TimedOut("no answer")])
def test_other_errors_stay(error):
    with pytest.raises(type(error), match=str(error)), limited_memory(ROOM_MIB, 0):
        raise error


def test_without_a_limit_errors_stay():
    with pytest.raises(MemoryError), limited_memory(None, 0):
        raise MemoryError
