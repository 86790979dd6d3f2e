"""Weak scaling: speeds of a strategy whose replicas all have the same batch.

In a weak scaling, one strategy under one launcher has more and more replicas, on one node or on
several, and each replica has the same batch. So the global batches differ: equivalence and ranking
compare the configurations of one global batch, and only speeds are compared between batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare.ranking import rates_of
from paceline.analysis.compare.row import Row
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import node_setup
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.plan.trials.trial import Trial

Trials = Mapping[str, Sequence[TrialAnalysis]]  # by configuration
_SAME = Interval(estimate=1.0, low=1.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """A strategy with a number of replicas.

    throughput, efficiency: None if the training is not equivalent to its baseline, unless it is
    lossy on purpose, or if there is nothing with one replica.
    """

    configuration: str
    replicas: int
    nodes: int
    global_batch: int
    samples_per_s: Interval | None
    step_s: Interval | None
    throughput: Interval | None  # samples per second over those of one replica
    efficiency: Interval | None  # step time of one replica over its own
    equivalent: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakScaling:
    """A strategy under a launcher, with several numbers of replicas and one batch for each."""

    workload: str  # entry of [[workloads]]
    batch_per_replica: int
    launcher: str
    transport: str
    local_strategy: str
    replicas_per_node: int | None  # None: the replicas of one node grow, not the nodes
    one_replica: str | None  # configuration that the points are relative to
    points: tuple[ScalingPoint, ...]  # in order of replicas, first that of one replica


def weak_scalings(rows: Sequence[Row], trials: Trials) -> tuple[WeakScaling, ...]:
    """Relate the speeds of each strategy to that of one replica, by workload and launcher.

    rows: of a run; those without a batch for each replica are left out. trials: the finished ones.
    """
    by_entry: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        training = trials[row.configuration][0].record.trial.training if row.repeats else None
        if training is not None and training.batch_per_replica is not None:
            by_entry[training.entry_name].append(row)
    return tuple(
        found for own in by_entry.values() for found in _ScaledWorkload(own, trials).found()
    )


class _ScaledWorkload:
    """The weak scalings of one entry of [[workloads]]."""

    def __init__(self, rows: Sequence[Row], trials: Trials) -> None:
        self._trial = {r.configuration: trials[r.configuration][0].record.trial for r in rows}
        own = {name: trials[name] for name in self._trial}
        self._speeds = rates_of(own, lambda trial: trial.samples_per_s)
        self._steps = rates_of(own, lambda trial: trial.steps_per_s)
        # a baseline has the batch of several replicas, too
        self._rows = [row for row in rows if self._has_own_batch(row)]

    def found(self) -> list[WeakScaling]:
        found = [self._weak_scaling(own) for own in self._series()]
        return sorted(found, key=lambda each: (each.local_strategy, each.launcher, each.transport))

    def _has_own_batch(self, row: Row) -> bool:
        training = self._trial[row.configuration].training
        return training.global_batch == row.placement.replicas * (training.batch_per_replica or 0)

    def _series(self) -> list[list[Row]]:
        """Return rows that differ in the number of nodes, or of replicas on one node."""
        over_nodes: dict[Hashable, list[Row]] = defaultdict(list)
        on_node: dict[Hashable, list[Row]] = defaultdict(list)
        for row in self._rows:
            kind = _beside_replicas(self._trial[row.configuration])
            if row.placement.nodes > 1:
                over_nodes[kind, row.placement.replicas_per_node].append(row)
            else:
                on_node[kind].append(row)
        found = [[*self._alone(own[0]), *own] for own in over_nodes.values()]
        known = {row.configuration for own in found for row in own}
        found += [
            own
            for own in on_node.values()
            if any(r.placement.replicas > 1 and r.configuration not in known for r in own)
        ]
        return found

    def _alone(self, there: Row) -> list[Row]:
        """Return the row of one node that does what each node does there, if there is one."""
        wanted = self._trial[there.configuration]
        same = [
            row
            for row in self._rows
            if row.placement.nodes == 1 and row.setup.launcher == there.setup.launcher
            if node_setup(self._trial[row.configuration]) == node_setup(wanted)
            if _arithmetic(self._trial[row.configuration]) == _arithmetic(wanted)
        ]
        same.sort(key=lambda row: row.setup.transport != there.setup.transport)
        return same[:1]

    def _weak_scaling(self, rows: Sequence[Row]) -> WeakScaling:
        one = self._one_replica(rows)
        last = max(rows, key=lambda row: (row.placement.nodes, row.placement.replicas))
        shown = rows if one is None or one in rows else [one, *rows]
        in_order = sorted(shown, key=lambda row: (row.placement.replicas, row.placement.nodes))
        training, nodes = self._trial[last.configuration].training, last.placement.nodes
        return WeakScaling(
            workload=training.entry_name,
            batch_per_replica=training.batch_per_replica or 0,
            launcher=last.setup.launcher,
            transport=last.setup.transport,
            local_strategy=last.setup.local_strategy,
            replicas_per_node=None if nodes == 1 else last.placement.replicas_per_node,
            one_replica=None if one is None else one.configuration,
            points=tuple(self._point(row, one) for row in in_order),
        )

    def _one_replica(self, rows: Sequence[Row]) -> Row | None:
        """Return the row with one replica: of the strategy itself, else with as many threads.

        One under the same launcher is preferred, and then the baseline.
        """
        worker = _worker(self._trial[rows[-1].configuration])
        same = [
            row
            for row in self._rows
            if row.placement.replicas == 1 and row.has_comparable_speed
            if _worker(self._trial[row.configuration]) == worker
        ]

        def preference(row: Row) -> tuple[bool, bool, bool, str]:
            is_baseline = self._trial[row.configuration].is_baseline
            is_other = row.setup.launcher != rows[-1].setup.launcher
            return row not in rows, is_other, not is_baseline, row.configuration

        return min(same, key=preference, default=None)

    def _point(self, row: Row, one: Row | None) -> ScalingPoint:
        name, throughput, efficiency = row.configuration, None, None
        is_known = row.speed.step_s is not None
        if one is not None and (row.has_comparable_speed or (is_known and row.is_lossy_on_purpose)):
            is_one = row is one
            throughput = _SAME if is_one else self._speeds.ratio(name, one.configuration)
            efficiency = _SAME if is_one else self._steps.ratio(name, one.configuration)
        return ScalingPoint(
            configuration=name,
            replicas=row.placement.replicas,
            nodes=row.placement.nodes,
            global_batch=self._trial[name].training.global_batch,
            samples_per_s=row.speed.samples_per_s,
            step_s=row.speed.step_s,
            throughput=throughput,
            efficiency=efficiency,
            equivalent=row.equivalence.equivalent,
        )


def _arithmetic(trial: Trial) -> Hashable:
    return trial.training.arithmetic, trial.training.memory_format


def _worker(trial: Trial) -> Hashable:
    """Identify how one replica computes."""
    place, training = trial.placement, trial.training
    # with one replica, statistics of a replica are those of the batch
    unusual = training.model_copy(update={"batch_norm": "global"}).unusual
    return place.stages, place.threads_per_worker, trial.device, _arithmetic(trial), tuple(unusual)


def _beside_replicas(trial: Trial) -> Hashable:
    """Identify everything but the numbers of nodes and of replicas."""
    names = trial.launcher, trial.transport, trial.local_strategy
    return names, _worker(trial), tuple(trial.labels), tuple(trial.details)
