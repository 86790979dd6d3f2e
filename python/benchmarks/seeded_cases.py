"""Disturbances for seeded_causes.py: each trains the same task with and without one of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import call
from control_groups import Skipped, control_group, entering, limit_cpu
from one_trial import one_trial
from paceline.lab import INTERFACE, Lab, LabSettings, why_not

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
class Case:
    """A disturbance and the causes that count as right."""

    name: str
    expected: frozenset[str]
    run: Callable[[Plan, str, Path, int], None]  # (plan, "clean" or "seeded", run folder, repeat)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options, data set and strength of a case."""

    options: argparse.Namespace
    data: Path
    strength: float  # of the disturbance, from 0 to 1


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


def train(plan: Plan, folder: Path, repeat: int, trial: dict[str, Any], **how: Any) -> None:
    """Train once under launcher `local`.

    how: disturbance and value of seeded_rank.py; prefix: words before the command; changes: of the
    workload.
    """
    disturbance, value = how.get("disturbance", "none"), how.get("value", 0.0)
    own = {"launcher": "local", **trial}
    argv = [
        *how.get("prefix", ()), sys.executable, HERE / "seeded_rank.py", disturbance, value,
        *arguments_of(plan, folder, repeat, own, how.get("changes", {})),
    ]  # fmt: skip
    log = folder.parent / f"{folder.name}-{repeat}.log"
    call(list(map(str, argv)), dict(os.environ), LIMIT_S, log)


def alone(
    plan: Plan, folder: Path, repeat: int, *, oversubscribe: bool = False, **how: Any
) -> None:
    trial = {"local_strategy": "sequential", "oversubscribe": oversubscribe}
    train(plan, folder, repeat, trial, **how)


def cpu_quota(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    # oversubscribe, else Paceline refuses a quota below the planned cores
    if side == "clean":
        alone(plan, folder, repeat, oversubscribe=True)
        return
    with control_group("cpu") as group:
        limit_cpu(group, 0.8 - 0.4 * plan.strength, PERIOD_US)
        alone(plan, folder, repeat, oversubscribe=True, prefix=entering(group))


def memory_hog(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    with beside(_COPY if side == "seeded" else None, core=1):
        alone(plan, folder, repeat, prefix=("taskset", "-c", "0"))


def competitor(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    with beside(_SPIN if side == "seeded" else None, core=0):
        alone(plan, folder, repeat, prefix=("taskset", "-c", "0"))


def slow_reader(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    how: dict[str, Any] = {}
    if side == "seeded":
        how = {"disturbance": "reader", "value": 0.2 + 0.2 * plan.strength}
    alone(plan, folder, repeat, **how)


def cold_cache(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    """Read a data set from a slow disk, which the page cache hides in the clean trials."""
    with control_group("blkio") as group:
        device = plan.data.stat().st_dev
        disk = f"{os.major(device)}:{os.minor(device) - os.minor(device) % 16}"
        (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {DISK_BYTES_PER_S}")
        with beside(_DROP_CACHES if side == "seeded" else None, 1, str(plan.data)):
            changes = {"reading": "stream"}
            alone(plan, folder, repeat, prefix=entering(group), changes=changes)


def own_threads(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    alone(plan, folder, repeat, disturbance="lock" if side == "seeded" else "none")


def oversubscription(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    threads = 2 if side == "clean" else 4 + round(4 * plan.strength)
    trial = {"local_strategy": "intraop", "threads_per_rank": threads, "oversubscribe": True}
    train(plan, folder, repeat, trial)


def slow_rank(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    seconds = 0.0 if side == "clean" else 0.02 + 0.02 * plan.strength
    trial = {
        "launcher": "mpi", "local_strategy": "processes", "transport": "gloo", "ranks_per_node": 2,
    }  # fmt: skip
    argv = [
        Path(sys.executable).with_name("mpirun"), "-n", 2, "--bind-to", "none",
        "--host", "localhost:2", sys.executable, HERE / "slowed_rank.py", 1, seconds, 1,
        HERE.parents[1] / "mpi-jobs" / "train.py",
        *arguments_of(plan, folder, repeat, trial, {}),
    ]  # fmt: skip
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    log = folder.parent / f"{folder.name}-{repeat}.log"
    call(list(map(str, argv)), {**os.environ, **as_root}, LIMIT_S, log)


def slow_link(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    spec = folder.parent / f"{folder.name}-{repeat}.toml"
    with Lab(LabSettings(hosts=2, cores=1), name="seeded") as lab:
        # A step sends 0.1 MB, which the burst of a faster link would let pass at once.
        lab.shape(None if side == "clean" else f"{round(10 - 5 * plan.strength)}mbit")
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


CASES = (
    Case(name="CPU quota", expected=frozenset({"cpu_quota"}), run=cpu_quota),
    Case(name="memory hog", expected=frozenset({"memory_contention"}), run=memory_hog),
    Case(name="competitor", expected=frozenset({"competition"}), run=competitor),
    Case(name="slow reader", expected=frozenset({"slow_reader"}), run=slow_reader),
    Case(name="cold cache", expected=frozenset({"cold_cache"}), run=cold_cache),
    Case(name="GIL hog", expected=frozenset({"own_threads"}), run=own_threads),
    Case(name="too many threads", expected=frozenset({"oversubscription"}), run=oversubscription),
    Case(name="slow rank", expected=frozenset({"slow_rank"}), run=slow_rank),
    Case(name="slow link", expected=frozenset({"slow_link"}), run=slow_link),
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
