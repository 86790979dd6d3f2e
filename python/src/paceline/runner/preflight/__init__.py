"""Checks between hosts before a run: a probe on each host, and the conclusions from its answers."""
