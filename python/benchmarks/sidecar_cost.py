"""What the sidecar costs: CPU seconds of its process over a minute at 1 Hz, from outside.

python sidecar_cost.py --out results/sidecar_cost.json [--seconds 60] [--processes 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write_results
from paceline.telemetry import SidecarOptions, start_sidecar

_USER, _SYSTEM = 13, 14  # fields of /proc/PID/stat, from 0 (proc(5))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process as the kernel counts it."""
    # the name in parentheses may hold spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_USER - 2]) + int(fields[_SYSTEM - 2])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=20)
    arguments = parser.parse_args()
    watched = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        for _ in range(arguments.processes)
    ]
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        folder = Path(temporary)
        options = SidecarOptions(
            listen_host="127.0.0.1",
            listen_port=0,
            interval_s=1.0,
            pids=tuple(process.pid for process in watched),
            out=folder / "trace.jsonl",
            state=folder / "sidecar.json",
            info={},
        )
        handle = start_sidecar(options)
        if handle is None:
            raise SystemExit("the sidecar did not start")
        try:
            time.sleep(3)  # its start is not its cost a second
            before, started = cpu_seconds(handle.pid), time.monotonic()
            time.sleep(arguments.seconds)
            used_s = cpu_seconds(handle.pid) - before
            elapsed_s = time.monotonic() - started
        finally:
            handle.stop()
            for process in watched:
                process.kill()
                process.wait()
    percent = 100 * used_s / elapsed_s
    print(f"{used_s:.2f} CPU s in {elapsed_s:.1f} s: {percent:.2f} % of a core (asked: 1)")
    write_results(
        arguments.out,
        "sidecar_cost",
        {
            "cpu_s": used_s,
            "elapsed_s": elapsed_s,
            "percent_of_a_core": percent,
            "watched_processes": arguments.processes,
        },
    )


if __name__ == "__main__":
    main()
