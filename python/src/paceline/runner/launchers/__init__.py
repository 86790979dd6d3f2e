"""Launchers: who starts the ranks of a trial."""
