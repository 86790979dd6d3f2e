"""A rank slowed on purpose: is it named, and is its loss what was put in?

    python straggler.py --data DATASET --out results/raw/straggler.json [--repeats 3] [--steps 40]

Two one-thread ranks under mpirun, one of which spins for 50 ms (slowed_rank.py), and the same
without, interleaved; every transport, either rank. DATASET: of `paceline data ingest`.

Where every step is slowed, the profile must name the rank. What it says the rank lost is the 50 ms
and whatever else made the rank late or early: no two cores are equally fast for long. So in other
runs every second step is slowed, and how much later the rank is in those than in their neighbours
is the loss that was put in, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import call, median_interval, shown, write_results
from mpi_job import AS_ROOT, mpirun
from one_trial import one_trial
from paceline.analysis.trial.communication import trial_communication
from paceline.analysis.trial.reading import load_run
from paceline.analysis.trial.steps import read_steps
from paceline.analysis.trial.stragglers import ready_times
from paceline.measure.records.files import jsonable
from paceline.measure.records.layout import RunFiles

if TYPE_CHECKING:
    from paceline.analysis.trial.reading import TrialRecord

RANKS = 2
WARMUP = 5
ALLOWED = 0.1  # of the loss that was put in
ALLOWED_SUM = 0.02  # of a step
# (the rank that is slowed, in every how manyth step)
CASES = ((None, 1), (0, 1), (1, 1), (0, 2), (1, 2))
LIMIT_S = 900.0
HERE = Path(__file__).resolve().parent
JOB = HERE.parents[1] / "mpi-jobs" / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="after the warm-up")
    parser.add_argument("--slow-ms", type=float, default=50.0)
    parser.add_argument("--transports", nargs="+", default=["mpi", "gloo", "shared"])
    parser.add_argument("--workload", default="simple-big")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument(
        "--bucket-mb", type=float, default=25.0,
        help="one that holds all gradients leaves nothing to reduce beside the backward pass",
    )  # fmt: skip
    arguments = parser.parse_args()

    raw = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat, transport, (slowed, every) in itertools.product(
            range(arguments.repeats), arguments.transports, CASES
        ):
            place = Path(folder, f"{repeat}-{transport}-{slowed}-{every}")
            raw.append({"repeat": repeat, **measure(arguments, transport, slowed, every, place)})
            print(raw[-1], file=sys.stderr)
    write_results(arguments.out, "straggler", conclude(raw, arguments.slow_ms / 1000))


def measure(
    arguments: argparse.Namespace, transport: str, slowed: int | None, every: int, place: Path
) -> dict[str, Any]:
    """One run; slowed: the rank that spins, None for nobody; every: in which steps it does."""
    seconds = 0.0 if slowed is None else arguments.slow_ms / 1000
    workload = {
        "name": arguments.workload,
        "data": str(arguments.data.resolve()),
        "image_size": arguments.image_size,
        "global_batch": arguments.global_batch,
        "max_steps": WARMUP + arguments.steps,
        "warmup_steps": WARMUP,
        "epochs": 1000,
    }
    trial = {
        "launcher": "mpi",
        "local_strategy": "processes",
        "transport": transport,
        "ranks_per_node": RANKS,
        "bucket_mb": arguments.bucket_mb,
    }
    words = one_trial(place.with_suffix(".toml"), workload, trial, telemetry={"enabled": False})
    argv = [
        mpirun(), "-n", RANKS, "--bind-to", "none",
        "--host", f"localhost:{RANKS}", sys.executable,
        HERE / "slowed_rank.py", slowed or 0, seconds, every, JOB, *words,
        "--out", place,
    ]  # fmt: skip
    call(list(map(str, argv)), {**os.environ, **AS_ROOT}, LIMIT_S, place.with_suffix(".log"))
    (record,) = load_run(RunFiles(place))
    profile = trial_communication(record)
    assert profile is not None, "two ranks communicate"
    (found,) = profile.stragglers
    return {
        "transport": transport,
        "slowed": slowed,
        "every": every,
        "later_s": None if slowed is None or every == 1 else later_s(record, slowed, every),
        "named": found.straggler,
        "reason": found.reason,
        "delay_s": {each.rank: jsonable(each.delay_s) for each in found.ranks},
        "last_share": {each.rank: each.last_share for each in found.ranks},
        "phase": found.phase,
        "phase_excess_s": found.phase_excess_s,
        "step_s": max(rank.step_s for rank in profile.ranks),
        "checks": jsonable(profile.checks),
    }


def later_s(record: TrialRecord, slowed: int, every: int) -> list[float]:
    """By how much more the slowed rank was behind the other in a slowed step than in the mean of
    the steps before and after it; one for each slowed step that has both neighbours."""
    ready, steps, _ = ready_times(read_steps(record), record.ranks)
    others = np.delete(ready, slowed, axis=0).max(axis=0)
    behind = dict(zip(steps, ready[slowed] - others, strict=True))
    return [
        float(behind[step] - (behind[step - 1] + behind[step + 1]) / 2)
        for step in steps
        if step % every == every - 1 and step - 1 in behind and step + 1 in behind
    ]


def conclude(raw: list[dict[str, Any]], slow_s: float) -> dict[str, Any]:
    """Who was named, and the loss that was found over the one that was put in, by transport."""
    conclusions = {}
    for transport in dict.fromkeys(run["transport"] for run in raw):
        runs = [run for run in raw if run["transport"] == transport]
        slowed = [run for run in runs if run["slowed"] is not None and run["every"] == 1]
        every_other = [run["later_s"] for run in runs if run["later_s"] is not None]
        found = median_interval([later / slow_s for run in every_other for later in run])
        shown(f"{transport}: later in slowed steps over {1000 * slow_s:g} ms", found)
        ratio = median_interval([run["delay_s"][run["slowed"]]["mean"] / slow_s for run in slowed])
        shown(f"{transport}: loss named over {1000 * slow_s:g} ms", ratio)
        plain = {run["repeat"]: run["step_s"] for run in runs if run["slowed"] is None}
        longer = median_interval([(r["step_s"] - plain[r["repeat"]]) / slow_s for r in slowed])
        shown(f"{transport}: step longer over {1000 * slow_s:g} ms", longer)
        sums = [abs(check["difference"]) for run in runs for check in run["checks"]]
        conclusions[transport] = {
            "named_right": sum(run["named"] == run["slowed"] for run in slowed),
            "of": len(slowed),
            "named_where_nobody_was_slowed": sum(
                run["named"] is not None for run in runs if run["slowed"] is None
            ),
            "put_in_found_ratio": found,  # from neighbouring steps of one run
            "loss_ratio": ratio,  # with what else made the rank late
            "step_longer_ratio": longer,  # what the busy loop really cost, the other runs aside
            "within_a_tenth": abs(found["median"] - 1) <= ALLOWED,
            "largest_difference_of_sums": max(sums),
            "sums_within_2_percent": max(sums) <= ALLOWED_SUM,
        }
    return {"slow_s": slow_s, "raw": raw, "conclusions": conclusions}


if __name__ == "__main__":
    main()
