"""Figures of a trial's hosts while it trained: the evidence for causes, from the sidecars' traces.

A figure is None where no host measured it. Rates and counts are sums over the hosts. Time that is
lost is that of the host that loses most, because the others wait for it; other percentages are
means. Pressure (PSI) counts tasks of the whole machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.trial.communication import clock_errors
from paceline.analysis.trial.load import busy_percent
from paceline.analysis.trial.phases import mean_of_each, median_of_each, trial_phases
from paceline.analysis.trial.reading import TrialRecord, read_hosts
from paceline.analysis.trial.steps import GlobalSteps, RankSteps, global_steps, read_steps
from paceline.analysis.trial.stragglers import Straggling, find_straggler
from paceline.analysis.trial.usage import TrainingSamples
from paceline.base.errors import NotComparable
from paceline.measure.records.phases import LABELS
from paceline.plan.trials.trial import Trial

Values = dict[str, float | None]

Unit = Literal["%", "1/s", "bytes/s", "cores", "GHz", "s", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of `host_frame`, as evidence. factor: from the unit of the column."""

    name: str
    label: str
    unit: Unit
    column: str
    factor: float = 1.0

    @property
    def is_sum(self) -> bool:
        return self.unit in ("1/s", "bytes/s", "cores", "")


FIGURES = (
    Figure("cpu_idle", "CPU idle", "%", "cpu_idle_percent"),
    Figure("iowait", "IOWait", "%", "cpu_iowait_percent"),
    Figure("steal", "CPU time stolen by the hypervisor", "%", "cpu_steal_percent"),
    Figure("throttled", "time stopped by the CPU quota", "%", "cgroup_throttled_percent"),
    Figure("run_cores", "CPU time of the run", "cores", "run_cpu_percent", 0.01),
    Figure("threads", "threads of the run", "", "run_threads"),
    Figure(
        "voluntary_switches",
        "voluntary context switches",
        "1/s",
        "run_voluntary_context_switches_per_s",
    ),
    Figure(
        "involuntary_switches",
        "involuntary context switches",
        "1/s",
        "run_involuntary_context_switches_per_s",
    ),
    Figure("load", "run queue (load average, 1 minute)", "", "load_1m"),
    Figure("cpu_pressure", "time in which a task waited for a core", "%", "pressure_cpu_percent"),
    Figure("io_pressure", "time in which a task waited for I/O", "%", "pressure_io_percent"),
    Figure(
        "memory_pressure", "time in which a task waited for memory", "%", "pressure_memory_percent"
    ),
    Figure("minor_faults", "minor page faults", "1/s", "minor_page_faults_per_s"),
    Figure("major_faults", "major page faults", "1/s", "major_page_faults_per_s"),
    Figure("disk_read", "read from disks", "bytes/s", "disk_read_bytes_per_s"),
    Figure("run_read", "read from storage by the run", "bytes/s", "run_read_bytes_per_s"),
    Figure("network_sent", "sent over the network", "bytes/s", "network_sent_bytes_per_s"),
    Figure("frequency", "clock frequency", "GHz", "cpu_frequency_hertz", 1e-9),
)
OTHERS = Figure("others", "other processes and interrupts, of all cores", "%", "")
ALL_FIGURES = (*FIGURES, OTHERS)
FIGURES_BY_NAME = {figure.name: figure for figure in ALL_FIGURES}
HOST_CORES = "host_cores"  # cores of a host, to which percentages refer
HARDWARE_COUNTERS = "not available: the sidecar records no hardware counters (perf_event_open)"
_LEAST = 1e-4  # of its unit; less is a rounding of the computation, as 1.8e-12 % of idle time


def amount(value: float | None, unit: str) -> str:
    """Format a figure with its unit, with three significant digits and without an exponent."""
    if value is None:
        return "not measured"
    if unit == "bytes/s":
        return f"{_digits(value / 1e6)} MB/s"
    if unit == "s":
        return f"{_digits(value)} s" if value >= 1 else f"{_digits(1000 * value)} ms"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if abs(value) < _LEAST:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def trial_evidence(record: TrialRecord) -> Values:
    """Return the figures of one trial by name. Raises DataError if a trace is damaged."""
    hosts = read_hosts(record.files)
    sampled = [TrainingSamples(record, host) for host in hosts if not host.samples.is_empty()]
    by_host = [{each.name: host.mean(each.column) for each in FIGURES} for host in sampled]
    values = {figure.name: _combined(figure, by_host) for figure in FIGURES}
    cores = [host.header["cores"] for host in hosts if host.header.get("cores")]
    return {
        **values,
        OTHERS.name: busy_percent(record, hosts),
        HOST_CORES: max(cores, default=None),
    }


