# ruff: noqa: RUF001
"""Draw crossover.png from docs/results/raw/crossover.json.

    python python/benchmarks/plots/crossover.py

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
STYLES = {"one switch": "-", "racks of 16, 4:1": "--"}
COLOURS = {1: "#1a7f37", 8: "#2f6fde", 32: "#c77700", 128: "#c62828"}
LABELLED = "one switch"
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw a line for each topology and number of samples."""
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    for topology, style in STYLES.items():
        for samples, colour in COLOURS.items():
            points = [
                (row["hosts"], row["equal_bits_per_s"])
                for row in rows
                if (row["topology"], row["samples"]) == (topology, samples)
                and row["equal_bits_per_s"] is not None
            ]
            axes.plot(
                *zip(*points, strict=True), style, marker="o", markersize=4, color=colour,
                label=f"{samples} per host" if topology == LABELLED else None,
            )  # fmt: skip
    axes.plot([], [], "--", color="#444", label="in racks of 16 hosts, 4:1")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    hosts = sorted({row["hosts"] for row in rows})
    axes.set_xticks(hosts, [f"{n:,}" for n in hosts])
    axes.set_yticks(list(LINKS.values()), list(LINKS))
    axes.set_xlabel("hosts")
    axes.set_ylabel("bandwidth of a link")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="samples")
    axes.set_title(
        "A layer of 4096 × 4096: below a line, factors are faster", loc="left", weight="bold"
    )
    figure.tight_layout()
    figure.savefig(DOCS / "images/crossover.png")


if __name__ == "__main__":
    draw(json.loads((DOCS / "results/raw/crossover.json").read_text("utf-8"))["rows"])
