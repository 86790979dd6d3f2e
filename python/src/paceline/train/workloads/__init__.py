"""Workloads: model, data set and training values."""
