"""From when to when each dashboard looks: as somebody would who watches the run's end.

*Run* shows one trial up to its last step, or its failure, *Cluster* all trials up to the last one's
last step, *Compare* all of them whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from monitoring.pictures.board import Window

from paceline.analysis.reading import load_trial
from paceline.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.reading import TrialRecord
    from paceline.records.layout import RunFiles

_BEFORE_S = 3.0  # so that the first mark does not lie on the edge
_POINTS = 420  # of a curve, at most: the pixels of a panel


def windows(run: RunFiles, label: str, trial_id: str | None) -> Mapping[str, Window]:
    """By the dashboard's file name. `label`: the run's name in metrics. `trial_id`: which one
    *Run* shows; else that with most ranks.

    Raises DataError where no trial has both steps and a trace, UsageError for a trial that is not
    one of them.
    """
    records = {}
    for name, files in run.trials():
        record = load_trial(files)
        if record.ranks and record.ranks[0].steps and all(h.samples for h in record.hosts):
            records[name] = record
    if not records:
        raise DataError(f"{run.root}: expected a trial with steps and a trace; there is none")
    if trial_id is not None and trial_id not in records:
        raise UsageError(f"--trial {trial_id}: expected one of {', '.join(records)}")
    most = max(records, key=lambda name: len(records[name].ranks))
    one = records[trial_id or most]
    first = min(_started_unix_s(r) for r in records.values()) - _BEFORE_S
    last_step = max(_last_step_unix_s(r) for r in records.values())
    last_sample = max(map(_last_sample_unix_s, records.values()))
    return {
        "run": _window(label, _started_unix_s(one) - _BEFORE_S, _end_unix_s(one)),
        "compare": _window(label, first, last_sample),
        "cluster": _window(label, first, last_step),
    }


def _window(label: str, start_unix_s: float, end_unix_s: float) -> Window:
    step_s = max(1, math.ceil((end_unix_s - start_unix_s) / _POINTS))
    # in whole steps, so that the end itself is asked for
    start_unix_s = end_unix_s - step_s * math.ceil((end_unix_s - start_unix_s) / step_s)
    return Window(run=label, start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_s=step_s)


def _started_unix_s(record: TrialRecord) -> float:
    return min(host.samples[0].unix_s for host in record.hosts if host.samples)


def _end_unix_s(record: TrialRecord) -> float:
    """The last step; of a trial that failed the last sample, which tells of it."""
    failed = record.outcome is None or record.outcome.status != "ok"
    return _last_sample_unix_s(record) if failed else _last_step_unix_s(record)


def _last_sample_unix_s(record: TrialRecord) -> float:
    return max(host.samples[-1].unix_s for host in record.hosts)


def _last_step_unix_s(record: TrialRecord) -> float:
    """Of rank 0, whose clock all imported times have."""
    return max(step.started_unix_s + step.step_s for step in record.ranks[0].steps)
