"""Predict configurations that were not run: other numbers of nodes, links and batches."""
