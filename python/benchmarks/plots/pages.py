# ruff: noqa: RUF001
"""Draw the figures of the pages from docs/results/raw.

    python python/benchmarks/plots/pages.py [FIGURE ...]

Needs matplotlib, which Paceline itself does not need: pip install matplotlib
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[3] / "docs"
BLUE, GREY, ORANGE, DARK = "#2f6fde", "#8a94a6", "#e39b3b", "#444"
GREEN, RED, BROWN = "#1a7f37", "#c62828", "#c77700"


def raw(name: str) -> Any:
    return json.loads((DOCS / f"results/raw/{name}.json").read_text("utf-8"))


def titled(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", weight="bold")


def predictions(axes: Axes) -> None:
    """Draw the error of each predicted step over the measured step."""
    colours = {"predictions": BLUE, "predictions_sleeping": GREY, "predictions_new": ORANGE}
    labels = ("links", "three and four hosts, other strategies", "new points")
    for (name, colour), label in zip(colours.items(), labels, strict=True):
        points = raw(name)["raw"]
        axes.plot(
            [point["measured_s"]["median"] for point in points],
            [100 * point["error"] for point in points],
            "o", color=colour, alpha=0.7, markersize=5, label=label,
        )  # fmt: skip
    axes.axhline(0, color=DARK, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("measured step, s")
    axes.set_ylabel("error of the prediction, %")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0)
    titled(axes, "Two to four hosts")


def crossover(axes: Axes) -> None:
    """Draw a line for each topology and number of samples."""
    rows = raw("crossover")["rows"]
    styles = {"one switch": "-", "racks of 16, 4:1": "--"}
    links = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
    for topology, style in styles.items():
        for samples, colour in {1: GREEN, 8: BLUE, 32: BROWN, 128: RED}.items():
            points = [
                (row["hosts"], row["equal_bits_per_s"])
                for row in rows
                if (row["topology"], row["samples"]) == (topology, samples)
                and row["equal_bits_per_s"] is not None
            ]
            axes.plot(
                *zip(*points, strict=True), style, marker="o", markersize=4, color=colour,
                label=f"{samples} per host" if style == "-" else None,
            )  # fmt: skip
    axes.plot([], [], "--", color=DARK, label="in racks of 16 hosts, 4:1")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    hosts = sorted({row["hosts"] for row in rows})
    axes.set_xticks(hosts, [f"{n:,}" for n in hosts])
    axes.set_yticks(list(links.values()), list(links))
    axes.set_xlabel("hosts")
    axes.set_ylabel("bandwidth of a link")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, title="samples")
    titled(axes, "A layer of 4096 × 4096: below a line, factors are faster")


def workload_curves(panels: Any) -> None:
    """Draw a panel for each workload: its metric after each epoch, and the target."""
    run = raw("workloads_curves")
    styles = {"sequential": ("one process", GREY, "-"), "processes": ("two processes", BLUE, "--")}
    axes_of = dict(zip(run["workloads"], panels.flat, strict=False))
    for row in run["rows"]:
        axes = axes_of[row["workload"]]
        metric, bound = row["target"].split(" of at least ")
        curve = run["curves"][row["configuration"]][metric]
        label, colour, style = styles[row["local_strategy"]]
        axes.plot(range(1, 1 + len(curve)), curve.values(), style, color=colour, label=label)
        words = metric.replace("_", " ").replace("iou", "IoU")
        axes.set_title(f"{row['workload']}: {words}", loc="left", size=10)
        axes.axhline(float(bound), color=GREEN, linewidth=1, linestyle=":", label="target")
        axes.set_ylim(0, 1)
        axes.set_xlabel("epochs")
    for axes in list(panels.flat)[len(axes_of) :]:
        axes.axis("off")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        axes.legend(legend.values(), legend, frameon=False, loc="center")


def seeds(panels: Any) -> None:
    """Draw a panel for each batch: accuracy after each epoch, a line for each seed."""
    found = raw("parallelism_seeds")
    styles = {
        "sequential": ("one process", GREY), "processes": ("data parallel", BLUE),
        "gpipe": ("GPipe", GREEN), "pipedream": ("PipeDream", ORANGE),
    }  # fmt: skip
    batches = sorted({row["global_batch"] for row in found["rows"]})
    for axes, batch in zip(panels, batches, strict=True):
        for part, (label, colour) in styles.items():
            curve = next(
                metrics["accuracy"]
                for name, metrics in found["seeds"].items()
                if f"batch{batch}." in name and part in name
            )
            epochs = range(1, 1 + len(curve))
            for seed in zip(*curve.values(), strict=True):
                axes.plot(epochs, seed, color=colour, linewidth=0.8, alpha=0.5)
            middle = [statistics.median(values) for values in curve.values()]
            axes.plot(epochs, middle, color=colour, linewidth=2.5, label=label)
        axes.set_xlabel("epochs")
        titled(axes, f"batch of {batch}")
    panels[0].set_ylabel("accuracy, five seeds and their median")
    panels[1].legend(frameon=False, loc="lower right")


_TRACED = {
    "cpu_percent": "CPU, %", "iowait_percent": "IOWait, %", "ram_percent": "RAM, %",
    "threads": "threads",
}  # fmt: skip
_TRACES = {
    "local.none.sequential": ("one process", GREY), "local.none.threads": ("threads", GREEN),
    "local.shared.processes": ("processes", BLUE), "mpi.mpi.processes": ("MPI", ORANGE),
    "spark.gloo.processes": ("Spark", RED),
}  # fmt: skip


def traces(panels: Any) -> None:
    """Draw a row of panels for each quantity of the host, and a column for each network."""
    found = raw("lerat2022_distributed")["traces"]
    networks = {"simple-big": "AlexNet, 384 images", "complex-small": "VGG16, 48 images"}
    for row, (quantity, words) in zip(panels, _TRACED.items(), strict=True):
        row[0].set_ylabel(words)
        for axes, network in zip(row, networks, strict=True):
            for configuration, (label, colour) in _TRACES.items():
                trace = next(
                    values for name, values in found.items()
                    if name.startswith(f"{network}.{configuration}.")
                )  # fmt: skip
                axes.plot(trace["time_s"], trace[quantity], color=colour, linewidth=1, label=label)
        row[0].set_ylim(bottom=0)
    for axes, title in zip(panels[0], networks.values(), strict=True):
        titled(axes, title)
    for axes in panels[-1]:
        axes.set_xlabel("seconds since the launch")
    panels[1][0].legend(frameon=False, loc="upper right")


def local_global(axes: Axes) -> None:
    """Draw the speedup on several hosts against that on one, for each local strategy."""
    for name, colour in {"local_global": BLUE, "local_global_four": ORANGE}.items():
        [found] = raw(name)["local_global"]
        nodes = found["answers"][0]["place"]["nodes"]
        points = [(line["speedup"], line["several"][0]["speedup"], line) for line in found["lines"]]
        for number, (one, several, line) in enumerate(points):
            away = [
                [[pair["estimate"] - pair["low"]], [pair["high"] - pair["estimate"]]]
                for pair in (one, several)
            ]
            axes.errorbar(
                one["estimate"], several["estimate"], xerr=away[0], yerr=away[1], fmt="o",
                color=colour, markersize=5, linewidth=1, alpha=0.8,
            )  # fmt: skip
            words = line["configuration"].split(".")[3]
            at = (one["estimate"], several["estimate"])
            above = 4 if number % 2 else -10
            axes.annotate(words, at, (4, above), textcoords="offset points", size=8)
        most = max(one["estimate"] for one, _, _ in points) * 1.15
        axes.plot([0, most], [0, nodes * most], "--", color=colour, linewidth=1)
        axes.plot([], [], "o--", color=colour, label=f"{nodes} hosts; line: as many times faster")
    axes.set_xlabel("speedup on one host")
    axes.set_ylabel("speedup on several")
    axes.set_xlim(left=0.6)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


_SCALES = {"percentunit": (100, "%"), "bytes": (2**-20, "MiB"), "s": (1000, "ms")}  # of panels


def dashboard(name: str) -> Any:
    """Return what draws panels of a dashboard from the answers of a Prometheus."""

    def draw(panels: Any) -> None:
        every = raw("dashboard_panels")["dashboards"][name]
        for axes, panel in zip(panels.flat, every, strict=True):
            scale, unit = _SCALES.get(panel["unit"], (1, ""))
            series = sorted(panel["series"], key=lambda each: each["legend"])
            if panel["type"] == "bargauge":
                legends = [each["legend"].replace(" · ", " ") for each in series]
                axes.barh(legends, [scale * each["values"][-1][1] for each in series], color=BLUE)
                axes.invert_yaxis()
                axes.set_xlabel(unit, size=8)
            else:
                for each in series:
                    times = [at for at, _ in each["values"]]
                    line = [scale * value for _, value in each["values"]]
                    axes.plot(times, line, linewidth=1, label=each["legend"])
                axes.set_ylim(0)
                axes.set_xlabel("seconds", size=8)
                axes.set_ylabel(unit, size=8)
                axes.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
            title = textwrap.fill(panel["title"], 40)
            axes.set_title(title, loc="left", size=8, weight="bold")
            axes.tick_params(labelsize=7)

    return draw


# By the name of the picture: what draws it, its size in inches, and its panels.
FIGURES: dict[str, tuple[Any, tuple[float, float], dict[str, Any]]] = {
    "predictions": (predictions, (8, 3.4), {}),
    "crossover": (crossover, (8, 4.2), {}),
    "seeds": (seeds, (8, 3.4), {"ncols": 2, "sharey": True}),
    "workload-curves": (workload_curves, (8, 4.6), {"nrows": 2, "ncols": 3}),
    "traces": (traces, (10, 8), {"nrows": 4, "ncols": 2, "sharex": "col", "sharey": "row"}),
    "local-global": (local_global, (8, 4.6), {}),
    "dashboard-compare": (dashboard("compare"), (13, 5), {"nrows": 2, "ncols": 3}),
    "dashboard-run": (dashboard("run"), (12, 6), {"nrows": 2, "ncols": 3}),
    "dashboard-cluster": (dashboard("cluster"), (12, 3), {"ncols": 3}),
}


def main() -> None:
    for name in sys.argv[1:] or FIGURES:
        draw, size, panels = FIGURES[name]
        figure, axes = plt.subplots(figsize=size, dpi=150, **panels)
        draw(axes)
        for each in figure.axes:
            each.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(DOCS / f"images/{name}.png")


if __name__ == "__main__":
    main()
