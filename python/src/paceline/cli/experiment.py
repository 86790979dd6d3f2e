"""The experiment of `paceline run` and `plan`: a spec with changes, or a user's own script."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import count, list_option, seed
from paceline.cli.script import ScriptOptions, is_script, script_experiment
from paceline.spec import Spec, load_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An experiment as the command line asks for it."""

    spec: str | None
    script_arguments: tuple[str, ...]
    only: tuple[str, ...]
    repeats: str | None
    settings: tuple[str, ...]
    script: ScriptOptions

    @property
    def is_empty(self) -> bool:
        """Tell whether neither a spec nor a change of it is given."""
        given = (self.spec, self.only, self.repeats, self.settings, self.script.given)
        return not any(given)

    def load(self) -> Spec:
        """Return the checked spec with all changes.

        Raises UsageError with every fault of the spec, click.UsageError for wrong words.
        """
        if self.spec is None:
            raise click.UsageError(
                "expected SPEC (a TOML file or the name of a shipped experiment, see `paceline "
                "list experiments`) or a script (FILE.py), got neither"
            )
        settings = list(self.settings)
        if self.repeats is not None:
            number = self.repeats
            settings.append(f"repeats={number if number.isdecimal() else json.dumps(number)}")
        if self.only:
            settings.append(f"only={json.dumps(self.only, ensure_ascii=False)}")
        if is_script(self.spec):
            source: Any = script_experiment(Path(self.spec), self.script_arguments, self.script)
            return load_spec(source, settings)
        if self.script.given:
            raise click.UsageError(
                f"{', '.join(self.script.given)}: expected only with a script (FILE.py); write it "
                "into the spec"
            )
        return load_spec(self.spec, settings)


class ExperimentCommand(click.Command):
    """A command whose words belong to the user's script from the script's name on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options on both sides of SPEC, but only those before a script."""
        ctx.allow_interspersed_args = False
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        first = values.get("spec")
        is_of_script = isinstance(first, str) and is_script(first)
        ctx.allow_interspersed_args = not is_of_script
        rest = super().parse_args(ctx, args)
        unexpected = ctx.params["script_arguments"]
        if unexpected and not is_of_script:
            ctx.fail(
                f"Got unexpected extra arguments ({' '.join(unexpected)}); only a script (FILE.py) "
                "has arguments."
            )
        return rest


_OPTIONS = (
    click.argument("spec", metavar="[SPEC | SCRIPT.py", required=False),
    click.argument("script_arguments", metavar="[ARGS...]]", nargs=-1, type=click.UNPROCESSED),
    list_option(
        "--only", "PATTERN,…",
        "Run only the configurations whose names match these shell patterns, and the baseline "
        "(`paceline plan SPEC` shows the names).",
    ),
    click.option(
        "--repeats", metavar="N|auto",
        help='Run each configuration N times; "auto": until the ranking is decided, at most '
        "max_repeats times.",
    ),
    click.option(
        "--set", "settings", metavar="KEY=VALUE", multiple=True,
        help="Set a key of the spec to a TOML value, as in training.max_steps=8 or "
        "workloads.0.global_batch=16; may be repeated.",
    ),
    list_option("--launcher", "NAME,…", "Script: launchers of several ranks; default: torchrun."),
    list_option("--transport", "NAME,…", "Script: transports between ranks; default: gloo."),
    click.option(
        "--ranks", "--nproc-per-node", metavar="N", type=count,
        help="Script: ranks on this node; default: one for each core.",
    ),
    list_option(
        "--local-strategy", "NAME,…", "Script: local strategies; default: all that run scripts."
    ),
    click.option(
        "--max-steps", metavar="N", type=count,
        help="Script: end it after N optimiser steps.",
    ),
    click.option(
        "--warmup-steps", metavar="N", type=seed,
        help="Script: first steps, excluded from measurements.",
    ),
    click.option(
        "--samples-per-step", metavar="N", type=count,
        help="Script: samples of all ranks together in a step, if the script does not report them.",
    ),
)  # fmt: skip


def takes_experiment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options of an experiment, which the function gets as a `Request`."""

    @functools.wraps(function)
    def with_request(**values: Any) -> Any:
        options = {field.name: values.pop(field.name) for field in fields(ScriptOptions)}
        own = {f.name: values.pop(f.name) for f in fields(Request) if f.name != "script"}
        return function(Request(**own, script=ScriptOptions(**options)), **values)

    decorated: Callable[..., Any] = with_request
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
