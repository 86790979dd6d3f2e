"""The choice between all-reduce and factor exchange, as plain values for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.factors import factor_traffic
from paceline.analysis.labels import short_name
from paceline.report import figures
from paceline.report.wording import in_milliseconds, megabytes, milliseconds, number

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.factors import FactorTraffic, LayerTraffic


def sufficient_factors(comparison: Comparison) -> list[dict[str, Any]]:
    """Describe the first repeat of each configuration that recorded a choice."""
    found = []
    for workload in comparison.workloads:
        for row, trial in figures.first_repeats(comparison, workload):
            traffic = factor_traffic(trial.record)
            if traffic is not None:
                name = short_name(row, comparison.rows)
                found.append({"name": name, **_described(traffic)})
    return found


def _described(traffic: FactorTraffic) -> dict[str, Any]:
    sentences = [f"Setting: {traffic.setting}."]
    if traffic.reason is not None:
        sentences.append(f"No layer sends factors: {traffic.reason}.")
    sentences.append(_speeds(traffic))
    return {"lines": [_line(each) for each in traffic.layers], "sentence": " ".join(sentences)}


def _line(each: LayerTraffic) -> dict[str, str]:
    return {
        "layer": each.layer,
        "chosen": "factors" if each.sends_factors else "all-reduce",
        "all_reduce": megabytes(each.all_reduce_bytes),
        "all_reduce_s": in_milliseconds(each.all_reduce_s),
        "factors": megabytes(each.factor_bytes),
        "factors_s": in_milliseconds(each.factor_s),
    }


def _speeds(traffic: FactorTraffic) -> str:
    speeds = traffic.speeds
    if speeds is None:
        never = traffic.setting == "never"
        reason = "the setting excludes factors" if never else "factors save no bytes"
        return f"Speeds were not measured, because {reason}."
    return (
        f"Measured before the training: latency {milliseconds(speeds['latency_s'])}, all-reduce "
        f"{megabytes(speeds['all_reduce_bytes_per_s'])} MB/s, all-gather "
        f"{megabytes(speeds['all_gather_bytes_per_s'])} MB/s, products "
        f"{number(speeds['product_flop_per_s'] / 1e9)} Gflop/s."
    )
