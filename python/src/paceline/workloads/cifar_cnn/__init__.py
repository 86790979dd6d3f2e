"""Workload `cifar-cnn`."""
