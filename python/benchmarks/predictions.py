"""Held-out predictions: calibrate, write predictions to a file, then measure what was predicted.

    python predictions.py --out results/predictions.json --runs runs/predictions    # needs root

The hosts are network namespaces of this machine with a core each (`paceline lab`). Calibration: one
host with several shares of the batch, and two hosts at full speed. Predicted and then measured: two
hosts at shaped links, and other global batches. `RUNS/…/predictions.json` is written before the
first of these trials starts; a run that is there is not repeated. With everything half an hour.

Error: predicted over measured step, minus 1. Coverage: measured medians within the predicted 90 %
interval. Targets: median error at most 5 %, 90th percentile at most 12 %, coverage 85 to 97 %.

Choices: at each link and batch, configurations are one host, and two hosts with each transport. One
or both of the latter are held out. The first choice is the fastest, as measured or as predicted.
Loss: its measured step over that of the fastest, minus 1. Target: at most 3 % in 95 % of cases.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import write_results
from paceline.analysis.compare import compare_run
from paceline.analysis.predict.link import given_link
from paceline.analysis.predict.predict import predict
from paceline.analysis.predict.prediction import Prediction, Request
from paceline.analysis.reading import TrialRecord, load_run
from paceline.lab import INTERFACE, Lab, LabSettings, why_not
from paceline.records.files import jsonable, read_json, write_json
from paceline.records.layout import RunFiles
from paceline.spec.rates import bits_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = """
schema = 2
name = "{name}"
seed = 1
repeats = {repeats}
[[workloads]]
name = "{workload}"
samples = 256
image_size = {image_size}
global_batch = {batch}
max_steps = {steps}
epochs = {steps}
warmup_steps = 2
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trials}
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[telemetry]
interval_s = 0.5
[limits]
trial_s = 900
rendezvous_s = 120
collective_s = 300
"""
TWO_HOSTS = """[[trials]]
launcher = "mpi"
transport = "{transport}"
sufficient_factors = "{factors}"
local_strategy = "sequential"
nodes = 2
"""
TARGETS = {
    "median_error": 0.05,
    "error_90": 0.12,
    "coverage": [0.85, 0.97],
    "choices_within_3_percent": 0.95,
}
TRANSPORTS = ("gloo", "mpi")
FACTORS = ("never", "always")


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    image_size: int
    batches: tuple[int, ...]  # of one host, to calibrate; the halves of predicted batches are among
    predicted: tuple[int, ...]  # global batches on two hosts
    steps: int
    speeds: dict[str, tuple[str, ...]]  # of the links, by `sufficient_factors`


# Without factors a step of AlexNet sends 228 MB, which take 18 s at 100 Mbit/s; VGG16's 0.5 GB.
WORKLOADS = {
    "tiny": Workload(
        name="tiny",
        image_size=128,
        batches=(64, 32, 16),
        predicted=(64, 32),
        steps=24,
        speeds={"never": ("1gbit", "100mbit"), "always": ("1gbit", "100mbit")},
    ),
    "alexnet": Workload(
        name="simple-big",
        image_size=224,
        batches=(64, 32, 16),
        predicted=(64, 32),
        steps=8,
        speeds={"never": ("1gbit",), "always": ("1gbit", "100mbit")},
    ),
    "vgg16": Workload(
        name="complex-small",
        image_size=64,
        batches=(16, 8, 4),
        predicted=(16, 8),
        steps=8,
        speeds={"never": (), "always": ("1gbit", "100mbit")},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Predictions from one calibration, and where its runs are."""

    workload: Workload
    factors: str
    root: Path
    repeats: int
    limit_s: float


def main() -> None:
    options = arguments()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"predictions.py: {reason}")
    points: list[dict[str, Any]] = []
    with Lab(LabSettings(hosts=2, cores=1), name="predictions") as lab:
        for factors in options.factors:
            for name in options.workloads:
                case = Case(
                    workload=WORKLOADS[name],
                    factors=factors,
                    root=options.runs.resolve() / f"{name}-{factors}",
                    repeats=options.repeats,
                    limit_s=options.limit_s,
                )
                if case.workload.speeds[factors]:
                    points += measured_points(lab, case)
    found = [loss for place in places(points) for loss in losses(place)]
    errors = np.array([abs(point["error"]) for point in points])
    summary = {
        "points": len(points),
        "median_error": float(np.median(errors)),
        "error_90": float(np.quantile(errors, 0.9)),
        "coverage": float(np.mean([point["covered"] for point in points])),
        "choices": len(found),
        "choices_within_3_percent": float(np.mean([loss <= 0.03 for loss in found])),
        "largest_loss_of_a_choice": max(found),
    }
    print(summary)
    write_results(options.out, "predictions", {"targets": TARGETS, **summary, "raw": points})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--factors", nargs="+", choices=FACTORS, default=list(FACTORS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1800, help="of one run")
    return parser.parse_args()


