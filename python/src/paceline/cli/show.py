"""`paceline show`: the spec of a shipped experiment, to read or to edit."""

from __future__ import annotations

import sys

import click

from paceline.plan.spec.loading import shipped_experiments
from paceline.plan.spec.sentences import did_you_mean


@click.command("show")
@click.argument("experiment", metavar="EXPERIMENT")
def command(experiment: str) -> None:
    """Print the spec of a shipped experiment.

    To change it, write it into a file: paceline show quickstart > my.toml
    """
    shipped = shipped_experiments()
    if experiment not in shipped:
        raise click.UsageError(
            f"{experiment!r}: expected one of the shipped experiments ({', '.join(shipped)})."
            f"{did_you_mean(experiment, shipped)}"
        )
    sys.stdout.write(shipped[experiment])
