"""Checks whether two trials trained the same thing."""
