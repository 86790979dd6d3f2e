"""Draw within-a-node.png from docs/results/raw/lerat2022.json.

    python python/benchmarks/plots/within_a_node.py

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
NETWORKS = {"simple-big": "AlexNet", "complex-small": "VGG16"}
STRATEGIES = ("processes", "threads", "intraop", "hybrid", "pipeline", "sequential")
LAUNCHERS = {"local": "#2f6fde", "mpi": "#8a94a6", "spark": "#e39b3b"}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw a panel for each network, with a bar and its 95 % interval for each launcher."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), dpi=150, sharey=True)
    speedups = {(r["workload"], r["local_strategy"], r["launcher"]): r["speedup"] for r in rows}
    for axes, (workload, name) in zip(panels, NETWORKS.items(), strict=True):
        for place, (launcher, colour) in enumerate(LAUNCHERS.items()):
            found = [speedups[workload, strategy, launcher] for strategy in STRATEGIES]
            middle = [each["median"] for each in found]
            errors = [
                [each["median"] - each["low"] for each in found],
                [each["high"] - each["median"] for each in found],
            ]
            positions = [index + 0.27 * (place - 1) for index in range(len(found))]
            axes.bar(
                positions, middle, 0.25, yerr=errors, color=colour, label=launcher, capsize=1.5
            )
        axes.axhline(1, color="#444", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(STRATEGIES)), STRATEGIES, rotation=20)
        axes.set_title(name, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speedup over one core")
    panels[1].legend(frameon=False, loc="upper right", fontsize="small", borderaxespad=0)
    figure.tight_layout()
    figure.savefig(DOCS / "images/within-a-node.png")


if __name__ == "__main__":
    path = DOCS / "results/raw/lerat2022.json"
    draw(json.loads(path.read_text("utf-8"))["rows"])
