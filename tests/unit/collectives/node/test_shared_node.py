from __future__ import annotations

import json
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from tests.support.waiting import wait_for
from tests.unit.collectives.node.rank_program import FileShare, shared_inodes

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.node.memory import SoloNode, open_shared_file
from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.store import GroupStore


def test_one_rank_alone_meets_at_once():
    node = SharedNode(SoloNode(), 0.0)
    barrier = node.barrier([0])
    for _ in range(3):
        barrier.wait()
    assert (node.local_rank, node.ranks_on_node) == (0, 1)


@pytest.mark.parametrize("size", [0, 1, 64, 4096, 10_001])
def test_memory_has_the_size_asked_for_is_zero_and_aligned(size):
    memory = SharedNode(SoloNode(), 1.0).memory("weights", size)
    assert memory.shape == (size,)
    assert memory.dtype == np.uint8
    assert memory.ctypes.data % 64 == 0
    assert not memory.any()


def test_closing_twice_is_harmless_and_arrays_stay_good():
    node = SharedNode(SoloNode(), 1.0)
    memory = node.memory("weights", 100)
    node.close()
    node.close()
    memory[:] = 7
    assert memory.sum() == 700


def test_failing_after_closing_is_harmless():
    node = SharedNode(SoloNode(), 1.0)
    node.barrier([0])
    node.close()
    node.fail()
    node.close()


@pytest.mark.parametrize("members", [[0, 0], [0, 1], [-1]])
def test_members_that_are_not_ranks_of_the_node_are_refused(members):
    with pytest.raises(ValueError, match="local ranks"):
        SharedNode(SoloNode(), 1.0).barrier(members)


def test_a_channel_to_oneself_is_refused():
    with pytest.raises(ValueError, match="local ranks"):
        SharedNode(SoloNode(), 1.0).channel(0, 0, 1, 8)


def test_too_little_memory_says_what_it_was_for(monkeypatch):
    monkeypatch.setattr("paceline.collectives.node.memory.available_bytes", lambda: 3 * 2**20)
    said = "expected 1024 MiB of free memory on the node for the weights .shared., got 3 MiB; use a"
    with pytest.raises(EnvironmentLacks, match=said):
        SharedNode(SoloNode(), 1.0).memory("the weights", 2**30)


def test_too_little_memory_is_told_to_all_ranks(run_ranks):
    for answer in run_ranks("asks_too_much", 2):
        assert answer["error"] == "EnvironmentLacks"
        assert "free memory on the node for the weights" in answer["message"]


def test_64_ranks_send_few_messages_and_post_six_times_in_a_barrier(run_ranks):
    # Every rank sends or reads 5 messages; the first one collects 2 of each other rank besides.
    others = {"messages": 5, "posts": 6, "sum": 64 * 63 // 2, "later messages": 0}
    first = {**others, "messages": 3 + 2 * 63}
    assert run_ranks("counts_messages_and_posts", 64) == [
        {"result": first}, *[{"result": others}] * 63
    ]  # fmt: skip


def test_if_one_rank_cannot_share_memory_all_say_so(run_ranks):
    for answer in run_ranks("cannot_attach", 3):
        assert answer["error"] == "EnvironmentLacks"
        assert "the 3 ranks of this node must share memory" in answer["message"]
        assert 'transport "gloo"' in answer["message"]


def test_nothing_is_left_when_all_ranks_are_killed(start_ranks, tmp_path):
    before = set(Path("/dev/shm").iterdir())
    processes = start_ranks("waits_to_be_killed", 2, python=[sys.executable])
    share = FileShare(tmp_path, 2, 2)
    used = [set(json.loads(share.lookup(f"inodes {rank}", 30))) for rank in (0, 1)]
    assert used[0] == used[1]
    assert len(used[0]) == 1
    assert used[0] <= in_use()
    for process in processes:
        process.kill()
        process.wait()
    assert not used[0] & in_use()
    # Another test may create a file just now; it removes its name at once. A leak stays.
    left = {file for file in set(Path("/dev/shm").iterdir()) - before if is_ours(file)}
    wait_for(lambda: not any(file.exists() for file in left), 10.0, "removal of shared memory")


def in_use():
    """Shared memory of Paceline's that any process has open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found |= set(shared_inodes(folder.name))
        except OSError:  # another user's, or ended meanwhile
            continue
    return found


def is_ours(file):
    return "paceline" in file.name


def deny(*_, **__):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("function", ["memfd_create", "ftruncate", "open", "pread", "pwrite"])
def test_file_that_one_rank_cannot_make_or_open_is_none_on_all(monkeypatch, function):
    store = dist.HashStore()
    monkeypatch.setattr(f"paceline.collectives.node.memory.os.{function}", deny)
    with ThreadPoolExecutor(2) as pool:
        shares = [GroupStore(store, rank, 2, "deny") for rank in range(2)]
        files = list(pool.map(lambda share: open_shared_file(share, 10.0, 4096), shares))
    assert files == [None, None]


def test_file_that_one_rank_cannot_map_is_none_on_all(monkeypatch):
    store = dist.HashStore()
    kept, can = mmap.mmap, [True, False]
    monkeypatch.setattr(
        "paceline.collectives.node.memory.mmap.mmap",
        lambda *a: kept(*a) if can.pop() else deny(),
    )
    with ThreadPoolExecutor(2) as pool:
        shares = [GroupStore(store, rank, 2, "deny") for rank in range(2)]
        files = list(pool.map(lambda share: open_shared_file(share, 10.0, 4096), shares))
    assert files == [None, None]
