"""Workload `complex-small`."""
