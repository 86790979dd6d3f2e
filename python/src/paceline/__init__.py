"""Paceline: which way of distributing this training is fastest here, by how much, and why?"""

__version__ = "0.2.0"
