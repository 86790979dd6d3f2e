"""From records to statements: checks, statistics, comparisons, causes.

1. `trial.reading` finds the files of each trial of a run;
2. `trial_analysis` computes steps, phases, use of hosts and the equivalence check of one trial;
3. `compare.run` puts the repeats together as rows, with intervals from `statistics`;
4. `compare.ranking` and `compare.verdict` say what is fastest, and what is not comparable;
5. `explain` and `predict` say why, and what other nodes would bring.

Read first: `compare.run.compare_run`.

This room meets training and telemetry only through their records; it imports neither torch nor
plotly. `import scipy` is cheap: scipy imports its parts when they are first used.
"""
