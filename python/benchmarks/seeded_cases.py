"""Disturbances for seeded_causes.py: the same task is trained with none, one or two of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import call
from control_groups import Skipped, control_group, entering, limit_cpu
from mpi_job import AS_ROOT, mpirun
from one_trial import one_trial
from paceline.runner.lab import INTERFACE, Lab, LabSettings, why_not

HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0
PERIOD_US = 20_000
DISK_BYTES_PER_S = 4_000_000
_COPY = """
import numpy as np
block = np.ones(8_000_000)
other = np.empty_like(block)
while True:
    np.copyto(other, block)
    np.copyto(block, other)
"""
_SPIN = "while True: pass"
# Takes only the data set from the page cache: libraries that had to be read again would also cost.
# It repeats every 20 ms: more often it would also take CPU time from the training.
_DROP_CACHES = """
import os, sys, time
files = [os.path.join(d, n) for d, _, names in os.walk(sys.argv[1]) for n in names]
handles = [os.open(name, os.O_RDONLY) for name in files]
while True:
    for handle in handles:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(0.02)
"""
LINK_SPEC = """
schema = 2
name = "link"
repeats = 1
[[workloads]]
name = "tiny"
data = "{data}"
image_size = 128
global_batch = 64
max_steps = {steps}
epochs = 10000
warmup_steps = 4
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
transport = "gloo"
local_strategy = "sequential"
sufficient_factors = "never"  # else a slow link would make the ranks send less
nodes = 2
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[telemetry]
interval_s = 0.25
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options, data set and strength of the disturbances."""

    options: argparse.Namespace
    data: Path
    strength: float  # of each disturbance, from 0 to 1


@dataclass(kw_only=True)
class Training:
    """The command and the spec of one trial; disturbances change them."""

    plan: Plan
    stack: ExitStack  # what runs meanwhile
    prefix: list[str] = field(default_factory=list)  # words before the command
    trial: dict[str, Any] = field(default_factory=lambda: {"local_strategy": "sequential"})
    workload: dict[str, Any] = field(default_factory=dict)
    in_rank: tuple[str, float] = ("none", 0.0)  # of seeded_rank.py

    def enter(self, controller: str) -> Path:
        """Run the trial in a new control group."""
        group = self.stack.enter_context(control_group(controller))
        self.prefix += entering(group)
        return group


# Changes a training, with the disturbance or without it.
Disturb = Callable[[Training, bool], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Disturbances, each with the causes that count as right, and how to train with some of them.

    run: arguments are the plan, the names of those that are on, the run folder and the repeat.
    """

    name: str
    expected: Mapping[str, frozenset[str]]  # by disturbance
    run: Callable[[Plan, frozenset[str], Path, int], None]


def arguments_of(
    plan: Plan, folder: Path, repeat: int, trial: dict[str, Any], changes: dict[str, Any]
) -> list[str]:
    """Return the arguments of a job script; changes: of the workload."""
    workload = {
        "name": "tiny", "data": str(plan.data), "image_size": 128, "global_batch": 64,
        "max_steps": plan.options.steps, "warmup_steps": 4, "epochs": 10_000, **changes,
    }  # fmt: skip
    spec = folder.parent / f"{folder.name}-{repeat}.toml"
    words = one_trial(spec, workload, trial, telemetry={"interval_s": 0.25})
    return [*words, "--out", str(folder), "--repeat", str(repeat)]


def cpu_quota(training: Training, is_on: bool) -> None:
    # oversubscribe, else Paceline refuses a quota below the planned cores
    training.trial["oversubscribe"] = True
    if is_on:
        cores = 0.8 - 0.4 * training.plan.strength
        limit_cpu(training.enter("cpu"), cores, PERIOD_US)


def memory_hog(training: Training, is_on: bool) -> None:
    training.prefix += ["taskset", "-c", "0"]
    training.stack.enter_context(beside(_COPY if is_on else None, core=1))


def competitor(training: Training, is_on: bool) -> None:
    training.prefix += ["taskset", "-c", "0"]
    training.stack.enter_context(beside(_SPIN if is_on else None, core=0))


def slow_reader(training: Training, is_on: bool) -> None:
    if is_on:
        training.in_rank = "reader", training.plan.options.reader_s * (1 + training.plan.strength)


