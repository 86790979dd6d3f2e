"""Memory that a thread frees stays with the process, although MPI starts threads before it."""

from __future__ import annotations

import subprocess
import sys

PAGES = (128 << 20) // 4096
PROGRAM = """
import resource
import threading

from paceline.runner.launchers.mpi import rank


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def allocate():
    for _ in range(4):
        before = faults()
        block = bytearray(128 << 20)
        del block
        found.append(faults() - before)


found = []
rank.run_as_rank = lambda world, train: 0  # World has initialised MPI
rank.main()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(*found)
"""


def test_thread_of_a_rank_gets_freed_memory_again_without_page_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *later = map(int, done.stdout.split())
    assert first > PAGES / 2, "the kernel gives pages when they are written"
    assert max(later) < PAGES / 100
