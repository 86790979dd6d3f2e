"""`local`: start ranks on this node with `python -m paceline.launchers.local`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.job.checks import check_cores, check_dataset
from paceline.job.environment import rank_environment
from paceline.launchers.base import OWN_FAILURE, Command

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles


class LocalLauncher:
    """No launcher at all: what a user would start by hand on one node."""

    name = "local"

    def preflight(self, trial: Trial) -> None:
        check_dataset(trial.training.dataset)
        check_cores(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        argv = (sys.executable, "-m", "paceline.launchers.local", "--trial", str(files.trial))
        return Command(argv=argv, environment=rank_environment(trial))

    def failed_rank(self, log_text: str) -> int | None:
        found = OWN_FAILURE.search(log_text)
        return int(found.group(1)) if found else None
