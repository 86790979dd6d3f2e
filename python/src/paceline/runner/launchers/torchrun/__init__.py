"""Launch ranks with torchrun."""
