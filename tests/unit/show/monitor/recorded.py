"""A fabricated run whose traces have everything that a sidecar can tell, at known rates.

Built on the runs that the analysis is tested with; counters rise by the constants below each
second, so what Prometheus must answer is known beforehand.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.support.rows import OPERATION
from tests.unit.analysis.fabricate import Case, Way, edit_json, make_run
from tests.unit.analysis.ways import MPI, SEQUENTIAL, SPARK

from paceline.measure.records.files import JsonlWriter, read_json, read_jsonl
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.tables import HOST_SAMPLES

CORES = 2
# CPU seconds a second on two cores: they add up to 2
CPU = {"user": 1.0, "system": 0.2, "idle": 0.5, "iowait": 0.2, "steal": 0.06, "other": 0.04}
RANK_CORES = 0.4
RANK_THREADS = 7
DISK_READ = 3_000_000
SENT = 5_000_000
PAYLOAD_BYTES = 2_000_000  # of each step's all-reduce
NODES = 2

TWO_HOSTS = dataclasses.replace(MPI, nodes=NODES, ranks=1, lead_s=0.15, backward_s=0.4)
WAYS: tuple[Way, ...] = (SEQUENTIAL, MPI, SPARK, TWO_HOSTS)


def make_recorded_run(root: Path, ways: tuple[Way, ...] = WAYS) -> RunFiles:
    """Trials of `ways`, one after another; the last rank of the last one failed."""
    run = make_run(root, ways, cases=(Case(steps=30),))
    trials = sorted(run.trials(), key=lambda found: read_json(found[1].outcome)["launched_unix_s"])
    for _, files in trials:
        for name, _ in files.hosts():
            _enrich(files, name)
        for rank, _ in files.ranks():
            _communicate(files, rank)
    _, last = trials[-1]
    failed = max(rank for rank, _ in last.ranks())
    edit_json(last.rank(failed).status, state="failed", error="fabricated")
    edit_json(last.outcome, status="failed", failed_rank=failed)
    return run


def _enrich(files: TrialFiles, host: str) -> None:
    own = files.host(host)
    header, *samples = read_jsonl(own.trace)
    started = samples[0]["unix_s"]
    ranks = [
        (rank, read_json(rank_files.status)["pid"])
        for rank, rank_files in files.ranks()
        if read_json(rank_files.status)["host"] == host
    ]
    own.trace.unlink()
    with JsonlWriter(own.trace) as trace, JsonlWriter(own.ranks) as by_rank:
        trace.write({**header, "version": "0.1.0"})
        for number, sample in enumerate(samples):
            passed_s = sample["unix_s"] - started
            trace.write({**sample, **_more(sample, passed_s, number, len(ranks))})
            for rank, pid in ranks:
                by_rank.write(_rank(sample["unix_s"], passed_s, rank, pid, number))


def _more(sample: dict[str, Any], passed_s: float, number: int, ranks: int) -> dict[str, object]:
    """Return values at the rates above; 0 for the columns that no test looks at."""
    pressure = {
        "cpu": {"some_s": 0.3 * passed_s, "full_s": 0.0},
        "memory": {"some_s": 0.0, "full_s": 0.0},
        "io": {"some_s": 0.1 * passed_s, "full_s": 0.05 * passed_s},
    }
    disk = {
        "read_bytes": round(DISK_READ * passed_s),
        "written_bytes": 10**9,
        "busy_s": 0.25 * passed_s,
    }
    moved_bytes = round(SENT * passed_s)
    network = {"sent_bytes": moved_bytes, "received_bytes": moved_bytes, "dropped_packets": 0}
    cgroup = {
        "cpu_limit_cores": 2.0,
        "cpu_s": 1.2 * passed_s,
        "throttled_s": 0.02 * passed_s,
        "throttled_periods": number,
        "memory_limit_bytes": 8 * 10**9,
        "memory_used_bytes": 3 * 10**9,
    }
    gpu = {
        "name": "Fabricated GPU",
        "utilization_ratio": 0.75,
        "memory_used_bytes": 10**10,
        "memory_total_bytes": 8 * 10**10,
        "power_watts": 350.0,
        "sm_clock_hertz": 1.8e9,
        "memory_clock_hertz": 2.6e9,
        "temperature_celsius": 61.0,
    }
    return {
        **dict.fromkeys(HOST_SAMPLES.types.keys() - sample.keys(), 0),
        "cpu_seconds": {mode: 100.0 + rate * passed_s for mode, rate in CPU.items()},
        "core_busy_s": [50.0 + 0.8 * passed_s, 40.0 + 0.5 * passed_s],
        "cpu_cores": 2,
        "cpu_frequency_hertz": 2.4e9,
        "load": {"1m": 1.5, "5m": 1.25, "15m": 1.0},
        "pressure": pressure,
        "swap_total_bytes": 10**9,
        "minor_page_faults": round(1000 * passed_s),
        "major_page_faults": 3,
        "disks": {"sda": disk},
        "networks": {"eth0": network},
        "cgroup": cgroup,
        "temperatures_celsius": {"package0": 55.0},
        "gpus": [gpu],
        "run_cpu_seconds": (ranks * RANK_CORES + 0.01) * passed_s,
        "run_pss_bytes": 9 * 10**8,
        "run_voluntary_context_switches": round(100 * passed_s),
        "run_involuntary_context_switches": round(10 * passed_s),
        "run_read_bytes": round(10**6 * passed_s),
        "run_written_bytes": round(10**5 * passed_s),
        "run_open_files": 40,
    }


def _rank(unix_s: float, passed_s: float, rank: int, pid: int, number: int) -> dict[str, Any]:
    return {
        "unix_s": unix_s,
        "rank": rank,
        "pid": pid,
        "processes": 1,
        "cpu_seconds": RANK_CORES * passed_s,
        "rss_bytes": 5 * 10**8,
        "pss_bytes": None if number % 4 else 4 * 10**8,
        "threads": RANK_THREADS,
        "voluntary_context_switches": round(50 * passed_s),
        "involuntary_context_switches": round(5 * passed_s),
        "read_bytes": round(5 * 10**5 * passed_s),
        "written_bytes": round(5 * 10**4 * passed_s),
        "open_files": 20,
    }


def _communicate(files: TrialFiles, rank: int) -> None:
    """An all-reduce at the end of each step that has communication."""
    world = json.loads(files.trial.read_text())["placement"]
    ranks = world["nodes"] * world["ranks_per_node"]
    own = files.rank(rank)
    with JsonlWriter(own.communication) as rows:
        for step in read_jsonl(own.steps):
            if step["comm_s"] is None:
                continue
            ready = step["comm_ready_unix_s"]
            row = dataclasses.replace(
                OPERATION, group="all", ranks=ranks, sequence=step["step"],
                payload_bytes=PAYLOAD_BYTES, arrived_unix_s=ready, started_unix_s=ready,
                ended_unix_s=ready + step["comm_s"], sent_bytes=PAYLOAD_BYTES,
            )  # fmt: skip
            rows.write(row)
