"""What the ranks of the sharing tests do: `rank_program.py CASE LOCAL_RANK RANKS FOLDER`.

Each case is a function; what it returns is printed as JSON, and so is the error that ends it. The
ranks find one another through files in FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.base.errors import PacelineError, TimedOut
from paceline.collectives.node import memory as data_node
from paceline.collectives.node import semaphores
from paceline.collectives.node import semaphores as peer_monitor
from paceline.collectives.node.shared_node import SharedNode

LIMIT_S = 30.0
SHORT_S = 1.0
CASES = {}


@dataclass(frozen=True)
class FileShare:
    folder: Path
    local_rank: int
    ranks_on_node: int

    def publish(self, name, value):
        file = self._file(name)
        new = file.with_name(f"{file.name}.{self.local_rank}.new")
        new.write_text(value)
        new.replace(file)

    def lookup(self, name, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not self._file(name).exists():
            if time.monotonic() > deadline:
                raise TimedOut(f"nobody published {name}")
            time.sleep(0.002)
        return self._file(name).read_text()

    def barrier(self, timeout_s):
        raise AssertionError("memory needs no barrier of the store")

    def _file(self, name):
        return self.folder / name.replace("/", "%")


def case(function):
    CASES[function.__name__] = function
    return function


@case
def counts_rounds(share):
    """Return the rounds of the others when a rank leaves round r of the barrier: r, or already r +
    1."""
    node = SharedNode(share, LIMIT_S)
    counts = node.memory("counts", 8 * node.ranks_on_node).view(np.int64)
    barrier = node.barrier(range(node.ranks_on_node))
    wrong = 0
    for number in range(1, 1001):
        counts[node.local_rank] = number
        barrier.wait()
        wrong += int(((counts != number) & (counts != number + 1)).sum())
    return {"wrong": wrong, "seen": counts.min().item()}


def count_calls(owner, name):
    """Return a list that grows with each later call of a method."""
    method, calls = getattr(owner, name), []

    def counted(*arguments):
        calls.append(name)
        return method(*arguments)

    setattr(owner, name, counted)
    return calls


@case
def counts_messages_and_posts(share):
    """Return what the rank sends to open shared memory, and its posts in one barrier."""
    posts = count_calls(semaphores.Semaphores, "post")
    publications, lookups = count_calls(FileShare, "publish"), count_calls(FileShare, "lookup")
    node = SharedNode(share, LIMIT_S)
    memory = node.memory("numbers", 8 * node.ranks_on_node).view(np.int64)
    barrier = node.barrier(range(node.ranks_on_node))
    messages = len(publications) + len(lookups)
    posts.clear()
    memory[node.local_rank] = node.local_rank
    barrier.wait()
    found = {"messages": messages, "posts": len(posts), "sum": int(memory.sum())}
    barrier.wait()  # a rank that has ended would be reported as lost
    return {**found, "later messages": len(publications) + len(lookups) - messages}


@case
def exchanges_data(share):
    """Sums of what each other rank wrote before the barrier."""
    node = SharedNode(share, LIMIT_S)
    rows = node.memory("rows", node.ranks_on_node * 400_000).view(np.int32)
    rows = rows.reshape(node.ranks_on_node, -1)
    barrier = node.barrier(range(node.ranks_on_node))
    sums = []
    for number in range(30):
        rows[node.local_rank] = 10 * number + node.local_rank
        barrier.wait()
        sums.append(rows.sum(axis=1, dtype=np.int64).tolist())
        barrier.wait()
    return sums


@case
def meets_in_groups(share):
    """Two barriers of two members each do not wait for one another."""
    node = SharedNode(share, LIMIT_S)
    low, high = node.barrier([0, 1]), node.barrier([3, 2])
    mine, other = (low, high) if node.local_rank < 2 else (high, low)
    for _ in range(1 + node.local_rank // 2 * 50):
        mine.wait()
    try:
        other.wait()
    except ValueError as error:
        return str(error)


@case
def loses_a_peer(share):
    """Rank 1 kills itself while the others wait at a barrier."""
    node = SharedNode(share, LIMIT_S)
    everyone = node.barrier(range(node.ranks_on_node))
    everyone.wait()
    if node.local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    everyone.wait()


@case
def loses_a_third(share):
    """Rank 2 kills itself while rank 0 waits for rank 1, which does something else."""
    node = SharedNode(share, LIMIT_S)
    channel = node.channel(1, 0, 1, 8)
    node.barrier(range(3)).wait()
    if node.local_rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if node.local_rank == 0:
        try:
            channel.wait(0)
        finally:
            share.publish("done", "")
    share.lookup("done", LIMIT_S)


@case
def fails(share):
    """Rank 1 says that it failed; the others do not look for themselves, they must be woken."""
    peer_monitor.PeerMonitor._look_for_lost = lambda self, peer: None
    node = SharedNode(share, LIMIT_S)
    everyone = node.barrier(range(node.ranks_on_node))
    down, up = node.channel(1, 2, 1, 8), node.channel(2, 1, 1, 8)
    everyone.wait()
    if node.local_rank == 0:
        everyone.wait()
    if node.local_rank == 2:
        up.begin()
        share.publish("waiting", "")
        down.wait(0)
    share.lookup("waiting", LIMIT_S)
    node.fail()
    node.close()
    for rank in (0, 2):
        share.lookup(f"ended {rank}", LIMIT_S)
    everyone.wait()


@case
def misses_a_member(share):
    """Rank 1 stays away from the second barrier."""
    node = SharedNode(share, LIMIT_S)
    everyone = node.barrier([0, 1, 2])
    everyone.wait()
    node._peers.limit_s = SHORT_S
    if node.local_rank != 1:
        everyone.wait()
    for rank in (0, 2):
        share.lookup(f"ended {rank}", LIMIT_S)


@case
def leaves_early(share):
    """Rank 1 closes and ends; 0 and 2 still synchronise, then 0 waits for 1."""
    node = SharedNode(share, LIMIT_S)
    everyone, two = node.barrier([0, 1, 2]), node.barrier([0, 2])
    everyone.wait()
    if node.local_rank == 1:
        node.close()
        return "left"
    if node.local_rank == 2:
        time.sleep(
            3 * peer_monitor._SLICE_S
        )  # longer than rank 0 waits without looking who is there
    two.wait()
    if node.local_rank == 0:
        everyone.wait()
    node.close()  # without this rank 2 would have died when its process ends
    return "met"


@case
def passes_slots(share):
    """Rank 0 sends 40 steps of 4 slots; rank 1 looks at them late."""
    slots, steps = 4, 40
    node = SharedNode(share, LIMIT_S)
    channel = node.channel(0, 1, slots, 1001)
    seen = []
    for step in range(steps):
        if node.local_rank == 0:
            channel.begin()
            for index in range(slots):
                channel.slot(index)[:] = (step * slots + index) % 251
                channel.post(index)
        else:
            for index in range(slots):
                channel.wait(index)
                channel.wait(index)  # harmless
            if step % 8 == 0:
                time.sleep(0.005)  # time for the sender to overwrite, if it would
            views = [channel.slot(index) for index in range(slots)]
            seen += [view.tolist() for view in views]
            channel.release()
    bad = [n for n, content in enumerate(seen) if content != [n % 251] * 1001]
    return {"slots": len(seen), "bad": bad, "start": channel.slot(1).ctypes.data % 64}


@case
def uses_some_slots(share):
    """Steps that use fewer slots, and in another order."""
    node = SharedNode(share, LIMIT_S)
    channel = node.channel(1, 0, 3, 4)
    seen = []
    for step, order in enumerate([[0, 1, 2], [2, 0], [1], [2, 1, 0]]):
        if node.local_rank == 1:
            channel.begin()
            for index in order:
                channel.slot(index)[:] = 10 * step + index
                channel.post(index)
        else:
            for index in reversed(order):
                channel.wait(index)
                seen.append(int(channel.slot(index)[0]))
            channel.release()
    return seen


@case
def uses_the_wrong_end(share):
    node = SharedNode(share, LIMIT_S)
    channel = node.channel(0, 1, 1, 8)
    calls = {
        "slot": lambda: channel.slot(0), "begin": channel.begin, "post": lambda: channel.post(0),
        "wait": lambda: channel.wait(0), "release": channel.release,
    }  # fmt: skip
    own = {0: {"slot", "begin", "post"}, 1: {"slot", "wait", "release"}}
    refused = []
    for name, call in calls.items():
        if name in own.get(node.local_rank, set()):
            continue
        try:
            call()
        except ValueError:
            refused.append(name)
    return refused


@case
def cannot_attach(share):
    if share.local_rank == 1:
        data_node._attach = lambda published: None
    SharedNode(share, LIMIT_S)


@case
def asks_too_much(share):
    SharedNode(share, LIMIT_S).memory("the weights", 2**50)


@case
def waits_to_be_killed(share):
    """Publishes which files its shared memory is, then waits for a peer that never comes."""
    node = SharedNode(share, LIMIT_S)
    kept = node.memory("much", 2**20)
    kept[:] = 1
    barrier = node.barrier([0, 1])
    share.publish(f"inodes {node.local_rank}", json.dumps(shared_inodes(os.getpid())))
    if node.local_rank == 0:
        barrier.wait()
    share.lookup("never", LIMIT_S)


def shared_inodes(pid):
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:paceline"):  # noqa: PTH115
                found.add(link.stat().st_ino)
        except OSError:  # closed meanwhile: iterdir's own, say
            continue
    return sorted(found)


def main(name, local_rank, ranks, folder):
    share = FileShare(Path(folder), int(local_rank), int(ranks))
    try:
        result = {"result": CASES[name](share)}
    except PacelineError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    share.publish(f"ended {local_rank}", "")
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
