"""Costs by formula: messages of collectives, links, factors and checkpoints. No measurement."""
