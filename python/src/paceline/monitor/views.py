"""State of a run at one moment, for the live view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.records.phases import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """State of one rank; None if not reported yet."""

    rank: int
    host: str | None
    state: str  # starting, running, done, failed
    steps: int
    step_s: float | None  # mean of the last steps
    waiting_share: float | None  # of a step: for other ranks
    sample: Mapping[str, Any] | None  # the newest row of `analysis.host_frames.rank_frame`


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """State of one host."""

    host: str
    sample: Mapping[str, Any]  # the newest row of `analysis.host_frames.host_frame`
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
    rates: tuple[float, ...]  # samples per second, by step, newest last
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
