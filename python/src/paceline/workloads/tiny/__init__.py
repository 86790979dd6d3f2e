"""Workload `tiny`."""
