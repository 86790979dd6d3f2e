"""Gradient accumulation as a local strategy for Paceline."""