def cold_cache(training: Training, is_on: bool) -> None:
    """Read a data set from a slow disk, which the page cache hides in the clean trials."""
    group, device = training.enter("blkio"), training.plan.data.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device) - os.minor(device) % 16}"
    (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {DISK_BYTES_PER_S}")
    drop = _DROP_CACHES if is_on else None
    training.stack.enter_context(beside(drop, 1, str(training.plan.data)))
    training.workload["reading"] = "stream"


def own_threads(training: Training, is_on: bool) -> None:
    if is_on:
        training.in_rank = "lock", 0.0


def oversubscription(training: Training, is_on: bool) -> None:
    threads = 4 + round(4 * training.plan.strength) if is_on else 2
    training.trial |= {
        "local_strategy": "intraop", "threads_per_rank": threads, "oversubscribe": True,
    }  # fmt: skip


# Disturbances of a trial of launcher `local`, with the causes that count as right.
LOCAL: dict[str, tuple[Disturb, str]] = {
    "CPU quota": (cpu_quota, "cpu_quota"),
    "memory hog": (memory_hog, "memory_contention"),
    "competitor": (competitor, "competition"),
    "slow reader": (slow_reader, "slow_reader"),
    "cold cache": (cold_cache, "cold_cache"),
    "GIL hog": (own_threads, "own_threads"),
    "too many threads": (oversubscription, "oversubscription"),
}


def local_case(*names: str) -> Case:
    def run(plan: Plan, on: frozenset[str], folder: Path, repeat: int) -> None:
        with ExitStack() as stack:
            training = Training(plan=plan, stack=stack)
            for name in names:
                LOCAL[name][0](training, name in on)
            trial = {"launcher": "local", **training.trial}
            argv = [
                *training.prefix, sys.executable, HERE / "seeded_rank.py", *training.in_rank,
                *arguments_of(plan, folder, repeat, trial, training.workload),
            ]  # fmt: skip
            log = folder.parent / f"{folder.name}-{repeat}.log"
            call(list(map(str, argv)), dict(os.environ), LIMIT_S, log)

    expected = {name: frozenset({LOCAL[name][1]}) for name in names}
    return Case(name=" + ".join(names), expected=expected, run=run)


def slow_rank(plan: Plan, on: frozenset[str], folder: Path, repeat: int) -> None:
    seconds = 0.02 + 0.02 * plan.strength if on else 0.0
    trial = {
        "launcher": "mpi", "local_strategy": "processes", "transport": "gloo", "ranks_per_node": 2,
    }  # fmt: skip
    argv = [
        mpirun(), "-n", 2, "--bind-to", "none",
        "--host", "localhost:2", sys.executable, HERE / "slowed_rank.py", 1, seconds, 1,
        HERE.parents[1] / "mpi-jobs" / "train.py",
        *arguments_of(plan, folder, repeat, trial, {}),
    ]  # fmt: skip
    log = folder.parent / f"{folder.name}-{repeat}.log"
    call(list(map(str, argv)), {**os.environ, **AS_ROOT}, LIMIT_S, log)


def slow_link(plan: Plan, on: frozenset[str], folder: Path, repeat: int) -> None:
    """Train on two hosts of a lab; a program may compute on the core of each."""
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    spec = folder.parent / f"{folder.name}-{repeat}.toml"
    with ExitStack() as stack:
        for core in range(2):
            stack.enter_context(beside(_SPIN if "competitors" in on else None, core))
        lab = stack.enter_context(Lab(LabSettings(hosts=2, cores=1), name="seeded"))
        # A step sends 0.1 MB, which the burst of a faster link would let pass at once.
        lab.shape(f"{round(10 - 5 * plan.strength)}mbit" if "slow link" in on else None)
        spec.write_text(
            LINK_SPEC.format(
                data=plan.data, steps=plan.options.steps, interface=INTERFACE, hostfile=lab.hostfile
            )
        )
        run = folder.parent / f"{folder.name}-{repeat}"
        words = [sys.executable, "-m", "paceline.cli", "run", spec, "--out", run]
        done = subprocess.run(
            lab.hosts[0].command(*words),
            check=False, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"seeded_causes.py: {done.stderr}")
    (trial,) = (run / "trials").glob("*.mpi.gloo.*")
    target = folder / "trials" / trial.name.replace(".r0", f".r{repeat}")
    target.parent.mkdir(parents=True, exist_ok=True)
    trial.rename(target)
    text = (target / "trial.json").read_text().replace('"repeat": 0', f'"repeat": {repeat}')
    (target / "trial.json").write_text(text.replace(trial.name, target.name))


_LINK = {"slow link": frozenset({"slow_link"})}
CASES = (
    *map(local_case, LOCAL),
    Case(name="slow rank", expected={"slow rank": frozenset({"slow_rank"})}, run=slow_rank),
    Case(name="slow link", expected=_LINK, run=slow_link),
    local_case("CPU quota", "slow reader"),
    local_case("competitor", "slow reader"),
    local_case("memory hog", "slow reader"),
    local_case("too many threads", "slow reader"),
    # a slow reader works beside the training; these two add up
    local_case("CPU quota", "memory hog"),
    local_case("competitor", "memory hog"),
    local_case("CPU quota", "cold cache"),
    Case(
        name="slow link + competitors",
        expected={**_LINK, "competitors": frozenset({"competition"})},
        run=slow_link,
    ),
)


@contextmanager
def beside(program: str | None, core: int, *arguments: str) -> Iterator[None]:
    """Run a Python program on one core meanwhile; None runs nothing."""
    with ExitStack() as stack:
        if program is not None:
            argv = ["taskset", "-c", str(core), sys.executable, "-c", program, *arguments]
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
        yield
