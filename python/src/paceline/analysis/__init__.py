"""Checks, statistics and comparisons: from the files of a run to its results.

Meets the training and the telemetry only through their records; imports neither torch nor plotly.
"""
