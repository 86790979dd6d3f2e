"""Workload `deeplab`."""
