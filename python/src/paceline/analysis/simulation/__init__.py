"""Simulation of collective operations on networks with contention, by SimGrid."""
