"""Gradient compression: how the gradients of one bucket are summed over ranks."""
