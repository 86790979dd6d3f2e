"""Command line: `paceline …`. A verb has a module of its own, which is loaded when the verb runs.

Data goes to standard output, logs and progress to standard error.
"""

from paceline.cli.app import main

__all__ = ["main"]
