"""`local`: `python -m paceline.job`, which runs a single rank itself and several as children."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.launch.base import OWN_FAILURE, Command
from paceline.launch.checks import check_cores, check_dataset
from paceline.launch.environment import rank_environment

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
        argv = (sys.executable, "-m", "paceline.job", "--trial", str(files.trial))
        return Command(argv=argv, environment=rank_environment(trial))

    def failed_rank(self, log_text: str) -> int | None:
        found = OWN_FAILURE.search(log_text)
        return int(found.group(1)) if found else None
