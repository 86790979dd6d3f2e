"""Puts a load on the machine whose size it knows, and tells it.

python known_load.py KIND FILE: says "ready"; at a line on stdin puts on the load and prints what it
was as one line of JSON; keeps what can be kept (memory, threads) until stdin ends.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
ALLOCATED_BYTES = 1024 * MIB
READ_BYTES = 64 * MIB
CHILD_READ_BYTES = 2 * MIB
CHILDREN = 24
THREADS = 64
SLEEPS = 60
WRITTEN_BYTES = 8 * MIB
_PAGE_BYTES = mmap.PAGESIZE
_BLOCK_BYTES = MIB
_kept: list[object] = []

Truth = dict[str, float]


def burn(cpu_s: float) -> None:
    """Use so much CPU time, on one core."""
    limit_s = time.process_time() + cpu_s
    while time.process_time() < limit_s:
        sum(range(1000))


def read_uncached(path: str, size: int) -> int:
    """Read past the page cache; the bytes read. Raises OSError where that cannot be done."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # of whole pages, as O_DIRECT wants it
            return sum(
                os.preadv(descriptor, [block], offset) for offset in range(0, size, _BLOCK_BYTES)
            )
    finally:
        os.close(descriptor)


def one_core(_: str) -> Truth:
    burn(2.0)
    return {}


def one_gibibyte(_: str) -> Truth:
    memory = mmap.mmap(-1, ALLOCATED_BYTES)
    for offset in range(0, ALLOCATED_BYTES, mmap.PAGESIZE):
        memory[offset] = 1  # a page is there once it is written to
    _kept.append(memory)
    return {"allocated_bytes": ALLOCATED_BYTES}


def many_threads(_: str) -> Truth:
    """64 threads with the main one, each of which sleeps often."""
    slept = threading.Barrier(THREADS)

    def sleep_often() -> None:
        for _ in range(SLEEPS):
            time.sleep(0.001)
        slept.wait(60)
        threading.Event().wait(300)

    for _ in range(THREADS - 1):
        threading.Thread(target=sleep_often, daemon=True).start()
    slept.wait(60)
    time.sleep(0.2)  # until all wait for ever
    return {"threads": THREADS}


def disk(path: str) -> Truth:
    return {"read_bytes": read_uncached(path, READ_BYTES)}


def synced_writes(path: str) -> Truth:
    """Write page by page past the page cache, and wait for the disk after each."""
    waited_s, pages = host_iowait_s(), WRITTEN_BYTES // _PAGE_BYTES
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
    try:
        with mmap.mmap(-1, _PAGE_BYTES) as page:
            for number in range(pages):
                os.pwrite(descriptor, page, number * _PAGE_BYTES)
    finally:
        os.close(descriptor)
    return {"written_bytes": WRITTEN_BYTES, "iowait_s": host_iowait_s() - waited_s}


def host_iowait_s() -> float:
    """Time that the kernel has booked as waiting for I/O: the fifth figure of /proc/stat."""
    ticks = int(Path("/proc/stat").read_text("utf-8").split(maxsplit=6)[5])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(path: str) -> Truth:
    """One after the other, each shorter than a tick of the sidecar; a third of them through a
    child of their own."""
    for number in range(CHILDREN):
        kind = "grandchild" if number % 3 == 0 else "child"
        subprocess.run([sys.executable, "-S", __file__, kind, path], check=True, timeout=60)
    return {"read_bytes": CHILDREN * CHILD_READ_BYTES}


def child(path: str) -> None:
    burn(0.05)
    read_uncached(path, CHILD_READ_BYTES)


def grandchild(path: str) -> None:
    subprocess.run([sys.executable, "-S", __file__, "child", path], check=True, timeout=60)


def usage() -> Truth:
    """What the kernel has booked for this process and its ended children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "cpu_s": sum(it.ru_utime + it.ru_stime for it in both),
        "voluntary_switches": sum(it.ru_nvcsw for it in both),
        "involuntary_switches": sum(it.ru_nivcsw for it in both),
    }


LOADS: dict[str, Callable[[str], Truth]] = {
    load.__name__: load
    for load in (one_core, one_gibibyte, many_threads, disk, synced_writes, children)
}


def prepare(path: str, size: int = READ_BYTES) -> None:
    """A file that is on the disk, and not in the page cache only."""
    with Path(path).open("wb") as file:
        file.writelines(os.urandom(MIB) for _ in range(size // MIB))
        file.flush()
        os.fsync(file.fileno())


def main(kind: str, path: str) -> None:
    if kind in ("child", "grandchild"):
        {"child": child, "grandchild": grandchild}[kind](path)
        return
    if kind in ("disk", "synced_writes", "children"):
        prepare(path)
    print("ready", flush=True)
    sys.stdin.readline()
    before = usage()
    truth = LOADS[kind](path)
    truth |= {name: used - before[name] for name, used in usage().items()}
    print(json.dumps({**truth, "ended_unix_s": time.time()}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
