"""Writes the dashboards: `python -m monitoring.dashboards`, from the root of the repository.

Panels and queries stand in `run`, `compare` and `cluster`, one dashboard each; how a panel is built
stands in `panels`, the parts of queries in `queries`. grafana-foundation-sdk has its home here.
"""
