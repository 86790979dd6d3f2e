"""Checks, statistics and comparisons: from the files of a run to its results.

Meets the training and the telemetry only through their records; imports neither torch nor plotly.
`import scipy` is cheap: scipy imports `scipy.special` and its other parts when they are first used.
"""
