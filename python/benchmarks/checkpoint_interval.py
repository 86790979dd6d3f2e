"""Time lost to checkpoints and failures over the interval between checkpoints, and Daly's formula.

    python checkpoint_interval.py --out results/raw/checkpoint_interval.json [--mtbf-s 2]
        [--work-s 10] [--rounds 2] [--first-round 1] [--factors 0.25 0.5 1 2 4 8]

Each training is a fork of this process, which has imported torch. It is killed at random times
with a known mean, whatever it does, and continues from its newest checkpoint until its last step is
done. All intervals of a round have the same failures.

All times are CPU times of the training's process, so that other programs on the machine change them
little. It has one core. The thread that writes has the same priority as the training here, not the
lowest one; otherwise it would need many times its CPU time beside it. What a step, a checkpoint and
a start take is fitted to all attempts by least squares. The loss of a training is the sum of its
checkpoints, starts and repeated steps with these times. Replayed: a computation with the fitted
times and random failures, also where Daly's formula is less exact.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import forked, write_results
from paceline.host.machine import host_name
from paceline.plan.planning import plan_trials
from paceline.plan.rank_context import RankContext
from paceline.rank import checkpoints
from paceline.rank import train as rank
from paceline.rank.checkpoint_times import daly_interval_s
from paceline.records.attempts import begin_attempt
from paceline.records.checkpoints import CheckpointFolder
from paceline.records.files import read_jsonl, write_json
from paceline.records.layout import TrialFiles
from paceline.spec.loading import parse_spec
from paceline.spec.tables import CheckpointSettings
from paceline.training.resources import apply_resources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

SPEC = """
schema = 2
name = "checkpoint-interval"
repeats = 1
[training]
max_steps = {steps}
epochs = 1000000
warmup_steps = 0
global_batch = 16
[[workloads]]
name = "wide"
task = "{task}:Wide"
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""
TASK = Path(__file__).with_name("tasks.py")
PROBE_STEPS, PROBE_EVERY, FEWEST_STEPS = 100, 20, 100
NEVER = 10**9
LIMIT_S = 1800.0
POLL_S = 0.002
REPLAYS = 400
REPLAYED_FACTORS = [2 ** (power / 2) for power in range(-8, 7)]
_CPU_CLOCK = 2  # of a process, clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a training, until its kill or its end."""

    cpu_s: float
    steps: int  # that it did
    repeated: int  # of these, after the last checkpoint: the next attempt does them again
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training from its first start to its end."""

    factor: float  # of the formula's interval; 0 without failures
    every_steps: int
    steps: int
    attempts: list[Attempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU seconds of one each."""

    step_s: float
    checkpoint_s: float
    start_s: float

    def lost_share(self, run: Run) -> float:
        """Return the lost time of a training over that of its steps."""
        starts = len(run.attempts) - 1
        written = sum(attempt.checkpoints for attempt in run.attempts)
        repeated = sum(attempt.repeated for attempt in run.attempts)
        lost_s = self.checkpoint_s * written + self.start_s * starts + self.step_s * repeated
        return lost_s / (self.step_s * run.steps)


def planned(steps: int, every_steps: int) -> Trial:
    text = SPEC.format(steps=steps, task=TASK)
    trial = plan_trials(parse_spec(text, "benchmark"), {}, 1)[0]
    settings = CheckpointSettings(every_steps=every_steps)
    return trial.model_copy(update={"checkpoint": settings, "save_tensors": False})


def start(trial: Trial, files: TrialFiles) -> int:
    """Start an attempt in a fork; return its process id."""

    def train() -> None:
        checkpoints._LOWEST_PRIORITY = os.nice(0)  # noqa: SLF001  (see above)
        own = files.rank(0)
        begin_attempt(own)
        write_json(own.status, {"state": "running"})
        place = RankContext(
            rank=0, world_size=1, local_rank=0, ranks_on_node=1, node_index=0, host=host_name(),
            process_started_unix_s=time.time(),
        )  # fmt: skip
        apply_resources(place, trial)
        rank.train(trial, place, files)

    return forked(train)


def attempt_until(trial: Trial, files: TrialFiles, limit_cpu_s: float) -> tuple[Attempt, bool]:
    """Train until the end or until so much CPU time is used; return whether it has ended."""
    folder, own = CheckpointFolder(files.checkpoints), files.rank(0)
    before = _saved(folder)
    written = _rows(own.checkpoints)
    deadline_s = time.monotonic() + LIMIT_S
    child = start(trial, files)
    used_s, ended = 0.0, False
    while not ended and used_s < limit_cpu_s:
        assert time.monotonic() < deadline_s, f"not done within {LIMIT_S:g} s"
        time.sleep(POLL_S)
        used_s = time.clock_gettime((~child << 3) | _CPU_CLOCK)
        ended = _has_ended(child)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if ended and status:
        raise RuntimeError(f"a training ended with status {status}")
    has_restored = not own.interrupted.exists()
    done = _steps_done(files) if has_restored else before
    after = done if ended else _saved(folder)
    attempt = Attempt(
        cpu_s=usage.ru_utime + usage.ru_stime,
        steps=done - before,
        repeated=max(0, done - after),
        checkpoints=_rows(own.checkpoints) - written,
    )
    return attempt, ended


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _saved(folder: CheckpointFolder) -> int:
    complete = folder.complete()
    return complete[0].steps if complete else 0


def _rows(path: Path) -> int:
    return sum(1 for _ in read_jsonl(path)) if path.exists() else 0


def _steps_done(files: TrialFiles) -> int:
    path = files.rank(0).steps
    return max((row["step"] + 1 for row in read_jsonl(path)), default=0) if path.exists() else 0


