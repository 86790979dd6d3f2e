"""Causes seeded one at a time: does `paceline explain` name the right one first, with its share?

    python seeded_causes.py --out results/seeded_causes.json [--rounds 2] [--limit-s 1200]

Each case trains the same task with and without one disturbance, interleaved: a CPU quota, a process
that copies memory on another core, a process on the same core, a slow reader, a cold page cache, a
slow link between two hosts, a slow rank, too many threads, a thread that holds Python's lock. The
difference between the two is the disturbance, so its true share is 1. The undisturbed trials of
each case are also compared with one another: no cause may be named. Needs root for control groups,
the disk and the two hosts (`paceline lab`); cases that are not possible are skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import call, write_results
from paceline.analysis.explain.explanation import ExplainedTrials, Explanation, explain
from paceline.analysis.reading import load_run
from paceline.lab import INTERFACE, Lab, LabSettings, why_not
from paceline.records.files import jsonable
from paceline.records.layout import RunFiles

HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0
ALLOWED_SHARE_ERROR = 0.15
CGROUP = Path("/sys/fs/cgroup")
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
_DROP_CACHES = """
import os, sys, time
files = [os.path.join(d, n) for d, _, names in os.walk(sys.argv[1]) for n in names]
handles = [os.open(name, os.O_RDONLY) for name in files]
while True:
    for handle in handles:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(0.02)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A disturbance and the causes that count as right."""

    name: str
    expected: frozenset[str]
    run: Callable[[Plan, str, Path, int], None]  # (plan, "clean" or "seeded", run folder, repeat)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all cases need."""

    options: argparse.Namespace
    data: Path
    strength: float  # of the disturbance, from 0 to 1


def train(plan: Plan, folder: Path, repeat: int, *words: str, **how: Any) -> None:
    """Train once under launcher `local`.

    how: disturbance and value of seeded_rank.py; prefix: words before the command; changes: of the
    options.
    """
    disturbance, value = how.get("disturbance", "none"), how.get("value", 0.0)
    settings = {
        "--workload": "tiny", "--data": plan.data, "--out": folder, "--repeat": repeat,
        "--image-size": 128, "--global-batch": 64, "--max-steps": plan.options.steps,
        "--warmup-steps": 4, "--epochs": 10_000, "--telemetry-interval": 0.25,
        **how.get("changes", {}),
    }  # fmt: skip
    argv = [
        *how.get("prefix", ()), sys.executable, HERE / "seeded_rank.py", disturbance, value,
        *(word for pair in settings.items() for word in pair), *words,
    ]  # fmt: skip
    log = folder.parent / f"{folder.name}-{repeat}.log"
    call(list(map(str, argv)), dict(os.environ), LIMIT_S, log)


def alone(plan: Plan, folder: Path, repeat: int, *words: str, **how: Any) -> None:
    train(plan, folder, repeat, "--local-strategy", "sequential", *words, **how)


