"""The version of Paceline. Every layer may import it."""

__version__ = "0.4.0"
