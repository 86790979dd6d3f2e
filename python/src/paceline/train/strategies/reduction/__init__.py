"""Reduce gradients of replicas: parameter shards, sufficient factors, buckets."""
