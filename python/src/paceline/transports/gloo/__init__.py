"""Gloo."""
