"""Watching runs: Prometheus and Grafana on a run directory, and a live view in a terminal."""
