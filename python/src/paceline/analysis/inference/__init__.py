"""Statistics of speeds and times: intervals, comparison of configurations, and tests.

Functions take arrays and return frozen values. They know nothing of runs, trials and files. All
decisions "A differs from B" of the product come from here.

- `intervals`: means, paired differences, two runs, and the steps of a single trial.
- `layout`: the configurations of one run, repeat by repeat, and the noise of each.
- `fastest`: which configurations are separated from the fastest, and which tie with it.
- `looks`: levels for testing after every repeat (`repeats = "auto"`).
- `ranks`: rank correlation with a permutation test.
"""
