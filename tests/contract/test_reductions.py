"""All-reduce over MPI by every algorithm, between real processes under mpirun."""

from __future__ import annotations

import json
import socket
from functools import cache
from math import ceil, log2

import pytest

pytestmark = pytest.mark.contract

FLOATS_PER_MESSAGE = 64  # as in programs/reductions.py
LATE_LIMIT_S = 2.0
LENGTHS = (0, 1, 2, 3, 7, 1000, 4099)
# How many ranks are taken to be on each host; those of as many ranks share processes.
LAYOUTS = [(2,), (1, 1), (3,), (2, 1), (1, 1, 1, 1), (2, 2), (5,), (2, 1, 2)]


@pytest.fixture(scope="module")
def run_layouts(run_ranks, tmp_path_factory):
    """What programs/reductions.py, which checks the results itself, found in a layout."""

    @cache
    def run(size):
        folder = tmp_path_factory.mktemp("reductions")
        named = [",".join(map(str, layout)) for layout in LAYOUTS if sum(layout) == size]
        run_ranks(size, "mpi", "reductions", folder, *named)
        return folder

    return lambda layout: json.loads((run(sum(layout)) / f"{layout}.json").read_text())


@pytest.fixture(params=LAYOUTS, ids=str)
def found(request, run_layouts):
    return request.param, run_layouts(request.param)


def formulas(size: int, length: int) -> dict[str, tuple[int, int]]:
    """Messages and elements sent over all ranks, with the sources in schedules.py."""
    power = 2 ** int(log2(size))
    rest, steps = size - power, int(log2(power))

    def pieces(messages_long: int) -> int:
        return ceil(length / (messages_long * FLOATS_PER_MESSAGE))

    return {
        "ring": (2 * size * (size - 1) * pieces(size), 2 * (size - 1) * length),
        "recursive-doubling": (
            (power * steps + 2 * rest) * pieces(1),
            (power * steps + 2 * rest) * length,
        ),
        "rabenseifner": (
            (2 * power * steps + 2 * rest) * pieces(2),
            (2 * (power - 1) + 2 * rest) * length,
        ),
        "naive": (size * (size - 1) * min(1, length), size * (size - 1) * length),
        "parameter-server": (2 * (size - 1) * min(1, length), 2 * (size - 1) * length),
    }


def test_counted_messages_and_bytes_match_the_formulas(found):
    layout, by_algorithm = found
    for length in LENGTHS:
        for name, expected in formulas(sum(layout), length).items():
            assert tuple(by_algorithm[name]["sent"][str(length)]) == expected, (name, length)


def test_hierarchy_sends_between_hosts_only_what_hosts_exchange(found):
    layout, by_algorithm = found
    if len(layout) == 1:
        pytest.skip("one host")
    for length in LENGTHS:
        messages, elements = by_algorithm["hierarchical"]["sent"][str(length)]
        hosts = len(layout)
        # short messages: recursive doubling among one rank of each host
        power = 2 ** int(log2(hosts))
        copies = power * int(log2(power)) + 2 * (hosts - power)
        assert elements == copies * length
        assert messages >= copies * min(1, length)


def test_asked_algorithm_is_obeyed_wherever_the_ranks_are(found):
    _, by_algorithm = found
    for name in ("native", "ring", "naive", "parameter-server"):
        assert by_algorithm[name]["describe"]["algorithm"] == name


def test_auto_is_shared_memory_on_one_host_and_calibrated_across_hosts(found):
    layout, by_algorithm = found
    described = by_algorithm["auto"]["describe"]
    if len(layout) == 1:
        assert described == {"algorithm": "shared", "hosts": 1}
        return
    assert described["hosts"] == len(layout)
    if sum(layout) == 2:  # nothing to find out
        assert described["by_size"] == [{"up_to_bytes": None, "algorithm": "recursive-doubling"}]
        return
    candidates = set(described["calibration_s"])
    assert {"ring", "recursive-doubling", "rabenseifner"} <= candidates
    assert ("hierarchical" in candidates) == (max(layout) > 1)
    assert described["by_size"][-1]["up_to_bytes"] is None
    assert {choice["algorithm"] for choice in described["by_size"]} <= candidates
    for seconds in described["calibration_s"].values():
        assert all(value > 0 for value in seconds.values())


def test_absent_rank_is_named_within_the_limit(run_ranks, tmp_path):
    algorithms = ("auto", "ring", "recursive-doubling")
    run_ranks(3, "mpi", "late_reduction", tmp_path, LATE_LIMIT_S, *algorithms, orderly=False)
    for algorithm in algorithms:
        for rank in (0, 2):
            said = (tmp_path / f"{algorithm}.{rank}").read_text()
            assert f"rank {rank}: MPI allreduce" in said
            assert f"{LATE_LIMIT_S:g} s" in said
    # who has a message for the absent rank, or from it, says so; it is the last of the group
    said = (tmp_path / "recursive-doubling.0").read_text()
    assert f"receive from rank 1 ({socket.gethostname()})" in said
    said = (tmp_path / "auto.0").read_text()
    assert "rank 0 waited" in said
    assert "for rank 1 to meet" in said
