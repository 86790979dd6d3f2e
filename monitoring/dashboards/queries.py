"""Parts of PromQL that several dashboards share.

Only `paceline_run_info` has the facts of a run (launcher, strategy, ...), so queries join it on
(host, run). After a trial, the facts of both trials may exist for a moment. `topk` keeps one,
because a join with two is an error. For one window of a rate, counters still contain the previous
trial; so facts count only after this time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.measure.records.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = "$__rate_interval"
SELDOM = "2m"  # window for counters that a sidecar reads at the expensive interval
HOST = 'host=~"$host"'
RUN = 'run=~"$run",host=~"$host"'
RANK = 'run=~"$run",host=~"$host",rank=~"$rank"'
FACTS = ("trial", "launcher", "transport", "local_strategy", "nodes", "ranks")
RANK_LEGEND = "rank {{rank}} on {{host}}"
NAME = "{{launcher}} · {{transport}} · {{local_strategy}} · nodes {{nodes}}, ranks {{ranks}}"


def unit_of(expr: str) -> str:
    """Return Grafana's unit for the value, or the rate, of the one metric that `expr` names.

    Raises ValueError if it names several: then the unit must be stated.
    """
    names = set(re.findall(r"paceline_[a-z0-9_]+", expr))
    metrics = {metric for metric in METRICS if names & set(metric.series)}
    if len(metrics) != 1 or len(names) != 1:
        raise ValueError(f"state a unit: expected one metric, got {sorted(names)}")
    return metrics.pop().grafana_unit(rate="rate(" in expr)


def rate(counter: str, labels: str, by: Sequence[str], window: str = WINDOW) -> str:
    """Return the counter's increase per second, summed by the labels `by`."""
    return f"sum by ({', '.join(by)}) (rate({counter}{{{labels}}}[{window}]))"


def share(counter: str, labels: str, of: str, by: Sequence[str]) -> str:
    """Return the share of the counter's increase in series that also match `of`, 0 to 1."""
    return f"{rate(counter, f'{labels},{of}', by)} / ({rate(counter, labels, by)} > 0)"


def split(counter: str, labels: str, part: str, by: Sequence[str]) -> str:
    """Return the share of each value of the label `part` in the counter's increase, 0 to 1."""
    keys = ", ".join(by)
    whole = rate(counter, labels, by)
    return f"{rate(counter, labels, (*by, part))} / on ({keys}) group_left () ({whole} > 0)"


def largest(gauge: str, labels: str, by: Sequence[str]) -> str:
    return f"max by ({', '.join(by)}) ({gauge}{{{labels}}})"


def total(gauge: str, labels: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({gauge}{{{labels}}})"


def with_facts(by_host_and_run: str, facts: Sequence[str] = FACTS) -> str:
    """Return values by (host, run), with the facts of the run as labels."""
    info = f"paceline_run_info{{{RUN}}}"
    return (
        f"({by_host_and_run}) * on (host, run) group_left ({', '.join(facts)}) "
        f"topk by (host, run) (1, {info} == 1 and {info} offset {WINDOW} == 1)"
    )


def by_trial(how: str, by_host_and_run: str, facts: Sequence[str] = FACTS) -> str:
    """Aggregate values by (host, run) over the hosts of a trial with `how` (sum, avg, max)."""
    return f"{how} by (run, {', '.join(facts)}) ({with_facts(by_host_and_run, facts)})"


def over_time(how: str, query: str) -> str:
    """Aggregate `query` over the selected time with `how` (avg, max)."""
    return f"{how}_over_time(({query})[$__range:$__interval])"


def own_step_seconds(by: Sequence[str] = ("host", "run", "rank")) -> str:
    """Return the time of a step that a rank spends itself, without waiting for other ranks."""
    own = rate("paceline_training_phase_seconds_total", f'{RANK},phase!~"comm|bubble"', by)
    return f"{own} / ({rate('paceline_training_steps_total', RANK, by)} > 0)"


def against_others() -> str:
    """Return a rank's own part of a step over the mean of the run's other ranks.

    It is above 1 for the straggler.
    """
    own = own_step_seconds()
    return (
        f"({own}) * on (run) group_left () (count by (run) ({own}) - 1 > 0) "
        f"/ on (host, run, rank) (sum by (run) ({own}) - on (run) group_right () ({own}))"
    )


def quantile(level: float, by: Sequence[str]) -> str:
    buckets = rate("paceline_training_step_seconds_bucket", RANK, (*by, "le"))
    return f"histogram_quantile({level}, {buckets})"
