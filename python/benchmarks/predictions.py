"""Held-out predictions: calibrate, write predictions to a file, then measure what was predicted.

    python predictions.py --out results/raw/predictions.json --runs runs/predictions    # needs root

The hosts are network namespaces of this machine (`paceline lab`). Calibration: one host with
several shares of the batch, and two hosts at full speed. Predicted and then measured, by scene:

links: two hosts at shaped links, and other global batches.
hosts: three and four hosts. They share the cores of the machine, so the computation of this
    scene and the next one is mostly sleeping (sleeping_task.py).
strategies: two hosts with local strategies that were measured on one host only.
new: two hosts at rates and with batches that the other scenes do not have.

`RUNS/…/predictions.json` is written before the first of these trials starts; a run that is there is
not repeated. Each scene takes half an hour with two repeats. prediction_intervals.py calibrates the
width of the intervals with the points of one scene, and tests it with those of the others.

Error: predicted over measured step, minus 1. Coverage: measured medians within the predicted 90 %
interval.

Choices: at each link and batch, configurations are one host, and several hosts with each strategy
and transport. Those of one transport, of one strategy, or all on several hosts are held out. The
first choice is the fastest, as measured or as predicted. Loss: its measured step over that of the
fastest, minus 1.
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
from lab import FULL
from paceline.analysis.compare.run import compare_run
from paceline.analysis.predict.exchange import given_link
from paceline.analysis.predict.predict import MODEL_ERROR, predict
from paceline.analysis.predict.prediction import Prediction, PredictionRequest
from paceline.analysis.trial.reading import TrialRecord, load_run
from paceline.measure.records.files import jsonable, read_json, write_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.values import bits_per_s
from paceline.runner.lab import INTERFACE, Lab, why_not
from prediction_scenes import (
    ONE_HOST,
    SCENES,
    SEVERAL_HOSTS,
    SPEC,
    Part,
    Scene,
    strategy_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSPORTS = ("gloo", "mpi")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A part of a scene, and where its runs are."""

    scene: Scene
    part: Part
    root: Path
    repeats: int
    limit_s: float


