"""`paceline init`: a commented spec for the user to edit."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path), default="experiment.toml")
def command(file: Path) -> None:
    """Write a commented spec to edit.

    FILE is the spec to write, which must not exist; default: experiment.toml.
    """
    try:
        with file.open("x", encoding="utf-8") as spec:
            spec.write(template())
    except FileExistsError as error:
        raise click.UsageError(
            f"{file}: expected a new file, it exists; choose another name"
        ) from error
    except OSError as error:
        raise click.UsageError(
            f"{file}: expected a file that can be written, got: {error.strerror or error}; choose "
            "another name"
        ) from error
    print(f"{file}: edit it, then try it: paceline plan {file}; paceline run {file}")


def template() -> str:
    """Return the commented spec."""
    return (resources.files("paceline.cli") / "template.toml").read_text(encoding="utf-8")
