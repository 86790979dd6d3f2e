"""Workloads: model, data set and training values, one folder each."""
