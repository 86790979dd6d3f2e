"""Explain why one configuration is slower than another: parts that add up, and their causes."""