def places(points: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the points of one run: they differ in the transport."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for point in points:
        key = (point["case"], point["link"], point["global_batch"])
        found.setdefault(key, []).append(point)
    return list(found.values())


def losses(place: list[dict[str, Any]]) -> list[float]:
    """Return the loss of the first choice for each way to hold out some configurations."""
    truth = {"one host": place[0]["one_host_s"]}
    truth |= {point["transport"]: point["measured_s"]["median"] for point in place}
    predicted = {point["transport"]: point["step_s"]["median"] for point in place}
    found = []
    for held_out in (("gloo",), ("mpi",), ("gloo", "mpi")):
        known = truth | {name: predicted[name] for name in held_out}
        first = min(known, key=lambda name: known[name])
        found.append(truth[first] / min(truth.values()) - 1)
    return found


def measured_points(lab: Lab, case: Case) -> list[dict[str, Any]]:
    """Calibrate, predict, and measure what was predicted."""
    lab.shape(None)
    calibration: list[TrialRecord] = []
    for batch in case.workload.batches:
        two = TRANSPORTS if batch == case.workload.batches[0] else ()
        calibration += measured(lab, case, case.root / f"calibration-{batch}", batch, two)
    written = case.root / "predictions.json"
    if not written.exists():
        write_json(written, jsonable(predictions(case, calibration)))
    points = []
    for point in read_json(written)["points"]:
        lab.shape(point["link"])
        folder = case.root / f"measured-{point['link']}-{point['global_batch']}"
        measured(lab, case, folder, point["global_batch"], TRANSPORTS)
        rows = compare_run(RunFiles(folder / "run")).rows
        seconds = {row.transport if row.nodes == 2 else "one host": row.step_s for row in rows}
        found, one_host = seconds[point["transport"]], seconds["one host"]
        assert found is not None and one_host is not None, "the run has ended well"  # noqa: PT018
        predicted, truth = point["step_s"], found.median
        points.append(
            {
                "case": case.root.name,
                **point,
                "measured_s": jsonable(found),
                "one_host_s": one_host.median,
                "error": predicted["median"] / truth - 1,
                "covered": predicted["low"] <= truth <= predicted["high"],
            }
        )
        print(
            f"{case.root.name} {point['transport']} {point['link']} {point['global_batch']}: "
            f"{predicted['median']:.3f} s predicted, {truth:.3f} s measured",
            file=sys.stderr,
        )
    return points


def predictions(case: Case, records: list[TrialRecord]) -> dict[str, Any]:
    """Predict two hosts at every speed, batch and transport."""
    points = []
    for link in case.workload.speeds[case.factors]:
        for batch in case.workload.predicted:
            request = Request(
                nodes=(2,),
                link=given_link(bits_per_s(link)),
                transports=TRANSPORTS,
                global_batch=batch,
            )
            found = predict(records, request)
            if not found.predictions:
                raise SystemExit(f"predictions.py: refused: {jsonable(found.refusals)}")
            points += [{"link": link, **entry(each)} for each in found.predictions]
    return {"points": points}


def entry(prediction: Prediction) -> dict[str, Any]:
    values: dict[str, Any] = jsonable(prediction)
    return values


def measured(
    lab: Lab, case: Case, folder: Path, batch: int, transports: Sequence[str]
) -> list[TrialRecord]:
    """Run one host, and two hosts with each transport, at the present speed of the links."""
    run = folder / "run"
    if not RunFiles(run).report.exists():
        folder.mkdir(parents=True, exist_ok=True)
        trials = [TWO_HOSTS.format(transport=t, factors=case.factors) for t in transports]
        (folder / "spec.toml").write_text(
            SPEC.format(
                name=folder.name,
                repeats=case.repeats,
                workload=case.workload.name,
                image_size=case.workload.image_size,
                batch=batch,
                steps=case.workload.steps,
                trials="".join(trials),
                interface=INTERFACE,
                hostfile=lab.hostfile,
            )
        )
        words = [sys.executable, "-m", "paceline.cli", "run", folder / "spec.toml", "--out", run]
        with (folder / "table.txt").open("w") as table:
            command = lab.hosts[0].command(*words)
            status = subprocess.run(
                command, stdout=table, check=False, timeout=case.limit_s
            ).returncode
        if status:
            raise SystemExit(f"predictions.py: {folder} ended with {status}")
    return load_run(RunFiles(run))


if __name__ == "__main__":
    main()
