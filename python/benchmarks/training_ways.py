"""Trainings of the benchmarks: Paceline's own trials and bare scripts, interleaved."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import call, median_interval, paired_ratio, shown
from mpi_job import environment, mpirun
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.tables import row_dicts
from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.runner.launchers.base import launcher_for
from paceline.runner.trials.run_trial import run_trial

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Trial

BATCH = 32  # of each rank
RANKS = 2
WARMUP_STEPS = 4
LIMIT_S = 600.0
SPEC = """
schema = 2
name = "benchmark"
[training]
max_steps = {steps}
epochs = 1000
global_batch = 64
[[workloads]]
name = "simple-big"
data = "unused"
[telemetry]
interval_s = 1.0
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""
SAFE = str.maketrans("/+ ", "---")  # names of folders
# What a way gives: when each step ended (unix seconds), by rank.
StepEnds = list[list[float]]
Ways = dict[str, Callable[[Path], StepEnds]]


def samples_per_s(ends_by_rank: StepEnds) -> float:
    """Throughput after warm-up; a global step ends when its slowest rank ends."""
    ends = [max(step) for step in zip(*ends_by_rank, strict=True)]
    steps = len(ends) - WARMUP_STEPS
    elapsed_s: float = ends[-1] - ends[WARMUP_STEPS - 1]
    return steps * BATCH * RANKS / elapsed_s


def bare(
    backend: str,
    steps: int,
    folder: Path,
    settings: Mapping[str, str] | None = None,
    python: str = sys.executable,
    options: Sequence[str] = (),
    wrapper: Sequence[str] = (),
) -> StepEnds:
    """Run bare_ddp.py. wrapper: a script that runs it, with its arguments."""
    script = str(Path(__file__).with_name("bare_ddp.py"))
    own = [*wrapper, script, "--backend", backend, "--batch", str(BATCH), "--steps", str(steps)]
    own += ["--out", str(folder), *options]
    variables = environment(**(settings or {}))
    if backend in ("gloo", "paceline"):
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        argv += ["--nproc-per-node", str(RANKS), *own]
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        argv = [str(mpirun()), "-n", str(RANKS), "--bind-to", "none", python, *own]
    call(argv, variables, LIMIT_S, folder / "log.txt")
    return ends_in(folder)


def ends_in(folder: Path) -> StepEnds:
    """Return what bare_ddp.py has noted itself."""
    rows = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(RANKS)]
    return [[float(end) for end in row["step_ended_unix_s"]] for row in rows]


def trained(trial: Trial, folder: Path) -> TrialFiles:
    """Run a trial in a folder, and return its files. Raises RuntimeError if it fails."""
    files = TrialFiles(folder / trial.id)
    outcome = run_trial(trial, files)
    if outcome.status != "ok":
        raise RuntimeError(outcome.message)
    return files


def paceline(trial: Trial, folder: Path) -> StepEnds:
    return step_ends(trained(trial, folder))


def step_ends(files: TrialFiles) -> StepEnds:
    return [
        [row["started_unix_s"] + row["step_s"] for row in row_dicts(rank.steps)]
        for _, rank in files.ranks()
    ]


def interleaved(ways: Ways, repeats: int) -> dict[str, list[StepEnds]]:
    """Each way once a repeat, in an order drawn anew for each; step ends by way and repeat."""
    raw: dict[str, list[StepEnds]] = {name: [] for name in ways}
    order = random.Random(1)  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        for repeat in range(repeats):
            names = list(ways)
            order.shuffle(names)
            for name in names:
                folder = Path(temporary) / f"{name.translate(SAFE)}-{repeat}"
                ends = ways[name](folder)
                raw[name].append(ends)
                print(f"{repeat} {name}: {samples_per_s(ends):.1f} images/s", file=sys.stderr)
    return raw


def spec_of(steps: int, ways: Sequence[tuple[str, str | None]]) -> str:
    """Return a spec with two ranks for each launcher and transport, None for its default one."""
    text = SPEC.format(steps=steps)
    for launcher, transport in ways:
        given = "" if transport is None else f'transport = "{transport}"\n'
        text += f'[[trials]]\nlauncher = "{launcher}"\n{given}local_strategy = "processes"\n'
        text += "ranks_per_node = 2\n"
    return text


def trials_of(spec: str, dataset: Path) -> list[Trial]:
    """The first repeat of each trial but the baseline, that keeps no tensors; able to run here."""
    experiment = parse_spec(spec, "benchmark")
    planned = plan_trials(experiment, {"simple-big": str(dataset)}, RANKS)
    trials = [
        t.model_copy(update={"save_tensors": False})
        for t in planned
        if t.repeat == 0 and not t.is_baseline
    ]
    for trial in trials:
        launcher_for(trial.launcher).preflight(trial)
    return trials


def conclude(
    raw: Mapping[str, list[StepEnds]], claims: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    """Print rates and claims, each (text, ours, theirs); return the content of the results."""
    rates = {name: [samples_per_s(ends) for ends in runs] for name, runs in raw.items()}
    for name, values in rates.items():
        shown(name, median_interval(values), "images/s")
    found = []
    for claim, ours, theirs in claims:
        if ours in rates and theirs in rates:
            ratio = paired_ratio(rates[ours], rates[theirs])
            shown(claim, ratio, "x")
            found.append({"claim": claim, **ratio})
    return {"samples_per_s": rates, "claims": found, "step_ended_unix_s": raw}
