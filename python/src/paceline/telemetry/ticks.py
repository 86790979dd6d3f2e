"""What one tick of a host's sidecar found out: for the trace, and for whoever scrapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.telemetry.catalogue import PHASES, STEP_SECONDS_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.records.rows import HostSample, RankSample


@dataclass(slots=True, kw_only=True)
class OperationTotals:
    """One kind of operation of one rank's process groups, since the rank started."""

    operations: int = 0
    payload_bytes: int = 0
    sent_bytes: int | None = None  # None where the transport does not count
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """How far one rank has come, summed over its steps so far; read from the rows it writes."""

    rank: int
    steps: int = 0
    images: int = 0
    epoch: int | None = None  # of the last step; None before the first
    loss: float | None = None  # mean over the rank's images in the last step that has any
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    step_s_sum: float = 0.0
    # steps that took at most as long as each bound of STEP_SECONDS_BUCKETS: not cumulative
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS_BUCKETS) + 1))
    last_step_ended_unix_s: float | None = None
    operations: dict[str, OperationTotals] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTick:
    """One run, as seen on this host."""

    run: str  # labels.RunLabels
    facts: Mapping[str, str]  # RUN_FACTS
    launched_unix_s: float
    sample: HostSample  # with this run's trees in its run_* fields
    ranks: tuple[RankSample, ...]
    # Asks how far the ranks on this host have come: what they have written is read by whoever wants
    # to know, not at every tick.
    training: Callable[[], tuple[TrainingProgress, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTick:
    """The host and all runs on it at one moment."""

    sample: HostSample  # its run_* fields say nothing
    watches: tuple[WatchTick, ...]
    interval_s: float
    samples: int  # taken since the sidecar started
    missed_samples: int
    restarts: int  # of sidecars of this host that were found dead, for the runs watched now
