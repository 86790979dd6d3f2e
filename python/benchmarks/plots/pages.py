"""Draw a picture each for the pages about transports, statistics, causes and predictions.

    python python/benchmarks/plots/pages.py

Needs matplotlib, which Paceline itself does not need: pip install matplotlib
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[3] / "docs"
BLUE, GREY, ORANGE = "#2f6fde", "#8a94a6", "#e39b3b"


def raw(name: str) -> Any:
    return json.loads((DOCS / f"results/raw/{name}.json").read_text("utf-8"))


def transports(axes: Axes) -> None:
    """Draw the training speed of each configuration, a bar to the median and a dot per repeat."""
    rates = {
        name: values
        for name, values in raw("transports")["images_per_s"].items()
        if name not in ("paceline nothing", "paceline only meeting")
    }
    ordered = sorted(rates, key=lambda name: statistics.median(rates[name]))
    for place, name in enumerate(ordered):
        colour = BLUE if name.startswith("paceline") else GREY
        axes.barh(place, statistics.median(rates[name]), color=colour)
        axes.plot(rates[name], [place] * len(rates[name]), ".", color="#222", markersize=4)
    axes.set_yticks(range(len(ordered)), ordered)
    axes.set_xlabel("images/s")
    axes.set_title("AlexNet, two ranks on one host", loc="left", weight="bold")


def power(axes: Axes) -> None:
    """Draw how often a difference of 6 % is found, by repeats, for nine configurations."""
    colours = {
        "independent steps": BLUE,
        "autocorrelated steps, 0.5": ORANGE,
        "autocorrelated steps, 0.8": GREY,
    }
    for noise, colour in colours.items():
        found = [
            (row["repeats"], 100 * row["power"])
            for row in raw("statistics")["results"]["grid"]
            if row["noise"] == noise and row["configurations"] == 9
        ]
        axes.plot(*zip(*found, strict=True), "o-", color=colour, label=noise)
    axes.set_xlabel("repeats")
    axes.set_ylabel("differences of 6 % found, %")
    axes.legend(frameon=False)
    axes.set_title("Nine configurations, one of them faster", loc="left", weight="bold")


def causes(axes: Axes) -> None:
    """Draw the share that the right cause got for each disturbance, where one was named."""
    cases = [
        case
        for name in ("seeded_causes", "seeded_causes_rest", "seeded_causes_links")
        for case in raw(name)["raw"]
        if case.get("named")
    ]
    names = sorted({case["case"] for case in cases}, reverse=True)
    places = [names.index(case["case"]) for case in cases]
    axes.axvline(1, color="#444", linewidth=1, linestyle="--")
    axes.plot([case["share"] for case in cases], places, "o", color=BLUE, alpha=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.3)
    axes.set_xlabel("share of the difference that the right cause got (truth: 1)")
    axes.set_title("Seeded disturbances", loc="left", weight="bold")


def predictions(axes: Axes) -> None:
    """Draw the error of each predicted step over the measured step."""
    colours = {"predictions": BLUE, "predictions_sleeping": GREY, "predictions_new": ORANGE}
    labels = ("held-out links", "three and four hosts, other strategies", "new points, noisy day")
    for (name, colour), label in zip(colours.items(), labels, strict=True):
        points = raw(name)["raw"]
        axes.plot(
            [point["measured_s"]["median"] for point in points],
            [100 * point["error"] for point in points],
            "o", color=colour, alpha=0.7, markersize=5, label=label,
        )  # fmt: skip
    axes.axhline(0, color="#444", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("measured step, s")
    axes.set_ylabel("error of the prediction, %")
    axes.legend(frameon=False)
    axes.set_title("Two to four hosts", loc="left", weight="bold")


def main() -> None:
    for draw in (transports, power, causes, predictions):
        figure, axes = plt.subplots(figsize=(8, 3.4), dpi=150)
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(DOCS / f"images/{draw.__name__}.png")


if __name__ == "__main__":
    main()