def main() -> None:
    options = arguments()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"predictions.py: {reason}")
    points: list[dict[str, Any]] = []
    for name in options.scenes:
        scene = SCENES[name]
        with Lab(scene.hosts, name=name) as lab:
            for part in scene.parts:
                if options.parts and part.name not in options.parts:
                    continue
                case = Case(
                    scene=scene,
                    part=part,
                    root=options.runs.resolve() / name / part.name,
                    repeats=options.repeats,
                    limit_s=options.limit_s,
                )
                points += [{"scene": name, **point} for point in measured_points(lab, case)]
    write_results(
        options.out,
        "predictions",
        {
            "model_error": MODEL_ERROR,
            **concluded(points),
            "scenes": {
                name: concluded([point for point in points if point["scene"] == name])
                for name in options.scenes
            },
            "raw": points,
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--parts", nargs="+", metavar="WORKLOAD-FACTORS", help="only these")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1800, help="of one run")
    return parser.parse_args()


def concluded(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return errors, coverage and choices."""
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
    return summary


def places(points: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the points of one run: they differ in the strategy and the transport."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for point in points:
        key = (point["scene"], point["case"], point["link"], point["global_batch"])
        found.setdefault(key, []).append(point)
    return list(found.values())


def losses(place: Sequence[dict[str, Any]]) -> list[float]:
    """Return the loss of the first choice for each way to hold out some configurations."""
    several = {(p["setup"], p["transport"]): p for p in place}
    truth: dict[Any, float] = {"one host": place[0]["one_host_s"]}
    truth |= {key: point["measured_s"]["median"] for key, point in several.items()}
    names = sorted({name for key in several for name in key})
    ways = [[key for key in several if name in key] for name in names]
    found = []
    for held_out in [*(way for way in ways if len(way) < len(several)), list(several)]:
        known = truth | {key: several[key]["step_s"]["median"] for key in held_out}
        first = min(known, key=lambda key: known[key])
        found.append(truth[first] / min(truth.values()) - 1)
    return found


def measured_points(lab: Lab, case: Case) -> list[dict[str, Any]]:
    """Calibrate, predict, and measure what was predicted."""
    lab.shape(None)
    calibration: list[TrialRecord] = []
    for batch in case.part.batches:
        trials = "".join(one_host(name) for name in case.scene.calibrated)
        if batch == case.part.batches[0]:
            trials += several_hosts(case, 2, [case.scene.between])
        calibration += measured(lab, case, f"calibration-{batch}", batch, trials)
    written = case.root / "predictions.json"
    if not written.exists():
        write_json(written, jsonable({"points": list(predictions(case, calibration))}))
    return [measured_point(lab, case, point) for point in read_json(written)["points"]]


def predictions(case: Case, records: list[TrialRecord]) -> Iterator[dict[str, Any]]:
    """Predict every link, number of hosts, batch, strategy and transport."""
    for link in case.part.links:
        for nodes, batch in case.part.predicted:
            request = PredictionRequest(
                nodes=(nodes,),
                link=None if link == FULL else given_link(bits_per_s(link)),
                strategies=case.part.strategies,
                transports=TRANSPORTS,
                global_batch=batch,
            )
            found = predict(records, request)
            if len(found.predictions) != len(case.part.strategies) * len(TRANSPORTS):
                raise SystemExit(f"predictions.py: refused: {jsonable(found.refusals)}")
            for prediction in found.predictions:
                yield {"link": link, **entry(prediction)}


def entry(prediction: Prediction) -> dict[str, Any]:
    values: dict[str, Any] = jsonable(prediction)
    return values


def measured_point(lab: Lab, case: Case, point: dict[str, Any]) -> dict[str, Any]:
    """Measure the configurations of a point; those that share a run are measured once."""
    link, nodes, batch = point["link"], point["nodes"], point["global_batch"]
    lab.shape(None if link == FULL else link)
    name = f"measured-{link}-{nodes}-{batch}"
    measured(lab, case, name, batch, several_hosts(case, nodes, case.part.strategies))
    rows = compare_run(RunFiles(case.root / name / "run")).rows
    seconds = {
        (row.setup.local_strategy, row.setup.transport): row.speed.step_s
        for row in rows
        if row.placement.nodes > 1
    }
    one_host = next(row.speed.step_s for row in rows if row.placement.nodes == 1)
    strategy = point["setup"].partition(" ")[0]
    found = seconds[strategy, point["transport"]]
    assert found is not None and one_host is not None, "the run has ended well"  # noqa: PT018
    predicted, truth = point["step_s"], found.estimate
    print(
        f"{case.part.name} {point['setup']} {point['transport']} {nodes} {link} {batch}: "
        f"{predicted['median']:.3f} s predicted, {truth:.3f} s measured",
        file=sys.stderr,
    )
    return {
        "case": case.part.name,
        **point,
        "measured_s": jsonable(found),
        "one_host_s": one_host.estimate,
        "error": predicted["median"] / truth - 1,
        "covered": predicted["low"] <= truth <= predicted["high"],
    }


def one_host(strategy: str) -> str:
    return ONE_HOST.format(strategy=strategy_keys(strategy))


def several_hosts(case: Case, nodes: int, strategies: Sequence[str]) -> str:
    return "".join(
        SEVERAL_HOSTS.format(
            strategy=strategy_keys(strategy),
            transport=transport,
            factors=case.part.factors,
            nodes=nodes,
        )
        for strategy in strategies
        for transport in TRANSPORTS
    )


def measured(lab: Lab, case: Case, name: str, batch: int, trials: str) -> list[TrialRecord]:
    """Run one host and `trials` at the present speed of the links, or read this run."""
    folder = case.root / name
    run = folder / "run"
    if not RunFiles(run).report.exists():
        folder.mkdir(parents=True, exist_ok=True)
        workload = case.part.workload
        (folder / "spec.toml").write_text(
            SPEC.format(
                name=name,
                repeats=case.repeats,
                workload=workload.name,
                keys=workload.keys,
                batch=batch,
                steps=workload.steps,
                trials=trials,
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
