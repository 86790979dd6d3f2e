"""Workload `simple-big`."""
