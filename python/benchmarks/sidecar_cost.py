"""Cost of the sidecar, measured from outside: CPU and memory of its process.

    python sidecar_cost.py --out results/raw/sidecar_cost.json [--seconds 60] [--repeats 3]

1 Hz with 64 processes, 10 Hz with 8; each is a rank of several threads that finishes two steps per
second; metrics are scraped every 5 s. CPU time is that of the sidecar process, so other programs on
the machine change it little. script_cost.py measures a training with a sidecar.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from common import documented_parser, median_interval, shown, write_results
from paceline.collectives.host import boot_id, host_name, read_stat
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import RankStatus, StepRow
from paceline.measure.telemetry import SidecarHandle, SidecarRequest
from paceline.plan.spec.models import TelemetrySettings

MEMORY_LIMIT_BYTES = 80e6
SETTLED_AFTER_S = 3.0  # its start is not its cost a second
SCRAPE_EVERY_S = 5.0
READY_LIMIT_S = 30.0
_USER, _SYSTEM = 11, 12  # fields of /proc/PID/stat after the name, from 0 (proc(5))

# A rank as the sidecar sees it: waiting threads, and one that computes and writes step rows.
WATCHED = """
import json, sys, threading, time
row = json.loads(sys.argv[1])
for _ in range(3):
    threading.Thread(target=threading.Event().wait, args=(3600,), daemon=True).start()
with open(sys.argv[2], "w", buffering=1) as steps:
    while True:
        time.sleep(0.5)
        sum(range(20000))
        steps.write(json.dumps(row) + "\\n")
        row["step"] += 1
"""
STEP = StepRow(
    step=0, epoch=0, started_unix_s=0.0, samples=32, global_samples=64, loss_sum=1.0,
    data_wait_s=0.1, forward_s=0.1, backward_s=0.1, comm_s=0.1, comm_ready_unix_s=0.0,
    optimizer_s=0.05, other_s=0.05, step_s=0.5,
)  # fmt: skip


class Setting(NamedTuple):
    name: str
    interval_s: float
    processes: int
    allowed_percent: float  # of a core


SETTINGS = (
    Setting("1 Hz, 64 ranks", 1.0, 64, 2.0),
    Setting("10 Hz, 8 ranks", 0.1, 8, 3.0),
)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process as the kernel counts it, in ticks of 10 ms."""
    # the name in parentheses may hold spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def ranks_of(files: TrialFiles, count: int) -> Iterator[list[int]]:
    """Processes that look like a trial's ranks; their ids."""
    processes = []
    try:
        for rank in range(count):
            files.rank(rank).root.mkdir(parents=True)
            row = json.dumps(asdict(STEP))
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", WATCHED, row, str(files.rank(rank).steps)]
            )
            processes.append(process)
            stat = read_stat(process.pid)
            assert stat is not None, "it runs until it is killed"
            status = RankStatus(
                rank=rank,
                host=host_name(),
                pid=process.pid,
                process_started_unix_s=stat.started_unix_s,
                state="running",
                start_ticks=stat.start_ticks,
                boot_id=boot_id(),
            )
            write_json(files.rank(rank).status, asdict(status))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextlib.contextmanager
def sidecar(setting: Setting, pids: list[int], folder: Path) -> Iterator[tuple[int, int | None]]:
    """Run a sidecar for `pids`; yield its process id and the port of its metrics."""
    handle = SidecarHandle(
        SidecarRequest(
            settings=TelemetrySettings(interval_s=setting.interval_s, listen_port=0),
            run="benchmark",
            pids=tuple(pids),
            trace=folder / "trace.jsonl",
            state=folder / "sidecar.json",
            trial_root=folder / "trial",
            max_lifetime_s=3600,
        )
    )
    try:
        yield handle.pid, _port(folder / "sidecar.json")
    finally:
        handle.stop()


def _port(state: Path) -> int | None:
    """Wait until the sidecar samples and return the port of its metrics."""
    limit = time.monotonic() + READY_LIMIT_S
    while not state.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"expected the sidecar to start within {READY_LIMIT_S:g} s")
        time.sleep(0.05)
    port: int | None = json.loads(state.read_text())["port"]
    return port


def scrape_until(limit: float, port: int | None) -> None:
    """Ask for the metrics every few seconds, as a Prometheus does."""
    while (left_s := limit - time.monotonic()) > 0:
        if port is not None:
            address = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(address, timeout=10) as answer:
                answer.read()
        time.sleep(max(0.0, min(SCRAPE_EVERY_S, left_s)))


def measure(setting: Setting, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        folder = Path(temporary)
        files = TrialFiles(folder / "trial")
        with (
            ranks_of(files, setting.processes) as pids,
            sidecar(setting, pids, folder) as (pid, port),
        ):
            time.sleep(SETTLED_AFTER_S)
            before, started = cpu_seconds(pid), time.monotonic()
            scrape_until(started + seconds, port)
            used_s = cpu_seconds(pid) - before
            elapsed_s = time.monotonic() - started
            peak_bytes = peak_rss_bytes(pid)
        rows = {
            name: (folder / f"{name}.jsonl").read_text().count("\n") for name in ("trace", "ranks")
        }
    return {
        "cpu_s": used_s,
        "elapsed_s": elapsed_s,
        "percent_of_a_core": 100 * used_s / elapsed_s,
        "rss_peak_bytes": peak_bytes,
        **{f"{name}_rows": count for name, count in rows.items()},
    }


def cost(setting: Setting, seconds: float, repeats: int) -> dict[str, Any]:
    raw = [measure(setting, seconds) for _ in range(repeats)]
    percent = median_interval([it["percent_of_a_core"] for it in raw])
    peak_bytes = max(it["rss_peak_bytes"] for it in raw)
    shown(f"{setting.name} (allowed: {setting.allowed_percent})", percent, "% of a core")
    print(
        f"{'':<58} {peak_bytes / 1e6:8.1f} MB at its peak (allowed: {MEMORY_LIMIT_BYTES / 1e6:.0f})"
    )
    return {
        "setting": setting._asdict(),
        "percent_of_a_core": percent,
        "rss_peak_bytes": peak_bytes,
        "kept": percent["median"] <= setting.allowed_percent and peak_bytes < MEMORY_LIMIT_BYTES,
        "raw": raw,
    }


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    found = [cost(setting, arguments.seconds, arguments.repeats) for setting in SETTINGS]
    write_results(arguments.out, "sidecar_cost", {"cost": found})


if __name__ == "__main__":
    main()