def _combined(figure: Figure, by_host: Sequence[Mapping[str, float | None]]) -> float | None:
    known = [value for host in by_host if (value := host[figure.name]) is not None]
    if not known:
        return None
    if figure.is_sum:
        return figure.factor * sum(known)
    is_lost = figure.unit == "%" and figure.name != "cpu_idle"
    return figure.factor * (max(known) if is_lost else sum(known) / len(known))


# Parts of a step, which add up to the step time in every step, and the trials that they are of
#
# The phases of each rank add up to its step, so any average over ranks adds up, too. The remainder
# is the time between the steps of a rank. Usually the average is over all ranks. Where one rank
# makes the others wait, it is left out: then the others' waiting shows what the straggler costs,
# and their computation is what a step would take without it.

COMPUTATION, REMAINDER = "computation", "remainder"
_CLOCK_S = 1e-5  # a smaller distance between two unix times is rounding
# The phases of each part; none for the remainder.
PHASES_OF = {
    COMPUTATION: ("forward", "backward"),
    **{name: (name,) for name in ("data_wait", "bubble", "comm_wait", "comm_transfer")},
    **{name: (name,) for name in ("optimizer", "other")},
    REMAINDER: (),
}
PART_NAMES = tuple(PHASES_OF)
PART_LABELS = {name: LABELS.get(name, name) for name in PART_NAMES} | {REMAINDER: "between steps"}
# Parts in which the ranks use their cores; in the others they wait or transfer. Causes act on
# their sum.
ON_CORES = "on_cores"
PARTS_ON_CORES = (COMPUTATION, "optimizer", "other", REMAINDER)
CAUSE_PARTS = {
    ON_CORES: PARTS_ON_CORES,
    **{name: (name,) for name in PART_NAMES if name not in PARTS_ON_CORES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that makes the others wait in most of the repeats."""

    rank: int
    host: str | None
    phase: str | None  # in which it spends more time than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """One repeat of a configuration, or the mean over its repeats. Times are per step.

    parts_s: in the order of PART_NAMES; they add up to the step. figures: by the names of
    `evidence.ALL_FIGURES`, None where nothing was measured.
    """

    trial: Trial
    cores: int  # that its ranks may use, on all hosts
    parts_s: NDArray[np.float64]
    figures: Mapping[str, float | None]
    pass_comm_s: float = 0.0  # communication of layers within the passes
    straggler: Straggler | None = None
    delay_s: float = 0.0  # of the straggler

    @property
    def step_s(self) -> float:
        return float(self.parts_s.sum())

    def part_s(self, name: str) -> float:
        """Return the time of a part, or of a sum of CAUSE_PARTS."""
        names = CAUSE_PARTS.get(name, (name,))
        return float(sum(self.parts_s[PART_NAMES.index(each)] for each in names))

    def figure(self, name: str) -> float:
        """Return a figure; NaN if it was not measured."""
        value = self.figures.get(name)
        return float("nan") if value is None else value

    def per_step(self, name: str) -> float:
        """Return what a rate per second makes in a step."""
        return self.figure(name) * self.step_s

    def share_s(self, name: str) -> float:
        """Return what a percentage of the time makes in a step."""
        return self.figure(name) / 100 * self.step_s


def mean_measurement(repeats: Sequence[StepMeasurement]) -> StepMeasurement:
    return replace(
        repeats[0],
        parts_s=np.mean([each.parts_s for each in repeats], axis=0),
        figures=mean_of_each([each.figures for each in repeats]),
        pass_comm_s=float(np.mean([each.pass_comm_s for each in repeats])),
        delay_s=float(np.mean([each.delay_s for each in repeats])),
    )


class ExplainedTrials:
    """The trials of one configuration, read once for all pairs that it is in.

    Raises NotComparable if none has a step after the warm-up, DataError for a damaged file.
    """

    def __init__(self, name: str, records: Sequence[TrialRecord]) -> None:
        self.name = name
        found = [_TrialSteps(record) for record in records if record.finished]
        self._trials = {each.trial.repeat: each for each in found if each.has_steady}
        if not self._trials:
            raise NotComparable(
                f"{name}: expected a finished trial with steps after the warm-up, found none; "
                "repeat it with more steps (`--set workloads.0.max_steps=N`)"
            )
        self.straggler = self._find_straggler()
        self.outside_s = median_of_each([each.outside_s for each in self._trials.values()])

    def repeats(self, *, without_latest: bool) -> dict[int, StepMeasurement]:
        """Return each repeat.

        without_latest: average over all ranks but the one with the largest delay.
        """
        return {
            repeat: each.measurement(self.straggler, without_latest=without_latest)
            for repeat, each in self._trials.items()
        }

    def _find_straggler(self) -> Straggler | None:
        named = [
            each.verdict
            for each in self._trials.values()
            if each.verdict is not None and each.verdict.straggler is not None
        ]
        ranks = [verdict.straggler for verdict in named]
        most = max(ranks, key=ranks.count, default=None)
        if most is None or 2 * ranks.count(most) <= len(self._trials):
            return None
        first = next(verdict for verdict in named if verdict.straggler == most)
        return Straggler(rank=most, host=first.ranks[0].host, phase=first.phase)


class _TrialSteps:
    """The means over the steps of one trial, and the rank that makes the others wait.

    The steps are not kept: a run may have thousands of trials.
    """

    def __init__(self, record: TrialRecord) -> None:
        """Read the trial. Without a step after the warm-up, it has no means."""
        self.trial = record.trial
        self.verdict: Straggling | None = None  # None in a pipeline: stages do different work
        steps = read_steps(record)
        common = global_steps(record, steps)
        self.has_steady = bool(common.steady.any())
        if not self.has_steady:
            return
        if record.trial.placement.stages == 1:
            self.verdict = next(iter(find_straggler(record, steps, clock_errors(record))), None)
        self._late = () if self.verdict is None else self.verdict.ranks
        self._latest = self._late[0].rank if self._late else None
        self._figures = trial_evidence(record)
        self._cores = _cores(record)
        self._pass_comm_s = float(np.nan_to_num(steps.steady()["pass_comm_s"]).mean())
        self._parts_s = {rank: _parts_s(steps, common, rank) for rank in {None, self._latest}}
        # the phases of the whole trial, mean over the ranks
        self.outside_s = mean_of_each([rank.whole for rank in trial_phases(record, steps)])

    def measurement(self, straggler: Straggler | None, *, without_latest: bool) -> StepMeasurement:
        """Return the means over the steps after the warm-up."""
        delays_s = [
            each.delay_s.mean for each in self._late if straggler and each.rank == straggler.rank
        ]
        return StepMeasurement(
            trial=self.trial,
            cores=self._cores,
            parts_s=self._parts_s[self._latest if without_latest else None],
            figures=self._figures,
            pass_comm_s=self._pass_comm_s,
            straggler=straggler,
            delay_s=sum(delays_s),
        )


def _cores(record: TrialRecord) -> int:
    """Return the cores that the ranks may use, on all hosts, at most those allocated."""
    by_host: dict[str, set[int]] = {}
    for rank in record.ranks:
        if rank.environment is not None:
            by_host.setdefault(rank.environment.host, set()).update(rank.environment.affinity)
    allowed = sum(map(len, by_host.values()))
    planned = record.trial.placement.cores
    return min(allowed, planned) if allowed else planned


def _parts_s(steps: RankSteps, common: GlobalSteps, left_out: int | None) -> NDArray[np.float64]:
    """Return the mean of each part over the steady steps and the ranks but one."""
    kept = [number for number, rank in enumerate(steps.ranks) if rank != left_out]
    chosen = np.searchsorted(steps.step, common.step[common.steady])
    values = np.zeros((len(PART_NAMES), len(chosen)))
    for row, phases in enumerate(PHASES_OF.values()):
        for phase in phases:
            seconds = steps[f"{phase}_s"][kept][:, chosen]
            values[row] += np.nan_to_num(seconds).mean(axis=0)
    values[-1] = _walls_s(steps, common, kept)[common.steady] - values.sum(axis=0)
    means: NDArray[np.float64] = values.mean(axis=1)
    return means


def _walls_s(steps: RankSteps, common: GlobalSteps, kept: list[int]) -> NDArray[np.float64]:
    """Return the time of each common step from end to end, mean over the ranks.

    The end of a step is that of each rank, not of the last one: ranks that end at different
    times would otherwise add to a few steps what is no part of them. A step that follows an
    evaluation begins with its own start.
    """
    places = np.searchsorted(steps.step, common.step)
    ended = steps["ended_s"][kept][:, places]
    began = steps["started_s"][kept][:, places]
    last_ended = common.ended_unix_s
    follows = last_ended[1:] - common.time_s[1:] - last_ended[:-1] < _CLOCK_S
    began[:, 1:] = np.where(follows, ended[:, :-1], began[:, 1:])
    walls: NDArray[np.float64] = (ended - began).mean(axis=0)
    return walls
