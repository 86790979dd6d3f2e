"""Replicas in processes that share memory."""
