"""`paceline run`: spec, data sets, plan, preflight, trials, equivalence.

A run can be interrupted at any moment. Finished trials stay; `resume` moves an unfinished or failed
trial aside and runs it again.

- `experiment`: the stages in order;
- `planning`: a spec's data sets and trials;
- `copies`: the copy at a remote place;
- `directory`: the run directory: new, resumed, or refused;
- `disk`: the estimated disk use, and the warning if it is too much;
- `preview`: steps, duration, faults and warnings before the first trial;
- `run_trial`: one trial from its command to its outcome;
- `attach`: a command of the user whose ranks record themselves;
- `measure_more`: one more block of repeats, shares of the batch, and trials in turn;
- `equivalence`: the comparison of tensors with the baseline.
"""

from paceline.runner.attach import Attached, attach, name_of_command
from paceline.runner.copies import copied_at_end
from paceline.runner.directory import (
    check_run_dir,
    default_run_dir,
    made_run_dir,
    only_runner,
    recorded_spec,
)
from paceline.runner.disk import DiskUse
from paceline.runner.equivalence import check_equivalences
from paceline.runner.experiment import preflight, run
from paceline.runner.planning import Planned, Progress, make_datasets, manifest_of, plan
from paceline.runner.preview import ConfigurationPreview, Preview, preview_run
from paceline.runner.run_trial import (
    failure_of,
    failure_of_all,
    how_to_continue,
    is_finished,
    run_followed,
    run_trial,
)

__all__ = [
    "Attached",
    "ConfigurationPreview",
    "DiskUse",
    "Planned",
    "Preview",
    "Progress",
    "attach",
    "check_equivalences",
    "check_run_dir",
    "copied_at_end",
    "default_run_dir",
    "failure_of",
    "failure_of_all",
    "how_to_continue",
    "is_finished",
    "made_run_dir",
    "make_datasets",
    "manifest_of",
    "name_of_command",
    "only_runner",
    "plan",
    "preflight",
    "preview_run",
    "recorded_spec",
    "run",
    "run_followed",
    "run_trial",
]
