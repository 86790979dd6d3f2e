"""The progress of a run: its interface, and the preview that begins it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import Outcome
<<<<<<< HEAD


_MINUTE_S, _HOUR_S = 60, 3600


def duration(seconds: float) -> str:
    """Format an expected duration with its unit."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on disk, without the traces of sidecars; these in bytes per second of training."""

    kept_bytes: float  # when the trials have ended well
    training_bytes: float  # more than that while a trial trains
    trace_kept_bytes_per_s: float = 0.0
    trace_training_bytes_per_s: float = 0.0

    def peak_bytes(self, training_s: float = 0.0) -> float:
        """Return the largest use of a run whose trials train for so long each."""
        return self.kept_bytes + self.training_bytes + self.trace_training_bytes_per_s * training_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPreview:
    """A configuration before it runs. None: not known."""

    configuration: str
    workload: str
    nodes: int
    ranks: int
    global_batch: int
    samples: int | None  # to train on
    steps: int | None
    warmup_steps: int
    repeats: int  # at most, with `repeats = "auto"`
    expected_s: float | None  # of all repeats, as in the latest run of the same spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A run before it starts."""

    configurations: tuple[ConfigurationPreview, ...]  # of each workload, the baseline first
    expected_s: float | None  # None unless all configurations are known
    disk: DiskUse
    faults: tuple[str, ...]  # each once, although it would hit every trial
    warnings: tuple[str, ...]

    @property
    def trials(self) -> int:
        return sum(each.repeats for each in self.configurations)

    @property
    def summary(self) -> str:
        """The size of the run as one line."""
        trials, configurations = self.trials, len(self.configurations)
        counted = (
            f"{trials} trial{'s' if trials != 1 else ''} of "
            f"{configurations} configuration{'s' if configurations != 1 else ''}"
        )
        if self.expected_s is None:
            return f"{counted}; duration unknown, because no earlier run of this spec was found"
        return f"{counted}; about {duration(self.expected_s)}, as in the latest run of this spec"

    def check(self) -> None:
        """Raise UsageError with all faults that would make every trial fail or useless."""
        if self.faults:
            raise UsageError("\n".join(self.faults))
=======
>>>>>>> tun-2


class Progress(Protocol):
    """Receives the progress of a run; all methods return at once."""

    def stage(self, text: str) -> None: ...
    def planned(self, summary: str) -> None: ...
    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...
