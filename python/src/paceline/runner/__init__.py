"""Starts and supervises what was planned.

1. `trials.experiment.run` goes through the trials of a plan, in seeded random order;
2. `preflight` and the launchers say what a machine lacks before anything starts;
3. `launchers` turns a trial into a command and supervises its processes;
4. `job` is the program of that command: it finds rank and peers, and calls `train`;
5. `trials.run_trial` reads how it ended, and writes the outcome.

`tune` searches with trials, `lab` makes hosts on one machine, `attach` records a command of the
user. The name is not `run`, because `paceline.run` is the public function.

Read first: `trials.experiment.run`.
"""