def cpu_quota(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    allowed = "--oversubscribe"  # else Paceline refuses a quota below the planned cores
    if side == "clean":
        alone(plan, folder, repeat, allowed)
        return
    with control_group("cpu") as (tasks, group):
        quota_us = int(PERIOD_US * (0.8 - 0.4 * plan.strength))
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        alone(plan, folder, repeat, allowed, prefix=entering(tasks))


def memory_hog(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    with beside(_COPY if side == "seeded" else None, core=1):
        alone(plan, folder, repeat, prefix=("taskset", "-c", "0"))


def competitor(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    with beside(_SPIN if side == "seeded" else None, core=0):
        alone(plan, folder, repeat, prefix=("taskset", "-c", "0"))


def slow_reader(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    how = {"disturbance": "reader", "value": 0.1 + 0.1 * plan.strength} if side == "seeded" else {}
    alone(plan, folder, repeat, **how)


def cold_cache(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    """Read a data set from a slow disk, which the page cache hides in the clean trials."""
    with control_group("blkio") as (tasks, group):
        device = plan.data.stat().st_dev
        disk = f"{os.major(device)}:{os.minor(device) - os.minor(device) % 16}"
        (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {DISK_BYTES_PER_S}")
        with beside(_DROP_CACHES if side == "seeded" else None, 1, str(plan.data)):
            changes = {"--reading": "stream"}
            alone(plan, folder, repeat, prefix=entering(tasks), changes=changes)


def own_threads(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    alone(plan, folder, repeat, disturbance="lock" if side == "seeded" else "none")


def oversubscription(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    threads = 2 if side == "clean" else 4 + round(4 * plan.strength)
    words = ["--local-strategy", "intraop", "--threads-per-rank", str(threads)]
    train(plan, folder, repeat, *words, "--oversubscribe")


def slow_rank(plan: Plan, side: str, folder: Path, repeat: int) -> None:
    seconds = 0.0 if side == "clean" else 0.02 + 0.02 * plan.strength
    argv = [
        Path(sys.executable).with_name("mpirun"), "-n", 2, "--bind-to", "none",
        "--host", "localhost:2", sys.executable, HERE / "slowed_rank.py", 1, seconds, 1,
        HERE.parents[1] / "mpi-jobs" / "train.py", "--workload", "tiny", "--data", plan.data,
        "--out", folder, "--repeat", repeat, "--image-size", 128, "--global-batch", 64,
        "--max-steps", plan.options.steps, "--warmup-steps", 4, "--epochs", 10_000,
        "--telemetry-interval", 0.25, "--transport", "gloo", "--local-strategy", "processes",
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
        lab.shape(None if side == "clean" else f"{round(400 - 200 * plan.strength)}mbit")
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
nodes = 2
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[telemetry]
interval_s = 0.25
"""

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


class Skipped(Exception):  # noqa: N818  (a reason, not an error)
    """A case that is not possible on this machine."""


def main() -> None:
    options = arguments()
    until = time.monotonic() + options.limit_s
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = synthesised(Path(folder))
        for number in range(options.rounds):
            plan = Plan(options=options, data=data, strength=number / max(1, options.rounds - 1))
            for case in CASES:
                if case.name in (options.only or [case.name]):
                    if time.monotonic() > until:
                        found.append({"case": case.name, "skipped": "--limit-s was reached"})
                        continue
                    place = Path(folder, f"{number}-{case.name.replace(' ', '-')}")
                    place.mkdir()
                    found.append({"round": number, **one_case(case, plan, place)})
                    print(summary(found[-1]), file=sys.stderr)
    write_results(options.out, "seeded_causes", conclude(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--rounds", type=int, default=2, help="strengths of each disturbance")
    parser.add_argument("--repeats", type=int, default=2, help="disturbed trials of a case")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--limit-s", type=float, default=1200, help="start no case after this time")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--folder", type=Path, help="on the disk for the cold page cache")
    return parser.parse_args()


def synthesised(folder: Path) -> Path:
    images, dataset = folder / "images", folder / "data"
    for words in (
        ["synth", images, "--preset", "tiny", "--images", 256],
        ["ingest", images, dataset],
    ):
        subprocess.run(
            [sys.executable, "-m", "paceline.cli", "data", *map(str, words)],
            check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S,
        )  # fmt: skip
    return dataset


def one_case(case: Case, plan: Plan, place: Path) -> dict[str, Any]:
    """Run a case: twice as many clean trials as disturbed ones, interleaved."""
    repeats = plan.options.repeats
    try:
        for repeat in range(repeats):
            case.run(plan, "clean", place / "clean", repeat)
            case.run(plan, "seeded", place / "seeded", repeat)
            case.run(plan, "clean", place / "again", repeat)
    except (Skipped, PermissionError, FileNotFoundError) as reason:
        return {"case": case.name, "skipped": str(reason)}
    sides = {
        name: ExplainedTrials(name, load_run(RunFiles(place / name)))
        for name in ("clean", "seeded", "again")
    }
    seeded = explain(sides["clean"], sides["seeded"], {})
    equal = explain(sides["clean"], sides["again"], {})
    first = seeded.causes[0] if seeded.causes else None
    is_right = first is not None and seeded.slower == "seeded" and first.name in case.expected
    return {
        "case": case.name,
        "expected": sorted(case.expected),
        "named": [cause.name for cause in seeded.causes],
        "is_right": is_right,
        "share": None if first is None else first.share,
        "slowdown": seeded.difference.slower_s / seeded.difference.faster_s,
        "sum_error": sum_error(seeded),
        "named_without_disturbance": [cause.name for cause in equal.causes],
        "explanation": jsonable(seeded.to_json()),
        "equal": jsonable(equal.to_json()),
    }


def sum_error(found: Explanation) -> float:
    """Return the remainder as a share of the difference."""
    remainder = found.difference.part("remainder").difference_s.mean
    return abs(remainder / found.difference.difference_s.mean)


def conclude(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [each for each in found if "skipped" not in each]
    errors = [abs(each["share"] - 1) for each in done if each["is_right"]]
    return {
        "cases": len(done),
        "right_cause_first": sum(each["is_right"] for each in done),
        "share_within_15_percent": sum(error <= ALLOWED_SHARE_ERROR for error in errors),
        "largest_share_error": max(errors, default=None),
        "equal_pairs": len(done),
        "equal_pairs_without_cause": sum(not e["named_without_disturbance"] for e in done),
        "largest_sum_error": max((each["sum_error"] for each in done), default=None),
        "raw": list(found),
    }


def summary(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"{found['case']}: skipped: {found['skipped']}"
    share = "-" if found["share"] is None else f"{found['share']:.2f}"
    return (
        f"{found['case']}: {'right' if found['is_right'] else 'WRONG'}, named {found['named']}, "
        f"share {share}, {found['slowdown']:.2f} times as slow, without disturbance "
        f"{found['named_without_disturbance'] or 'nothing'}"
    )


@contextmanager
def control_group(controller: str) -> Iterator[tuple[Path, Path]]:
    """Make a control group of version 1; yields the file of its tasks, and its folder."""
    root = CGROUP / controller
    if not (root / "tasks").exists():
        raise Skipped(f"needs control groups of version 1 with {controller}")
    group = root / f"paceline-seeded-{os.getpid()}"
    group.mkdir()
    try:
        yield group / "tasks", group
    finally:
        for _ in range(50):  # until the processes that ended have left it
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                break


def entering(tasks: Path) -> tuple[str, ...]:
    """Return the words that start a command within a control group."""
    return ("sh", "-c", f'echo $$ > {tasks} && exec "$0" "$@"')


@contextmanager
def beside(program: str | None, core: int, *arguments: str) -> Iterator[None]:
    """Run a Python program on one core meanwhile; None runs nothing."""
    with ExitStack() as stack:
        if program is not None:
            argv = ["taskset", "-c", str(core), sys.executable, "-c", program, *arguments]
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
