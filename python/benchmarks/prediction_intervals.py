"""Calibrate the width of predicted intervals with some points, and test it with others.

    python prediction_intervals.py predictions.json predictions_sleeping.json --calibrate links \\
        --out prediction_intervals.json

A point of predictions.py has the interval of its prediction and the measured step. The interval
without the model's error is widened by the smallest standard deviation that contains 90 % of the
points of the calibration (split conformal prediction: of n points the ceil(0.9 (n + 1))-th). The
coverage is that of the points of the other scenes. The opposite direction and each workload against
the others are computed, too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from common import write_results
from paceline.analysis.predict.prediction import CONFIDENCE
from paceline.measure.records.files import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
# Of the files that do not state it: it stood for the spread between runs, too.
FORMER_ERROR = 0.03
FORMER_SCENE = "links"  # of the file that does not state it


def main() -> None:
    options = arguments()
    points = [point for file in options.files for point in points_of(read_json(file))]
    scenes = list(dict.fromkeys(point["scene"] for point in points))
    workloads = list(dict.fromkeys(point["workload"] for point in points))
    used = [point for point in points if point["scene"] in options.calibrate]
    others = [point for point in points if point["scene"] not in options.calibrate]
    values = {
        "files": [file.name for file in options.files],
        "scenes": scenes,
        "calibrated": split(used, others),
        "opposite": split(others, used),
        "workloads": {
            name: split(
                [point for point in points if point["workload"] != name],
                [point for point in points if point["workload"] == name],
            )
            for name in workloads
        },
    }
    for name in ("calibrated", "opposite", "workloads"):
        print(name, values[name])
    write_results(options.out, "prediction_intervals", values)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="PREDICTIONS.json")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="SCENE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    return parser.parse_args()


def points_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return error and width of each point, on a logarithmic scale.

    width: standard deviation of the prediction without the model's error.
    """
    model_error = document.get("model_error", FORMER_ERROR)
    found = []
    for point in document["raw"]:
        step = point["step_s"]
        whole = math.log(step["high"] / step["low"]) / 2 / QUANTILE
        found.append(
            {
                "scene": point.get("scene", FORMER_SCENE),
                "workload": point["workload"],
                "error": math.log(step["median"] / point["measured_s"]["median"]),
                "width": math.sqrt(max(0.0, whole**2 - model_error**2)),
            }
        )
    return found


def split(used: Sequence[dict[str, Any]], tested: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's error by the first points, and how many of the others it contains."""
    error = calibrated(used)
    covered = sum(contains(point, error) for point in tested)
    return {
        "calibration_points": len(used),
        "model_error": error,
        "points": len(tested),
        "covered": covered,
        "coverage": covered / len(tested),
    }


def calibrated(points: Sequence[dict[str, Any]]) -> float:
    """Return the smallest standard deviation with which the intervals contain enough points."""
    needed = sorted(
        math.sqrt(max(0.0, (point["error"] / QUANTILE) ** 2 - point["width"] ** 2))
        for point in points
    )
    return needed[min(len(needed), math.ceil(CONFIDENCE * (len(needed) + 1))) - 1]


def contains(point: dict[str, Any], error: float) -> bool:
    limit: float = QUANTILE * math.hypot(point["width"], error)
    return abs(float(point["error"])) <= limit + 1e-12


if __name__ == "__main__":
    main()
