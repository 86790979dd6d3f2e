"""Draw workload-curves.png from docs/results/raw/workloads_curves.json.

    python python/benchmarks/plots/workload_curves.py

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
STYLES = {
    "sequential": ("one process", "#8a94a6", "-"),
    "processes": ("two processes", "#2f6fde", "--"),
}


def draw(run: dict[str, Any]) -> None:
    """Draw a panel for each workload: its metric after each epoch, and the target."""
    figure, panels = plt.subplots(2, 3, figsize=(8, 4.6), dpi=150)
    axes_of = dict(zip(run["workloads"], panels.flat, strict=False))
    for row in run["rows"]:
        axes = axes_of[row["workload"]]
        metric, bound = row["target"].split(" of at least ")
        curve = run["curves"][row["configuration"]][metric]
        label, colour, style = STYLES[row["local_strategy"]]
        axes.plot(range(1, 1 + len(curve)), curve.values(), style, color=colour, label=label)
        axes.set_title(
            f"{row['workload']}: {metric.replace('_', ' ').replace('iou', 'IoU')}",
            loc="left",
            size=10,
        )
        axes.axhline(float(bound), color="#1a7f37", linewidth=1, linestyle=":", label="target")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("epochs")
    for axes in list(panels.flat)[len(axes_of) :]:
        axes.axis("off")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        axes.legend(legend.values(), legend, frameon=False, loc="center")
    figure.tight_layout()
    figure.savefig(DOCS / "images/workload-curves.png")


if __name__ == "__main__":
    draw(json.loads((DOCS / "results/raw/workloads_curves.json").read_text("utf-8")))
