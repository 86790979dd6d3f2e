"""Draw checkpoint-interval.png from docs/results/raw/checkpoint_interval.json.

    python python/benchmarks/plots/checkpoint_interval.py

Needs matplotlib, which Paceline itself does not need: pip install matplotlib
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[3] / "docs"


def draw(results: dict[str, Any]) -> None:
    """Draw the measured losses, the formula's curve and the replayed one."""
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    intervals = [point["interval_s"] for point in results["curve"]]
    for name, colour, label in (
        ("by_formula", "#2f6fde", "Daly's formula"),
        ("replayed", "#c77700", "replayed with measured times"),
    ):
        lost = [100 * point[name] for point in results["curve"]]
        axes.plot(intervals, lost, color=colour, label=label)
    points = [(p["interval_s"], lost) for p in results["points"] for lost in p["lost_shares"]]
    axes.scatter(
        [interval_s for interval_s, _ in points], [100 * lost for _, lost in points],
        color="#444444", label="trainings", zorder=3,
    )  # fmt: skip
    axes.axvline(results["formula_interval_s"], color="#2f6fde", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("interval between checkpoints, s")
    axes.set_ylabel("lost time, % of the work")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(
        f"A failure every {results['mtbf_s']:g} s on average, checkpoints of "
        f"{1000 * results['costs']['checkpoint_s']:.0f} ms",
        loc="left", weight="bold",
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(DOCS / "images/checkpoint-interval.png")


if __name__ == "__main__":
    path = DOCS / "results/raw/checkpoint_interval.json"
    draw(json.loads(path.read_text("utf-8")))
