"""Workload `gpt-small`."""
