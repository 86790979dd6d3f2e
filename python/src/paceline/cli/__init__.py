"""Arguments and exit codes: `paceline …`.

Data goes to standard output, logs and progress to standard error.
"""

from paceline.cli.main import main

__all__ = ["main"]
