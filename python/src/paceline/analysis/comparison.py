"""What a comparison says, as values; `to_json` is the schema of `paceline compare --json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics import interval_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.compression import LessToSend
    from paceline.analysis.local_global import LocalGlobal
    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval
    from paceline.analysis.trial_analysis import TrialAnalysis

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Two configurations whose difference is inside the noise: the ratio's interval holds 1."""

    workload: str
    faster: str  # configuration, by the medians
    slower: str
    ratio: Interval

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "configurations": [self.faster, self.slower],
            "ratio": self.ratio.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The step phase in which two configurations differ most, seconds a step."""

    phase: str
    faster_s: float
    slower_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A workload's fastest configuration among those that are the same training."""

    workload: str
    configuration: str
    speedup: Interval | None
    tied_with: tuple[str, ...]
    runner_up: str | None  # the fastest that it is not tied with
    over_runner_up: Interval | None
    reason: Difference | None  # against the runner-up

    def to_json(self) -> dict[str, Any]:
        reason = self.reason
        return {
            "workload": self.workload,
            "configuration": self.configuration,
            "speedup": interval_json(self.speedup),
            "tied_with": list(self.tied_with),
            "runner_up": self.runner_up,
            "over_runner_up": interval_json(self.over_runner_up),
            "reason": None
            if reason is None
            else {
                "phase": reason.phase,
                "faster_s": reason.faster_s,
                "slower_s": reason.slower_s,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedTrial:
    """A trial that is not in the table: it failed, or has no outcome."""

    trial_id: str
    configuration: str
    workload: str
    status: str
    exit_code: int | None
    message: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "trial_id": self.trial_id,
            "configuration": self.configuration,
            "workload": self.workload,
            "status": self.status,
            "exit_code": self.exit_code,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run: rows by workload, fastest first, those that are not ranked last."""

    experiment: str
    rows: tuple[Row, ...]
    baselines: Mapping[str, str]  # configuration by workload
    ties: tuple[Tie, ...]
    best: Mapping[str, Best]  # by workload
    unfinished: tuple[UnfinishedTrial, ...]
    flags: tuple[str, ...]
    local_global: tuple[LocalGlobal, ...]
    less_to_send: tuple[LessToSend, ...]
    trials: Mapping[str, tuple[TrialAnalysis, ...]]  # by configuration, in order of repeat
    manifest: Mapping[str, Any]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def rows_of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]

    def row(self, configuration: str) -> Row:
        return next(row for row in self.rows if row.configuration == configuration)

    def to_json(self) -> dict[str, Any]:
        """The schema of the command line contract; keys are only ever added."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "baseline": dict(self.baselines),
            "rows": [row.to_json() for row in self.rows],
            "ties": [tie.to_json() for tie in self.ties],
            "best": {workload: best.to_json() for workload, best in self.best.items()},
            "unfinished": [trial.to_json() for trial in self.unfinished],
            "flags": list(self.flags),
            "local_global": [found.to_json() for found in self.local_global],
            "less_to_send": [found.to_json() for found in self.less_to_send],
        }
