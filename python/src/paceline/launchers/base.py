"""What a launcher is: trial -> command, the checks before it, and the rank that its log blames."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles


# How our own job scripts name the rank that failed first, see paceline.job.messages.
OWN_FAILURE = re.compile(r"^paceline: rank (\d+) of \d+ (?:failed: )?(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments, and what is set for it on top of our own environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """A line that can be pasted into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(settings + [shlex.quote(word) for word in self.argv])


class Launcher(Protocol):
    """Starts the ranks of a trial."""

    name: str

    def preflight(self, trial: Trial) -> None:
        """Raise EnvironmentLacks if the trial cannot run here; returns within 5 seconds."""
        ...

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        """What starts the trial. Raises EnvironmentLacks if the launcher is not installed."""
        ...

    def failed_rank(self, log_text: str) -> int | None:
        """The rank that the launcher's own log names as the first to fail."""
        ...
