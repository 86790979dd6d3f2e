"""State of a run at one moment, for the live view."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.records.phases import Phases
    from paceline.records.rows import HostSample, RankSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """State of one rank; None if not reported yet."""

    rank: int
    host: str | None
    state: str  # starting, running, done, failed
    steps: int
    step_s: float | None  # mean of the last steps
    waiting_share: float | None  # of a step: for other ranks
    sample: RankSample | None  # the newest
    cpu_percent: float | None = None  # of one core, over the last ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """Newest sample of one host, with shares of the time since the sample before.

    cpu: share of all CPU time by mode. pressure: share of the time in which a task waited.
    """

    host: str
    sample: HostSample
    cpu: Mapping[str, float] = field(default_factory=dict)
    pressure: Mapping[str, float] = field(default_factory=dict)
    gaps: int = 0  # in its trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """State of the running trial."""

    trial_id: str
    number: int | None  # as planned, from 1
    steps: int  # that every rank has ended
    steps_planned: int | None
    epoch: int | None
    samples_per_s: float | None  # over the last steps
    loss: float | None  # of the last step
    rates: tuple[float, ...]  # images a second, by step, newest last
    losses: tuple[float, ...]
    phases: Phases  # of a mean recent step, over the ranks
    ranks: tuple[RankView, ...]
    hosts: tuple[HostView, ...]
    straggler: str | None  # a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A whole run directory."""

    name: str
    stage: str  # "tune" while the search before the trials goes on, else ""
    planned: int | None
    done: int
    failed: int
    elapsed_s: float | None
    trial: TrialView | None
    ended: bool
    message: str | None  # of the trial that failed last
