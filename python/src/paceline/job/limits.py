"""The time limit of a whole trial."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.job.job import Job
    from paceline.plan.trial import Trial


def trial_timed_out(trial: Trial) -> TimedOut:
    """Return the error of a trial that took longer than `limits.trial_s`."""
    return TimedOut(
        f"not done within its limit of {trial.limits.trial_s:g} s; raise limits.trial_s"
    )


@contextmanager
def trial_limit(job: Job, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` from another thread after `limits.trial_s`, unless the block has ended.

    Do nothing under `paceline run`, which enforces the limit itself.
    """
    timer = threading.Timer(job.trial.limits.trial_s, end)
    timer.daemon = True
    if not job.supervised:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
