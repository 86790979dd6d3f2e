"""Local SGD: average weights every few steps."""
