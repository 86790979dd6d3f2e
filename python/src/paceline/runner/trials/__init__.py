"""`paceline run`: spec, data sets, plan, preflight, trials, equivalence.

A run can be interrupted at any moment. Finished trials stay; `resume` moves an unfinished or failed
trial aside and runs it again.

- `experiment`: the stages in order, and whether `repeats = "auto"` needs another repeat;
- `planning`: a spec's data sets and trials;
- `copies`: the copy at a remote place;
- `directory`: the run directory: new, resumed, or refused;
- `disk`: the estimated disk use, and the warning if it is too much;
- `preview`: steps, duration, faults and warnings before the first trial;
- `run_trial`: one trial from its command to its outcome;
- `nodes`: what nodes need and send that do not see the run directory;
- `failure_injection`: the failures that a spec asks for;
- `attach`: a command of the user whose ranks record themselves;
- `measure_more`: shares of the batch;
- `equivalence`: the comparison of tensors with the baseline;
- `verify_script`: the layouts of a script.
"""

from paceline.runner.trials.planning import Progress

__all__ = ["Progress"]  # a public type
