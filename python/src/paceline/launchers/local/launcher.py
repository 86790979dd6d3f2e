"""`local`: start ranks on this node with `python -m paceline.launchers.local`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.job.checks import check_cores, check_inputs
from paceline.job.environment import rank_environment
from paceline.launchers.base import Command, first_named

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles


class LocalLauncher:
    """Starts plain processes on one node, as a user would by hand."""

    def preflight(self, trial: Trial) -> None:
        check_inputs(trial)
        check_cores(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        argv = (sys.executable, "-m", "paceline.launchers.local", "--trial", str(files.trial))
        return Command(argv=argv, environment=rank_environment(trial))

    def failed_rank(self, log_text: str) -> int | None:
        return first_named((), log_text)
