"""Held-out predictions: calibrate, write predictions to a file, then measure what was predicted.

    python predictions.py --out results/predictions.json --runs runs/predictions    # needs root

The hosts are network namespaces of this machine with a core each (`paceline lab`). Calibration: one
host with several shares of the batch, and two hosts at full speed. Predicted and then measured: two
hosts at shaped links, and other global batches. `RUNS/predictions.json` is written before the first
of these trials starts; a run that is there is not repeated. With both workloads about 20 minutes.

Error: predicted over measured step, minus 1. Coverage: measured medians within the predicted 90 %
interval. Targets: median error at most 5 %, 90th percentile at most 12 %, coverage 85 to 97 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
TARGETS = {"median_error": 0.05, "error_90": 0.12, "coverage": [0.85, 0.97]}


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    image_size: int
    batches: tuple[int, ...]  # of one host, to calibrate; the halves of predicted batches are among
    predicted: tuple[int, ...]  # global batches on two hosts
    steps: int


WORKLOADS = {
    "tiny": Workload(
        name="tiny", image_size=128, batches=(64, 32, 16), predicted=(64, 32), steps=24
    ),
    "alexnet": Workload(
        name="simple-big", image_size=224, batches=(64, 32, 16), predicted=(64, 32), steps=8
    ),
}


def main() -> None:
    options = arguments()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"predictions.py: {reason}")
    points: list[dict[str, Any]] = []
    with Lab(LabSettings(hosts=2, cores=1), name="predictions") as lab:
        for name in options.workloads:
            points += one_workload(lab, name, options)
    errors = np.array([abs(point["error"]) for point in points])
    summary = {
        "points": len(points),
        "median_error": float(np.median(errors)),
        "error_90": float(np.quantile(errors, 0.9)),
        "coverage": float(np.mean([point["covered"] for point in points])),
    }
    print(summary)
    write_results(options.out, "predictions", {"targets": TARGETS, **summary, "raw": points})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--speeds", nargs="+", default=["1gbit", "100mbit"], metavar="RATE")
    parser.add_argument("--transports", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--factors", choices=("never", "auto", "always"), default="never")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1800, help="of one run")
    return parser.parse_args()


def one_workload(lab: Lab, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    workload, root = WORKLOADS[name], options.runs.resolve() / name
    lab.shape(None)
    calibration: list[TrialRecord] = []
    for batch in workload.batches:
        two = options.transports if batch == workload.batches[0] else []
        calibration += measured(lab, workload, root / f"calibration-{batch}", batch, two, options)
    written = root / "predictions.json"
    if not written.exists():
        write_json(written, jsonable(predictions(workload, calibration, options)))
    points = []
    for point in read_json(written)["points"]:
        lab.shape(point["link"])
        folder = root / f"measured-{point['link']}-{point['global_batch']}"
        measured(lab, workload, folder, point["global_batch"], options.transports, options)
        rows = compare_run(RunFiles(folder / "run")).rows
        row = next(r for r in rows if r.nodes == 2 and r.transport == point["transport"])
        assert row.step_s is not None, "the run has ended well"
        predicted, truth = point["step_s"], row.step_s.median
        points.append(
            {
                "workload": name,
                **point,
                "measured_s": jsonable(row.step_s),
                "error": predicted["median"] / truth - 1,
                "covered": predicted["low"] <= truth <= predicted["high"],
            }
        )
        print(
            f"{name} {point['transport']} {point['link']} {point['global_batch']}: "
            f"{predicted['median']:.3f} s predicted, {truth:.3f} s measured",
            file=sys.stderr,
        )
    return points


def predictions(
    workload: Workload, records: list[TrialRecord], options: argparse.Namespace
) -> dict[str, Any]:
    """Predict two hosts at every speed, batch and transport."""
    points = []
    for link in options.speeds:
        for batch in workload.predicted:
            request = Request(
                nodes=(2,),
                link=given_link(bits_per_s(link)),
                transports=tuple(options.transports),
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
    lab: Lab,
    workload: Workload,
    folder: Path,
    batch: int,
    transports: list[str],
    options: argparse.Namespace,
) -> list[TrialRecord]:
    """Run one host, and two hosts with each transport, at the present speed of the links."""
    run = folder / "run"
    if not RunFiles(run).report.exists():
        folder.mkdir(parents=True, exist_ok=True)
        trials = [TWO_HOSTS.format(transport=t, factors=options.factors) for t in transports]
        (folder / "spec.toml").write_text(
            SPEC.format(
                name=folder.name,
                repeats=options.repeats,
                workload=workload.name,
                image_size=workload.image_size,
                batch=batch,
                steps=workload.steps,
                trials="".join(trials),
                interface=INTERFACE,
                hostfile=lab.hostfile,
            )
        )
        words = [sys.executable, "-m", "paceline.cli", "run", folder / "spec.toml", "--out", run]
        with (folder / "table.txt").open("w") as table:
            command = lab.hosts[0].command(*words)
            status = subprocess.run(
                command, stdout=table, check=False, timeout=options.limit_s
            ).returncode
        if status:
            raise SystemExit(f"predictions.py: {folder} ended with {status}")
    return load_run(RunFiles(run))


if __name__ == "__main__":
    main()
