"""Hogwild: processes of a node update shared weights without locks."""
