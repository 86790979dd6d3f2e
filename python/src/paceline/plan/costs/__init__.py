"""Costs by formula: messages of collectives, links and factors. No measurement."""
