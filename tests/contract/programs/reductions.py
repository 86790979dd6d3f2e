"""Run by mpirun: every all-reduce algorithm against numpy, on real and on made-up hosts.

usage: reductions.py mpi FOLDER LAYOUT…

LAYOUT: how many ranks are taken to be on each host, "2,1". Rank 0 writes FOLDER/(2, 1).json: what
was sent over all ranks, by algorithm and number of elements.
"""

from __future__ import annotations

import json
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from paceline.collectives.torch_internals import PrefixStore, Store

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context

from paceline.collectives import message_schedules
from paceline.collectives.mpi import all_reduce
from paceline.collectives.mpi import all_reduce as calibration
from paceline.collectives.mpi.all_reduce import AllReduce
from paceline.collectives.mpi.world import RankNames
from paceline.train.rank.peers import open_store

LIMIT_S = 30.0
LENGTHS = (0, 1, 2, 3, 7, 1000, 4099)
LARGE = 1_100_001
FLOATS_PER_MESSAGE = 64
OPERATIONS = (np.add, np.multiply, np.minimum)
DTYPES = (np.float32, np.float64, np.float16, np.int64, np.int8)

WORLD = MPI.COMM_WORLD


@cache
def part(rank: int, length: int, dtype: type) -> np.ndarray:
    """Small numbers that every type holds, of both signs, fractions where there are any."""
    values = np.random.default_rng([rank, length]).integers(-3, 4, length)
    return (values + (0.0 if np.issubdtype(dtype, np.integer) else 1 / 3)).astype(dtype)


@cache
def expected(length: int, dtype: type, how: int) -> np.ndarray:
    """Return the result of every algorithm on every layout."""
    parts = [part(rank, length, dtype) for rank in range(WORLD.size)]
    return OPERATIONS[how].reduce(parts, dtype=dtype)


def check(name: str, group: AllReduce, length: int, dtype: type, how: int) -> tuple[int, int]:
    """Reduce once; returns messages and elements sent over all ranks (-1: not counted)."""
    ufunc = OPERATIONS[how]
    buffer = part(WORLD.rank, length, dtype).copy()
    carried = group.allreduce(buffer, ufunc)
    want = expected(length, dtype, how)
    about = (name, length, dtype.__name__, ufunc.__name__, carried)
    if np.issubdtype(dtype, np.integer):
        assert np.array_equal(buffer, want), about
    else:
        tolerance = 0.02 if dtype is np.float16 else 1e-5
        assert np.allclose(buffer, want, rtol=tolerance, atol=tolerance), about
    mine = (carried.algorithm, zlib.crc32(buffer), carried.sent_messages, carried.sent_bytes)
    everyones = WORLD.allgather(mine)
    assert len({(algorithm, bits) for algorithm, bits, _, _ in everyones}) == 1, about
    if carried.sent_bytes is None:
        return -1, -1
    return sum(m for *_, m, _ in everyones), sum(b for *_, b in everyones) // buffer.itemsize


def check_layout(on_hosts: tuple[int, ...], store: Store) -> dict[str, Any]:
    """What every algorithm sent, and how it describes itself."""
    hosts = [host for host, count in enumerate(on_hosts) for _ in range(count)]
    all_reduce.hosts_of = lambda _: tuple(hosts.index(host) for host in hosts)
    found = {}
    for name in ("auto", "native", "hierarchical", *message_schedules.ALGORITHMS):
        group = AllReduce(
            WORLD,
            names=RankNames.gather(WORLD, LIMIT_S),
            store=PrefixStore(f"{on_hosts} {name}", store),
            limit_s=LIMIT_S,
            algorithm=name,
        )
        whole, message_schedules.MESSAGE_BYTES = (
            message_schedules.MESSAGE_BYTES,
            FLOATS_PER_MESSAGE * 4,
        )
        sent = {length: check(name, group, length, np.float32, 0) for length in LENGTHS}
        message_schedules.MESSAGE_BYTES = whole
        check(name, group, LARGE, np.float32, 0)
        for dtype in DTYPES:
            for how in range(len(OPERATIONS)):
                if name != "native" or dtype is not np.float16:  # a type that MPI does not know
                    check(name, group, 777, dtype, how)
        found[name] = {"sent": sent, "describe": group.describe()}
        WORLD.Barrier()
        group.close()
    return found


def main() -> None:
    folder = Path(sys.argv[2])
    store = open_store(make_context(folder), LIMIT_S)
    assert len(set(all_reduce.hosts_of(WORLD))) == 1, "all ranks are really on this host"
    calibration.BUDGET_S = 0.05
    for word in sys.argv[3:]:
        layout = tuple(map(int, word.split(",")))
        found = check_layout(layout, store)
        if WORLD.rank == 0:
            (folder / f"{layout}.json").write_text(json.dumps(found))


main()
