"""The experiment of `paceline run` and `plan`: a spec with changes, or a user's own script."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from paceline.base.errors import UsageError
from paceline.cli.options import all_of, count, list_option, seed
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS
from paceline.plan.spec.loading import Spec, load_spec
from paceline.plan.spec.models import SCHEMA, name_of_script
from paceline.plan.spec.values import BASELINE
from paceline.plan.spec.workloads import module_file

_LAUNCHERS, _TRANSPORTS = ("torchrun",), ("gloo",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """Options of a run of a script; empty or None: its default."""

    launcher: Sequence[str] = ()
    transport: Sequence[str] = ()
    ranks: int | None = None
    local_strategy: Sequence[str] = ()
    max_steps: int | None = None
    warmup_steps: int | None = None
    samples_per_step: int | None = None
    vary: Sequence[tuple[str, ...]] = ()  # arguments that each layout adds in turn
    module: bool | None = None  # the script is a module, as for `python -m`

    @property
    def given(self) -> list[str]:
        """The names of the options that were given, as the user types them."""
        names = [
            field.name for field in fields(self) if getattr(self, field.name) not in (None, ())
        ]
        return [f"--{name.replace('_', '-')}" for name in names]


def is_script(word: str, module: bool | None) -> bool:
    """Return whether the first argument of `paceline run` is a script, and no spec."""
    return bool(module) or word.endswith(".py")


def script_experiment(
    script: str, arguments: Sequence[str], options: ScriptOptions
) -> dict[str, Any]:
    """Return the spec of a run of a script. Raises UsageError if there is no such script."""
    if options.module and module_file(script, Path.cwd()) is None:
        raise UsageError(
            f"-m {script}: expected a module with a Python file, found none in {Path.cwd()} or "
            "among the installed packages; start in the folder of its package"
        )
    if not options.module and not Path(script).is_file():
        raise UsageError(f"{script}: expected a Python file, found none")
    workload = {
        "script": script,
        "module": options.module,
        "arguments": list(arguments),
        "samples_per_step": options.samples_per_step,
        "max_steps": options.max_steps,
        "warmup_steps": options.warmup_steps,
    }
    return {
        "schema": SCHEMA,
        "name": name_of_script(script.replace(".", "-") if options.module else script),
        "workloads": [{key: value for key, value in workload.items() if value is not None}],
        "trials": list(_trials(options)),
    }


def _trials(options: ScriptOptions) -> Iterator[dict[str, Any]]:
    """Yield the baseline, and each strategy under each launcher and transport that it can use.

    A strategy of one rank runs without a launcher.
    """
    yield dict(BASELINE)
    for name in options.local_strategy or _strategies():
        strategy: dict[str, Any] = {"local_strategy": name}
        if name == BASELINE["local_strategy"]:
            continue
        if name not in STRATEGIES or not STRATEGIES.get(name).has_peers_on_node:
            yield {**BASELINE, **strategy}
            continue
        if options.ranks is not None:
            strategy["ranks_per_node"] = options.ranks
        for launcher, transport in _pairs(options):
            for arguments in options.vary or [()]:
                trial = {**strategy, "launcher": launcher, "transport": transport}
                yield {**trial, "arguments": list(arguments)} if arguments else trial


def _strategies() -> list[str]:
    return [strategy.name for strategy in STRATEGIES.all() if strategy.runs_scripts]


def _pairs(options: ScriptOptions) -> Iterator[tuple[str, str]]:
    """Yield launchers with the transports that they can offer; unknown names are kept, so that the
    rules of a spec report them."""
    launchers = options.launcher or _LAUNCHERS
    for transport in options.transport or _TRANSPORTS:
        needs = TRANSPORTS.get(transport).needs if transport in TRANSPORTS else None
        able = [n for n in launchers if n not in LAUNCHERS or needs in (None, *_provided(n))]
        yield from ((launcher, transport) for launcher in able or launchers)


def _provided(launcher: str) -> frozenset[str]:
    return LAUNCHERS.get(launcher).provides


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRequest:
    """An experiment as the command line asks for it."""

    spec: str | None
    script_arguments: tuple[str, ...]
    only: tuple[str, ...]
    repeats: str | None
    settings: tuple[str, ...]
    script: ScriptOptions

    @property
    def has_own_spec(self) -> bool:
        """Tell whether a spec or a change of it is given, apart from the repeats."""
        return any((self.spec, self.only, self.settings, self.script.given))

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
        if is_script(self.spec, self.script.module):
            source: Any = script_experiment(self.spec, self.script_arguments, self.script)
            return load_spec(source, settings)
        if self.script.given:
            raise click.UsageError(
                f"{', '.join(self.script.given)}: expected only with a script (FILE.py); for a "
                "spec, set its keys with --set"
            )
        return load_spec(self.spec, settings)


class ExperimentCommand(click.Command):
    """A command whose words belong to the user's script from the script's name on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options on both sides of SPEC, but only those before a script."""
        ctx.allow_interspersed_args = False
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        first = values.get("spec")
        is_of_script = isinstance(first, str) and is_script(first, values.get("module"))
        ctx.allow_interspersed_args = not is_of_script
        rest = super().parse_args(ctx, args)
        unexpected = ctx.params["script_arguments"]
        if unexpected and not is_of_script:
            ctx.fail(
                f"Got unexpected extra arguments ({' '.join(unexpected)}); only a script (FILE.py) "
                "has arguments."
            )
        return rest


def _combinations(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the arguments of each layout: every combination of the values."""
    each = []
    for value in values:
        name, _, listed = value.partition("=")
        if not (name and listed):
            raise click.BadParameter(
                f"expected OPTION=VALUE,VALUE,… such as --layout=ddp,fsdp, got {value!r}"
            )
        each.append([f"{name}={one}" for one in listed.split(",")])
    return tuple(itertools.product(*each)) if each else ()


module_option = click.option(
    "-m", "--module", is_flag=True, flag_value=True, default=None,
    help="The script is the name of a module, which runs as with `python -m`.",
)  # fmt: skip
vary_option = click.option(
    "--vary", metavar="OPTION=A,B,…", multiple=True, callback=_combinations,
    help="Script: run each layout of several ranks once for each value, with this option of the "
    "script. One process runs without it. May be repeated.",
)  # fmt: skip
_takes_options = all_of(
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
    vary_option,
    module_option,
)  # fmt: skip


def takes_experiment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options of an experiment, which the function gets as a `Request`."""

    @functools.wraps(function)
    def with_request(**values: Any) -> Any:
        options = {field.name: values.pop(field.name) for field in fields(ScriptOptions)}
        own = {f.name: values.pop(f.name) for f in fields(ExperimentRequest) if f.name != "script"}
        return function(ExperimentRequest(**own, script=ScriptOptions(**options)), **values)

    decorated: Callable[..., Any] = _takes_options(with_request)
    return decorated
