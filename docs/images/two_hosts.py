# ruff: noqa: INP001, RUF001
"""Draw two-hosts.png from docs/results/lab_alexnet.json.

    python docs/images/two_hosts.py

Needs matplotlib, which Paceline itself does not need: pip install matplotlib
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SPEEDS = {"full": "full speed", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
ONE_HOST, TWO_HOSTS = "#8a94a6", "#2f6fde"


def medians(rows: list[dict], launcher: str, transport: str) -> dict[str, float]:
    """Return median, low and high images/s of one configuration."""
    row = next(r for r in rows if (r["launcher"], r["transport"]) == (launcher, transport))
    return row["images_per_s"]


def draw() -> None:
    """Draw one pair of bars for each link speed."""
    runs = json.loads((HERE.parent / "results" / "lab_alexnet.json").read_text("utf-8"))["runs"]
    figure, axes = plt.subplots(figsize=(8, 3.6), dpi=150)
    for index, run in enumerate(runs):
        one = medians(run["rows"], "local", "none")
        two = medians(run["rows"], "mpi", "mpi")
        for offset, value, colour in ((-0.2, one, ONE_HOST), (0.2, two, TWO_HOSTS)):
            error = [[value["median"] - value["low"]], [value["high"] - value["median"]]]
            axes.bar(index + offset, value["median"], 0.38, color=colour, yerr=error, capsize=3)
        ratio = two["median"] / one["median"]
        axes.annotate(
            f"{ratio:.2f}×",
            (index + 0.2, two["high"] + 1.5),
            ha="center",
            weight="bold",
            color="#1a7f37" if ratio > 1 else "#c62828",
        )
    axes.set_xticks(range(len(runs)), [SPEEDS[run["speed"]] for run in runs])
    axes.set_xlabel("link between the hosts")
    axes.set_ylabel("images per second")
    axes.set_ylim(0, 66)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[
            plt.Rectangle((0, 0), 1, 1, color=ONE_HOST, label="one host (sequential)"),
            plt.Rectangle((0, 0), 1, 1, color=TWO_HOSTS, label="two hosts (mpirun, MPI)"),
        ],
        frameon=False,
    )
    axes.set_title("AlexNet 224×224: a second host helps, then hurts", loc="left", weight="bold")
    figure.tight_layout()
    figure.savefig(HERE / "two-hosts.png")


if __name__ == "__main__":
    draw()
