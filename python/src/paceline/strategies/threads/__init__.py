"""Replicas in threads of one process."""
