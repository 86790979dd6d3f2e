# ruff: noqa: RUF001
"""Draw two-hosts.png from docs/results/raw/lab_alexnet.json and lab_factors.json.

    python python/benchmarks/plots/two_hosts.py

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
SPEEDS = {"full": "full speed", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
WAYS = {
    "lab_alexnet.json": ("all gradients are sent (228 MB a step)", "#8a94a6"),
    "lab_factors.json": ("factors of large layers (13 MB a step), the default", "#2f6fde"),
}


def speedup(run: dict[str, Any]) -> dict[str, float]:
    """Return median, low and high of the speedup of two hosts under mpirun with MPI."""
    row = next(r for r in run["rows"] if (r["launcher"], r["transport"]) == ("mpi", "mpi"))
    interval: dict[str, float] = row["speedup"]
    return interval


def draw() -> None:
    """Draw a pair of bars for each link speed, with 95 % intervals."""
    figure, axes = plt.subplots(figsize=(8, 3.6), dpi=150)
    for offset, (file, (label, colour)) in zip((-0.2, 0.2), WAYS.items(), strict=True):
        runs = json.loads((DOCS / "results/raw" / file).read_text("utf-8"))["runs"]
        for index, run in enumerate(runs):
            found = speedup(run)
            error = [[found["median"] - found["low"]], [found["high"] - found["median"]]]
            axes.bar(
                index + offset, found["median"], 0.38, color=colour, yerr=error, capsize=3,
                label=label if index == 0 else None,
            )  # fmt: skip
            axes.annotate(
                f"{found['median']:.2f}×",
                (index + offset, found["high"] + 0.04),
                ha="center",
                weight="bold",
                color="#1a7f37" if found["low"] > 1 else "#c62828" if found["high"] < 1 else "#444",
            )
    axes.axhline(1, color="#444", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(SPEEDS)), list(SPEEDS.values()))
    axes.set_xlabel("link between the hosts")
    axes.set_ylabel("speedup over one host")
    axes.set_ylim(0, 2.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title("AlexNet 224×224 on two hosts", loc="left", weight="bold")
    figure.tight_layout()
    figure.savefig(DOCS / "images/two-hosts.png")


if __name__ == "__main__":
    draw()
