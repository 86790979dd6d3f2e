"""The comparison of a finished run, for a raw file, and what no row of it has.

Every row also has `others_percent`: the share of the cores that other processes and machines used
beside it. Parts that run_all.toml asks for with `show`, of all configurations:

curves: the metrics of the evaluations by number of steps, in the first repeat
seeds: the same of all repeats, a list; every row has those of the last evaluation
traces: CPU, idle, IOWait, RAM and threads of the host since the launch, in the first repeat
messages: operations of rank 0 in a mean step of the first repeat, by size: calls, bytes, time
tuning: the result of a search
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

import paceline
from paceline.analysis.trial.communication import SizeBin, trial_communication
from paceline.analysis.trial.load import recorded_load
from paceline.analysis.trial.reading import TrialRecord
from paceline.measure.records.files import read_json
from paceline.show.report.verdict import comparison_document

POINTS = 120  # of a trace: more are not visible
# name in the raw file -> column of the trace
TRACES = {
    "cpu_percent": "cpu_busy_percent",
    "idle_percent": "cpu_idle_percent",
    "iowait_percent": "cpu_iowait_percent",
    "ram_percent": "ram_percent",
    "threads": "run_threads",
}
# of a row, in those of its messages
NAMED = ("configuration", "transport", "local_strategy", "layout", "labels", "options")
Curves = dict[str, dict[str, dict[int, Any]]]


def document(run: paceline.Run, shown: Sequence[str]) -> dict[str, Any]:
    """Return the comparison of a run, with the parts that are asked for."""
    compared = comparison_document(run.comparison)
    loads = loads_percent(run)
    found = {name: SHOWN[name](run) for name in shown}
    for row in compared["rows"]:
        row["others_percent"] = loads.get(row["configuration"])
        if "seeds" in found:
            metrics = found["seeds"].get(row["configuration"], {})
            row["last"] = {metric: list(by.values())[-1] for metric, by in metrics.items()}
    state = read_json(run.files.manifest).get("git")  # of the run, not of this program
    return {"git": state, **compared, **found}


def loads_percent(run: paceline.Run) -> dict[str, float]:
    """Return the median load beside the trials of each configuration, where it was measured."""
    loads: dict[str, list[float]] = {}
    for record in run.trials:
        load = recorded_load(record)
        if load is not None:
            loads.setdefault(record.trial.configuration, []).append(load.percent)
    return {name: statistics.median(found) for name, found in loads.items()}


def curves(run: paceline.Run) -> Curves:
    """Return the values by configuration, metric and number of steps."""
    return {
        name: {metric: {steps: v[0] for steps, v in by.items()} for metric, by in metrics.items()}
        for name, metrics in seed_curves(run).items()
    }


def seed_curves(run: paceline.Run) -> Curves:
    """Return the values of the repeats by configuration, metric and number of steps."""
    found: Curves = {}
    for row in run.evaluations().sort("repeat", maintain_order=True).iter_rows(named=True):
        by_metric = found.setdefault(row["configuration"], {})
        by_steps = by_metric.setdefault(row["metric"], {})
        by_steps.setdefault(row["steps"], []).append(row["value"])
    return found


def traces(run: paceline.Run) -> dict[str, dict[str, list[float | None]]]:
    """Return times since the launch and values, by configuration."""
    found = {}
    for record in first_repeats(run):
        frame = run.trace(record.trial.id)
        if frame.is_empty() or record.outcome is None:
            continue
        thinned = frame.gather_every(math.ceil(len(frame) / POINTS))
        since = (pl.col("unix_s") - record.outcome.launched_unix_s).round(1).alias("time_s")
        values = (pl.col(column).round(1).alias(name) for name, column in TRACES.items())
        found[record.trial.configuration] = thinned.select(since, *values).to_dict(as_series=False)
    return found


def messages(run: paceline.Run) -> list[dict[str, Any]]:
    """Return what rank 0 does in a mean step, by configuration, operation and size."""
    rows = {row["configuration"]: row for row in run.rows()}
    return [
        {**{name: rows[record.trial.configuration][name] for name in NAMED}, **row}
        for record in first_repeats(run)
        for row in messages_of(record)
    ]


def messages_of(record: TrialRecord) -> Iterator[dict[str, Any]]:
    communication = trial_communication(record)
    if communication is None:
        return
    rank = communication.ranks[0]
    for each in sorted(rank.bins, key=lambda each: (each.operation, each.least_bytes)):
        yield {
            "operation": each.operation,
            "algorithm": each.algorithm,
            "bytes_of_a_call": bounds(each),
            "calls": each.count / rank.steps,
            "bytes": each.payload_bytes / rank.steps,
            "time_s": each.time_s / rank.steps,
            "exposed_s": each.exposed_s / rank.steps,
        }


def bounds(of: SizeBin) -> str:
    """Return a range of sizes as powers of ten, as the tables of hvprof have them."""
    least, most = f"{of.least_bytes:.0e}", "" if of.most_bytes is None else f"{of.most_bytes:.0e}"
    low, high = (text.rpartition("+")[2].lstrip("0") for text in (least, most))
    if not high:
        return f"from 10^{low}"
    return f"10^{low} to 10^{high}" if low else f"below 10^{high}"


def first_repeats(run: paceline.Run) -> list[TrialRecord]:
    return [each for each in run.trials if each.trial.repeat == 0 and each.finished]


SHOWN: Mapping[str, Callable[[paceline.Run], Any]] = {
    "curves": curves,
    "seeds": seed_curves,
    "traces": traces,
    "messages": messages,
    "tuning": lambda run: read_json(run.files.tuning),
}
