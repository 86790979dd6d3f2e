"""The command side of a launcher: trial -> command, the checks before it, and its log."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.extensions import LAUNCHERS, load_object
from paceline.plan.spec.secret_values import without_secrets
from paceline.plan.trials.trial import Trial


@dataclass(frozen=True, slots=True)
class TemporaryFolders:
    """Folders on this host that exist until the end of the trial."""

    disk: Path
    memory: Path  # in shared memory if there is some


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments, and the variables to set on top of our own environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # Returns the variables by which the program puts its temporary files into these folders.
    temporary: Callable[[TemporaryFolders], Mapping[str, str]] = lambda _folders: {}
    # Returns the arguments by which the program exports these variables to ranks on other hosts.
    exports: Callable[[Iterable[str]], Iterable[str]] = lambda _names: ()

    def with_variables(self, variables: Mapping[str, str]) -> Command:
        """Return the command with further variables, which the job side finds in every rank."""
        program, *arguments = self.argv
        return dataclasses.replace(
            self,
            argv=(program, *self.exports(variables), *arguments),
            environment={**self.environment, **variables},
        )

    def shell_line(self) -> str:
        """Return a line that can be pasted into a shell; secrets of a site's JVMs are left out."""
        settings = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join(settings + [_quoted(word) for word in self.argv])


def _quoted(word: str) -> str:
    return shlex.quote(without_secrets(word))


class Launcher(Protocol):
    """Starts the ranks of a trial: the implementation that a LauncherDescriptor names."""

    def preflight(self, trial: Trial) -> None:
        """Raise EnvironmentLacks if the trial cannot run here; return within 5 seconds."""
        ...

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        """Return the command that runs the trial's job side with `--trial` and `files.trial`.

        The command ends when the last rank has ended. If ranks on other hosts do not inherit its
        environment, `Command.exports` is set. Raises EnvironmentLacks if the launcher is not
        installed.
        """
        ...

    def failed_rank(self, log_text: str) -> int | None:
        """Return the rank that the launcher's own log names as the first to fail.

        It is asked only if neither a rank nor the job side has written why the trial failed.
        """
        ...


def launcher_for(name: str) -> Launcher:
    """Return the launcher of that name. Raises UsageError for an unknown name."""
    launcher: Launcher = load_object(LAUNCHERS.get(name).implementation)()
    return launcher


def first_named(patterns: Iterable[re.Pattern[str]], log_text: str) -> int | None:
    """Return the rank in the first group of the first pattern that the log contains."""
    found = (pattern.search(log_text) for pattern in patterns)
    return next((int(match.group(1)) for match in found if match), None)
