"""Cost of checkpoints: training speed with and without them, and the delay of a step.

    python checkpoint_cost.py --out results/raw/checkpoint_cost.json [--every-steps 80]
        [--steps 240] [--repeats 3] [--workload simple-big] [--images 256] [--batch 64]

AlexNet 224x224 on two one-thread ranks in shared memory, with and without checkpoints, interleaved.
A checkpoint has 456 MB: weights and momentum. Within each training with checkpoints, the median of
the steps in which one was copied or written is compared with that of the others, so neither a drift
of the machine nor single slow steps decide. The largest share of a step in which a copy stops the
training stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import median_interval, paired_ratio, shown, write_results
from paceline.base.host.machine import default_cache_dir
from paceline.measure.records.rows import CheckpointRow, StepRow
from paceline.measure.records.tables import rows
from paceline.plan.spec.loading import parse_spec
from paceline.plan.spec.values import CheckpointSettings
from paceline.plan.trials.planning import plan_trials
from paceline.train.data.catalogue import ensure_dataset
from training_ways import trained

if TYPE_CHECKING:
    from paceline.measure.records.layout import TrialFiles
    from paceline.plan.trials.trial import Trial

SPEC = """
schema = 2
name = "checkpoint-cost"
repeats = 1
[training]
max_steps = {steps}
epochs = 100000
warmup_steps = 5
global_batch = {batch}
[[workloads]]
name = "{workload}"
samples = {images}
[limits]
trial_s = 3600
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "local"
transport = "shared"
local_strategy = "processes"
ranks_per_node = 2
"""


def planned(text: str, workload: str, images: int) -> Trial:
    """Return the trial of the processes."""
    cache = default_cache_dir()
    dataset = ensure_dataset(workload, images=images, seed=1, cache_dir=cache)
    trials = plan_trials(parse_spec(text, "benchmark"), {workload: str(dataset)}, 2)
    trial = next(t for t in trials if not t.is_baseline)
    return trial.model_copy(update={"save_tensors": False})


def steps_of(files: TrialFiles) -> list[StepRow]:
    """Return the steady steps of rank 0."""
    return list(rows(files.rank(0).steps, StepRow))[5:]


def costs(files: TrialFiles) -> dict[str, Any]:
    """Return what the checkpoints of a training cost."""
    steps = steps_of(files)
    by_rank = [rows(files.rank(rank).checkpoints, CheckpointRow) for rank in range(2)]
    written = [row for each in by_rank for row in each if row.error is None]
    busy: list[float] = []
    quiet: list[float] = []
    for step in steps:
        ended = step.started_unix_s + step.step_s
        meanwhile = any(
            row.started_unix_s <= ended and row.ended_unix_s >= step.started_unix_s
            for row in written
        )
        (busy if meanwhile else quiet).append(step.step_s)
    usual_s, busy_s = statistics.median(quiet), statistics.median(busy or quiet)
    total_s = sum(step.step_s for step in steps)
    blocked_s = [row.blocked_s for row in written]
    return {
        "checkpoints": len(by_rank[0]),
        "bytes": sum(each[-1].written_bytes or 0 for each in by_rank if each),
        "blocked_s": blocked_s,
        "write_s": [row.ended_unix_s - row.started_unix_s for row in written],
        "usual_step_s": usual_s,
        "busy_steps_s": busy,
        "quiet_steps_s": quiet,
        "share": (busy_s - usual_s) * len(busy) / total_s,
        "delay_of_writing": busy_s / usual_s - 1,
        "delay_of_copying": max(blocked_s, default=0.0) / usual_s,
        "mean_step_s": total_s / len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every-steps", type=int, default=80)  # about a minute
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", default="simple-big")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    asked = parser.parse_args()
    text = SPEC.format(
        steps=asked.steps, workload=asked.workload, images=asked.images, batch=asked.batch
    )
    plain = planned(text, asked.workload, asked.images)
    settings = CheckpointSettings(every_steps=asked.every_steps)
    with_checkpoints = plain.model_copy(update={"checkpoint": settings})
    found, without_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(asked.repeats):
            without = trained(plain, Path(folder) / f"without-{repeat}")
            without_s.append(statistics.fmean(s.step_s for s in steps_of(without)))
            found.append(costs(trained(with_checkpoints, Path(folder) / f"with-{repeat}")))
    ratio = paired_ratio(without_s, [each["mean_step_s"] for each in found])
    share = median_interval([each["share"] for each in found])
    delays = {
        f"delay of a step by {what}": median_interval([each[f"delay_of_{what}"] for each in found])
        for what in ("copying", "writing")
    }
    shown("speed with checkpoints against without", ratio)
    shown("share of the time", share)
    for what, delay in delays.items():
        shown(what, delay)
    results = {"with": found, "without_mean_step_s": without_s, "every_steps": asked.every_steps}
    write_results(
        asked.out,
        "checkpoint_cost",
        {**results, "speed_ratio": ratio, "share": share, "delays": delays},
    )


if __name__ == "__main__":
    main()
