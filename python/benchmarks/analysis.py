"""Time and memory of comparing and reporting a large run.

Generates a run directory with compacted trials (configurations x repeats, steps, ranks, a trace),
then runs `paceline compare --json`, `explain`, `predict` and `report` on it in fresh processes:

    python python/benchmarks/analysis.py --out docs/results/raw/analysis.json

Targets: 1,000 trials of 10,000 steps and 2 ranks are compared in 10 s and reported in 20 s, with
4 GiB of memory and an HTML file below 10 MB. 100 trials (`--configurations 20`) are explained in
10 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from common import write_results
from paceline.analysis.equivalence.check import Equivalence
from paceline.analysis.equivalence.checks import Check
from paceline.measure.records.files import JsonlWriter, jsonable, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import (
    SCHEMA,
    Outcome,
    RankEnvironment,
    RankStatus,
    SpanRow,
    StepRow,
    TrainingResult,
)
from paceline.measure.records.tables import HOST_SAMPLES, format_of, parquet_path, write_parquet
from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial, trial_name

SPEC = """
schema = 2
name = "analysis-benchmark"
repeats = 1
[[workloads]]
name = "tiny"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
local_strategy = "processes"
transport = "mpi"
"""
LAUNCHED = 1_700_000_000.0
STEP_S = 0.02
INTERVAL_S = 0.5


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = RunFiles(Path(folder) / "run")
        began = time.monotonic()
        generate(run, options)
        print(
            f"generated {options.configurations * options.repeats} trials in "
            f"{time.monotonic() - began:.0f} s"
        )
        found = {
            "compare": measured("compare", str(run.root), "--json"),
            "explain": measured("explain", str(run.root), "--json"),
            "predict": measured(
                "predict",
                str(run.root),
                "--json",
                "--nodes",
                "1..1024",
                "--scaling",
                "weak",
                "--transport",
                "gloo",
                "--link",
                "10gbit",
            ),
            "report": measured("report", str(run.root)),
        }
        found["report"]["html_mb"] = run.report.stat().st_size / 1e6
    for name, result in found.items():
        print(name, {key: round(value, 2) for key, value in result.items()})
    write_results(
        options.out,
        "analysis",
        {
            "trials": options.configurations * options.repeats,
            "configurations": options.configurations,
            "repeats": options.repeats,
            "steps": options.steps,
            "ranks": 2,
            "load_average": os.getloadavg(),
            **found,
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the run directory is generated")
    return parser.parse_args()


def measured(*words: str) -> dict[str, float]:
    """Run one command; wall time, CPU time and peak memory of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    program = (
        "import resource, sys; from paceline.cli import main; status = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    wall_s = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"paceline {' '.join(words)} failed: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak_kib = int(done.stderr.strip().splitlines()[-1])
    return {"wall_s": wall_s, "cpu_s": cpu_s, "memory_gib": peak_kib / 2**20}


def generate(run: RunFiles, options: argparse.Namespace) -> None:
    experiment = parse_spec(SPEC, "benchmark")
    baseline, other = sorted(
        plan_trials(experiment, {"tiny": "data/tiny"}, 2), key=lambda t: not t.is_baseline
    )
    random = np.random.default_rng(1)
    ids = []
    for number in range(options.configurations):
        for repeat in range(options.repeats):
            trial = planned(baseline if number == 0 else other, number, repeat, options.steps)
            speed = 1.0 if number == 0 else 0.5 + 0.4 * number / options.configurations
            make_trial(run.trial(trial.id), trial, speed, random)
            ids.append(trial.id)
    baseline_id = ids[0]
    for trial_id in ids:
        equivalence(run.trial(trial_id), trial_id, baseline_id)
    write_json(run.manifest, {"schema": SCHEMA, "name": "analysis-benchmark", "trials": ids})


def planned(trial: Trial, number: int, repeat: int, steps: int) -> Trial:
    """Return the trial of one configuration; all but the baseline differ in their threads."""
    training = trial.training.model_copy(update={"max_steps": steps, "warmup_steps": 10})
    changed = trial.model_copy(update={"training": training, "repeat": repeat})
    if number:
        changed = configured(changed, number)
    return changed.model_copy(update={"id": trial_name(changed.configuration, repeat)})


def configured(trial: Trial, number: int) -> Trial:
    """Return a variant of a trial with a configuration of its own."""
    place = trial.placement.model_copy(update={"threads_per_rank": number})
    return trial.model_copy(update={"placement": place})


def make_trial(files: TrialFiles, trial: Trial, speed: float, random: np.random.Generator) -> None:
    steps = trial.training.max_steps or 0
    times = STEP_S * speed * np.exp(0.1 * random.standard_normal(steps) + 0.01 * random.normal())
    files.root.mkdir(parents=True)
    files.trial.write_text(trial.model_dump_json())
    files.command.write_text(f"paceline-benchmark --trial {trial.id}\n")
    ended = LAUNCHED + 2.0 + float(times.sum())
    for rank in range(trial.placement.ranks):
        make_rank(files, trial, rank, times)
    make_trace(files, LAUNCHED, ended)
    result = TrainingResult(steps=steps, weights_sha256="a" * 64, update_l2={}, parameters=1)
    write_json(files.result, dataclasses.asdict(result))
    outcome = Outcome(
        schema=SCHEMA, trial_id=trial.id, status="ok", exit_code=0, launched_unix_s=LAUNCHED,
        ended_unix_s=ended, launcher_exit_status=0, failed_rank=None, message=None,
    )  # fmt: skip
    write_json(files.outcome, dataclasses.asdict(outcome))


def make_rank(files: TrialFiles, trial: Trial, rank: int, times: np.ndarray[Any, Any]) -> None:
    own = files.rank(rank)
    own.root.mkdir(parents=True)
    started = LAUNCHED + 1.0 + np.concatenate([[0.0], np.cumsum(times)[:-1]])
    alone = trial.placement.ranks == 1
    samples = trial.training.global_batch // trial.placement.ranks
    columns = {
        "step": np.arange(len(times)),
        "epoch": np.zeros(len(times), np.int64),
        "started_unix_s": started,
        "samples": np.full(len(times), samples),
        "global_samples": np.full(len(times), trial.training.global_batch),
        "loss_sum": samples * (1.0 + 1.0 / (1.0 + np.arange(len(times)))),
        "data_wait_s": 0.02 * times,
        "forward_s": 0.3 * times,
        "backward_s": 0.5 * times,
        "comm_s": None if alone else 0.15 * times,
        "comm_ready_unix_s": None if alone else started + (0.8 + 0.02 * rank) * times,
        "optimizer_s": 0.02 * times,
        "other_s": 0.01 * times if not alone else 0.16 * times,
        "step_s": times,
        "bubble_s": None,
        "pass_comm_s": None,
        "comm_ended_unix_s": None,
    }
    frame = pl.DataFrame(columns, schema=format_of(StepRow).types)
    write_parquet(frame, parquet_path(own.steps), {})
    with JsonlWriter(own.spans) as spans:
        spans.write(SpanRow(name="imports", started_unix_s=LAUNCHED, ended_unix_s=LAUNCHED + 0.5))
        end = float(started[-1] + times[-1])
        spans.write(SpanRow(name="train", started_unix_s=LAUNCHED + 1.0, ended_unix_s=end))
    environment = RankEnvironment(
        rank=rank, world_size=trial.placement.ranks, local_rank=rank, node_index=0, host="node0",
        pid=1, intraop_threads=trial.placement.threads_per_worker, interop_threads=1,
        omp_environment={},
        affinity=[rank], cgroup_cpu_limit=None, cgroup_memory_limit_bytes=None, cpu_model="CPU",
        precision="fp32", memory_format="contiguous", transport=trial.transport, interface="lo",
        clock_offset_s=0.0, clock_error_s=0.0, versions={"torch": "2"},
        initial_weights_sha256="b" * 64,
    )  # fmt: skip
    write_json(own.environment, dataclasses.asdict(environment))
    status = RankStatus(
        rank=rank, host="node0", pid=1, process_started_unix_s=LAUNCHED, state="done"
    )
    write_json(own.status, dataclasses.asdict(status))


def make_trace(files: TrialFiles, began: float, ended: float) -> None:
    """Write a trace with a row every INTERVAL_S."""
    path = files.host("node0").trace
    path.parent.mkdir(parents=True)
    unix_s = np.arange(began, ended, INTERVAL_S)
    passed = unix_s - began
    known = {
        "unix_s": unix_s,
        "ram_used_bytes": np.full(len(unix_s), 2 << 30),
        "ram_total_bytes": np.full(len(unix_s), 16 << 30),
        "run_cpu_seconds": 1.8 * passed,
        "run_rss_bytes": np.full(len(unix_s), 1 << 30),
        "run_threads": np.full(len(unix_s), 14),
        "sidecar_cpu_seconds": 0.01 * passed,
        "sidecar_rss_bytes": np.full(len(unix_s), 30 << 20),
    }
    frame = pl.DataFrame(known).with_columns(
        pl.struct(
            (pl.lit(1.6) * passed).alias("user"), (pl.lit(0.2) * passed).alias("system"),
            (pl.lit(0.2) * passed).alias("idle"), (pl.lit(0.0) * passed).alias("iowait"),
        ).alias("cpu_seconds"),
        pl.concat_list(pl.lit(0.9) * passed, pl.lit(0.9) * passed).alias("core_busy_s"),
        *(
            pl.lit(None, dtype=kind).alias(name)
            for name, kind in HOST_SAMPLES.types.items()
            if name not in known and name != "core_busy_s"
        ),
    )  # fmt: skip
    write_parquet(frame, parquet_path(path), {"interval_s": INTERVAL_S, "cores": 2})


def equivalence(files: TrialFiles, trial_id: str, baseline_id: str) -> None:
    check = Check(name="final_weights", passed=True, reason="equal", value=0.0, tolerance=0.1)
    found = Equivalence(
        trial_id=trial_id, baseline_id=baseline_id, arithmetic="fp32", checks=(check,) * 6,
        max_abs_weight_diff=0.0,
    )  # fmt: skip
    write_json(files.equivalence, jsonable(found))


if __name__ == "__main__":
    main()
