"""A run directory that grows as a test says, for the live view."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.support.rows import ENDED_WELL, STEP

from paceline.measure.records.files import JsonlWriter, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import RankStatus
from paceline.plan.trials.trial import Trial

BEGAN = 1_700_000_000.0


def plan(run: RunFiles, trials: list[Trial]) -> None:
    write_json(
        run.manifest,
        {"name": "watched", "created_unix_s": BEGAN, "trials": [trial.id for trial in trials]},
    )


def start(run: RunFiles, trial: Trial) -> TrialFiles:
    files = run.trial(trial.id)
    files.root.mkdir(parents=True)
    files.trial.write_text(trial.model_dump_json())
    return files


def end(files: TrialFiles, status: str = "ok", message: str | None = None) -> None:
    outcome = dataclasses.replace(
        ENDED_WELL, trial_id=files.root.name, status=status, message=message,
        exit_code=0 if status == "ok" else 5, launched_unix_s=BEGAN, ended_unix_s=BEGAN + 9,
    )  # fmt: skip
    write_json(files.outcome, outcome)


def say(files: TrialFiles, rank: int, state: str = "running") -> None:
    status = RankStatus(
        rank=rank, host="node0", pid=100 + rank, process_started_unix_s=BEGAN, state=state
    )
    write_json(files.rank(rank).status, status)


def step(
    files: TrialFiles,
    rank: int,
    number: int,
    *,
    at: float | None = None,
    compute_s: float = 0.3,
    step_s: float = 0.5,
    loss: float = 2.0,
) -> None:
    """A step of half a batch of 8: computing, then until its end communication."""
    began = BEGAN + number * step_s if at is None else at
    row = dataclasses.replace(
        STEP, step=number, epoch=number // 10, started_unix_s=began, samples=4, global_samples=8,
        loss_sum=4 * loss, forward_s=compute_s / 3, backward_s=2 * compute_s / 3,
        comm_s=step_s - compute_s, comm_ready_unix_s=began + compute_s, step_s=step_s,
    )  # fmt: skip
    with JsonlWriter(files.rank(rank).steps) as rows:
        rows.write(row)


def sample(files: TrialFiles, unix_s: float, host: str = "node0", **values: Any) -> None:
    usual = {
        "unix_s": unix_s,
        "ram_used_bytes": 3 << 30,
        "ram_total_bytes": 16 << 30,
        "swap_used_bytes": 0,
        "run_processes": 2,
        "run_cpu_seconds": 1.0,
        "run_rss_bytes": 1 << 30,
        "run_pss_bytes": None,
        "run_threads": 14,
        "run_voluntary_context_switches": 0,
        "run_involuntary_context_switches": 0,
        "sidecar_cpu_seconds": 0.1,
        "sidecar_rss_bytes": 1 << 20,
    }
    with JsonlWriter(files.host(host).trace) as rows:
        rows.write({**usual, **values})


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
