"""Workload `resnet101`."""
