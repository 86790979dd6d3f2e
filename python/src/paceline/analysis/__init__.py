"""Checks, statistics, comparison: from the files of a run to what may be said about it.

Meets the training and the telemetry only through their records; imports neither torch nor plotly.
"""
