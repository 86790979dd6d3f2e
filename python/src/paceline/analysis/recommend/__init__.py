"""Recommend a configuration for a goal, and the measurement that helps most to decide."""
