"""Workload `east`."""
