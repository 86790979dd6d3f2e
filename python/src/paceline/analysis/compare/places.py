"""Places at which strategies run, and the same place under Spark and under MPI.

A place is everything that a configuration has beside what a node does. A trial under both launchers
is divided into start (launch, imports, rendezvous, building the model), feeding (opening the data
set, waiting for batches), steps, and end. The seconds are means over the ranks. Where hosts take
turns, only the steps are measured: sleeps and polls are not slowed, and trials start together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.compare.row import Row
from paceline.analysis.explain.explanation import time_beliefs
from paceline.analysis.statistics.intervals import Interval, Mean
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial.phases import RankPhases, mean_of_each
from paceline.analysis.trial.reading import node_setup
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import STEP_PHASES
from paceline.plan.trials.trial import Trial

FIRST, SECOND = "spark", "mpi"
_START = ("launch", "imports")
_START_SPANS = ("rendezvous", "model_build", "restore")  # of `other`
_FEEDING = ("data_load", "data_wait")
_NO_STEP = (*_FEEDING, "other")
GAP_PARTS = ("start", "feeding", "steps", "end")
_IN_TURNS = ("steps",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Launcher and transport with their options, and the number of nodes."""

    launcher: str
    transport: str
    nodes: int
    options: tuple[str, ...] = ()  # in words, those that differ from their defaults

    @property
    def order(self) -> tuple[int, str, str, tuple[str, ...]]:
        return self.nodes, self.launcher, self.transport, self.options


def place_of(trial: Trial) -> Place:
    return Place(
        launcher=trial.launcher,
        transport=trial.transport,
        nodes=trial.placement.nodes,
        options=(*_between_nodes(trial), *trial.launcher_options.labels()),
    )


def _between_nodes(trial: Trial) -> list[str]:
    """Return the options of the links and of the transport, in words."""
    link = [] if trial.link is None else [f"link {trial.link}"]
    return [*link, *trial.transport_options.labels()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPart:
    """A part of a whole trial, mean over the repeats."""

    part: str  # of GAP_PARTS
    first_s: float
    second_s: float
    difference_s: Mean  # first - second


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherGap:
    """One configuration under Spark and under MPI."""

    place: Place  # of the first; `options` are those of both
    first: str  # configuration under Spark
    second: str  # configuration under MPI
    speed: Interval  # of the first over the second, in the steps
    parts: tuple[GapPart, ...]  # of the duration of a trial, in the order of GAP_PARTS


def launcher_gaps(
    rows: Sequence[Row], trials: Mapping[str, Sequence[TrialAnalysis]], rates: RunRates
) -> tuple[LauncherGap, ...]:
    """Compare all pairs that differ in the launcher alone, by place."""
    sides: dict[object, dict[str, Row]] = {}
    for row in rows:
        trial = trials[row.configuration][0].record.trial
        if trial.launcher in (FIRST, SECOND):
            place = replace(place_of(trial), launcher="", options=tuple(_between_nodes(trial)))
            sides.setdefault((node_setup(trial), place), {}).setdefault(trial.launcher, row)
    found = []
    for both in sides.values():
        if len(both) < 2:
            continue
        names = both[FIRST].configuration, both[SECOND].configuration
        speed = rates.ratio(*names)
        if speed is not None:
            trial = trials[names[0]][0].record.trial
            found.append(
                LauncherGap(
                    place=place_of(trial),
                    first=names[0],
                    second=names[1],
                    speed=speed,
                    parts=_parts(trials[names[0]], trials[names[1]]),
                )
            )
    return tuple(sorted(found, key=lambda gap: (gap.place.order, gap.first)))


def _parts(first: Sequence[TrialAnalysis], second: Sequence[TrialAnalysis]) -> tuple[GapPart, ...]:
    """Return the parts over the repeats that both have; none without any."""
    ours, theirs = ({t.repeat: _seconds(t.phases) for t in side} for side in (first, second))
    common = sorted(n for n in ours.keys() & theirs.keys() if ours[n] and theirs[n])
    if not common:
        return ()
    scale_s = sum(sum(theirs[n].values()) for n in common) / len(common)
    takes_turns = any(each.record.dilation > 1 for each in (*first, *second))
    found = []
    for part in _IN_TURNS if takes_turns else GAP_PARTS:
        sides = [[side[n][part] for n in common] for side in (ours, theirs)]
        fast, slow = time_beliefs(sides[::-1], scale_s)
        bounds = (fast - slow).estimate().scaled(scale_s)
        means = [sum(side) / len(common) for side in sides]
        mean = means[0] - means[1]
        found.append(
            GapPart(
                part=part,
                first_s=means[0],
                second_s=means[1],
                difference_s=Mean(
                    mean=mean, low=min(bounds.low, mean), high=max(bounds.high, mean)
                ),
            )
        )
    return tuple(found)


def _seconds(ranks: Sequence[RankPhases]) -> dict[str, float]:
    """Return the seconds of each part of a trial; empty without phases."""
    if not ranks:
        return {}
    whole = mean_of_each([rank.whole for rank in ranks])
    spans = mean_of_each([rank.other_parts for rank in ranks])
    start_s = sum(whole[name] or 0.0 for name in _START)
    start_s += sum(spans.get(name) or 0.0 for name in _START_SPANS)
    feeding_s = sum(whole[name] or 0.0 for name in _FEEDING)
    steps_s = sum(whole[name] or 0.0 for name in STEP_PHASES if name not in _NO_STEP)
    end_s = ranks[0].wall_s - start_s - feeding_s - steps_s
    return {"start": start_s, "feeding": feeding_s, "steps": steps_s, "end": end_s}
