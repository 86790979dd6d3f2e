"""Comparisons of different runs."""