def train(
    folder: Path, steps: int, every_steps: int, *, factor: float, mtbf_s: float, seed: int
) -> Run:
    """Train to the end with failures."""
    draw = random.Random(seed)  # noqa: S311  (repeatable, not secret)
    folder.mkdir(parents=True)
    trial, files = planned(steps, every_steps), TrialFiles(folder)
    attempts, ended = [], False
    while not ended:
        limit_cpu_s = math.inf if math.isinf(mtbf_s) else draw.expovariate(1 / mtbf_s)
        attempt, ended = attempt_until(trial, files, limit_cpu_s)
        attempts.append(attempt)
    print(f"{folder.name}: {every_steps} steps, {len(attempts) - 1} failures", flush=True)
    return Run(factor=factor, every_steps=every_steps, steps=steps, attempts=attempts)


def fitted(runs: Sequence[Run]) -> Costs:
    """Return the costs with which all attempts agree best."""
    attempts = [attempt for run in runs for attempt in run.attempts]
    counts = np.array([[a.steps, a.checkpoints, 1] for a in attempts], dtype=float)
    used_s = np.array([a.cpu_s for a in attempts])
    step_s, checkpoint_s, start_s = np.linalg.lstsq(counts, used_s, rcond=None)[0]
    return Costs(step_s=step_s, checkpoint_s=checkpoint_s, start_s=start_s)


def replay(interval_s: float, costs: Costs, work_s: float, mtbf_s: float, seed: int) -> float:
    """Return the lost share of a training that is computed.

    A checkpoint counts when it is written: during the next interval, at half of the speed.
    """
    draw = random.Random(seed)  # noqa: S311  (repeatable, not secret)
    now = done = saved = 0.0
    waiting: tuple[float, float] | None = None  # checkpoint that is being written: work, ready
    failure = draw.expovariate(1 / mtbf_s)
    while done < work_s:
        share = min(interval_s, work_s - done)
        ended_s = now + share + costs.checkpoint_s
        if waiting is not None and waiting[1] <= min(failure, ended_s):
            saved, waiting = waiting[0], None
        if failure < ended_s:
            now, done, waiting = failure, saved, None
            failure += draw.expovariate(1 / mtbf_s)
            while failure < now + costs.start_s:  # it fails again before its first step
                now, failure = failure, failure + draw.expovariate(1 / mtbf_s)
            now += costs.start_s
            continue
        now, done = ended_s, done + share
        waiting = (done, now + costs.checkpoint_s)
    return now / work_s - 1


def expected_time_s(
    work_s: float, interval_s: float, *, cost_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return the expected time of a training with failures, Daly's equation 20.

    work_s: its time without failures and checkpoints. restart_s: from a failure to the first new
    step, without the repeated work.
    """
    segments = work_s / interval_s
    growth = math.expm1((interval_s + cost_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * growth * segments


def summary(runs: Sequence[Run], mtbf_s: float, work_s: float) -> dict[str, Any]:
    """Return the measured losses beside the formula and the replay, and print them."""
    costs = fitted(runs)
    best_s = daly_interval_s(costs.checkpoint_s, mtbf_s)

    def others(interval_s: float) -> dict[str, float]:
        by_formula = expected_time_s(
            1.0,
            interval_s,
            cost_s=costs.checkpoint_s,
            restart_s=costs.start_s,
            mtbf_s=mtbf_s,
        )
        again = partial(replay, interval_s, costs, work_s, mtbf_s)
        replayed = statistics.fmean(again(seed) for seed in range(REPLAYS))
        return {"interval_s": interval_s, "by_formula": by_formula - 1, "replayed": replayed}

    points = []
    for factor in dict.fromkeys(run.factor for run in runs if run.factor):
        own = [run for run in runs if run.factor == factor]
        lost = [costs.lost_share(run) for run in own]
        every_steps = statistics.fmean(run.every_steps for run in own)
        point = {
            "factor": factor,
            "every_steps": every_steps,
            "lost_share": statistics.fmean(lost),
            **others(every_steps * costs.step_s),
        }
        points.append({**point, "lost_shares": lost})
        print({name: round(value, 3) for name, value in point.items()})
    print({name: round(value, 4) for name, value in asdict(costs).items()}, f"best {best_s:.3f} s")
    return {
        "mtbf_s": mtbf_s,
        "costs": asdict(costs),
        "formula_interval_s": best_s,
        "points": points,
        "curve": [others(factor * best_s) for factor in REPLAYED_FACTORS],
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mtbf-s", type=float, default=2.0)
    parser.add_argument("--work-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first-round", type=int, default=1, help="seed of its failures")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4, 8])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        probes = [
            train(root / name, steps, every_steps, factor=0.0, mtbf_s=math.inf, seed=0)
            for name, steps, every_steps in (
                ("start", 1, NEVER),
                ("steps", PROBE_STEPS, NEVER),
                ("checkpoints", PROBE_STEPS, PROBE_EVERY),
            )
        ]
        first = fitted(probes)
        best_s = daly_interval_s(first.checkpoint_s, asked.mtbf_s)
        steps = max(FEWEST_STEPS, round(asked.work_s / first.step_s))
        print(first, f"formula {best_s:.2f} s, {steps} steps", flush=True)
        runs = []
        for seed in range(asked.first_round, asked.first_round + asked.rounds):
            for factor in asked.factors:
                every_steps = max(1, round(factor * best_s / first.step_s))
                name = f"round {seed} factor {factor:g}"
                runs.append(
                    train(
                        root / name,
                        steps,
                        every_steps,
                        factor=factor,
                        mtbf_s=asked.mtbf_s,
                        seed=seed,
                    )
                )
                found = summary([*probes, *runs], asked.mtbf_s, steps * first.step_s)
                write_results(asked.out, "checkpoint_interval", found)  # of the trainings so far


if __name__ == "__main__":
    main()
