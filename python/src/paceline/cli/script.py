"""`paceline run --script FILE`: an experiment from the command line, for a user's own script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS
from paceline.spec.models import SCHEMA, name_of_script
from paceline.spec.values import BASELINE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

DASHES = "--"
_LAUNCHERS, _TRANSPORTS = ("torchrun",), ("gloo",)
_OPTIONS = (
    "launcher", "transport", "ranks", "local_strategy", "max_steps", "warmup_steps",
    "samples_per_step",
)  # fmt: skip


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Paceline's words, and those of the script, which follow the first `--`."""
    if words[:1] not in (["run"], ["plan"]) or DASHES not in words:
        return list(words), []
    place = words.index(DASHES)
    return list(words[:place]), list(words[place + 1 :])


def hint_of(arguments: argparse.Namespace) -> str:
    """Return what to do about an unknown option of a run of a script; "" for other commands."""
    if getattr(arguments, "script", None) is None:
        return ""
    return f" (arguments of the script follow `{DASHES}`: --script FILE.py {DASHES} ARGUMENTS)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run of a script."""
    group = parser.add_argument_group(
        "your own training script",
        "Run a script unchanged, as torchrun would: paceline run --script train.py -- ARGUMENTS. "
        "Lists are separated by commas.",
    )
    add = group.add_argument
    add("--script", metavar="FILE.py", help="in place of SPEC; its arguments follow `--`")
    add("--launcher", type=_names, metavar="A,B", help="of several ranks (default: torchrun)")
    add("--transport", type=_names, metavar="A,B", help="between ranks (default: gloo)")
    add("--ranks", type=int, metavar="N", help="default: one for each core")
    add("--local-strategy", type=_names, metavar="A,B", help=f"default: {','.join(_strategies())}")
    add("--max-steps", type=int, metavar="N", help="end the script after N optimiser steps")
    add("--warmup-steps", type=int, metavar="N", help="first steps, excluded from measurements")
    add("--samples-per-step", type=int, metavar="N",
        help="of all ranks together, if the script does not report them")  # fmt: skip


def script_experiment(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the spec of a run of a script; None for a run of a spec.

    Raises UsageError for options that do not go together, or if there is no such script.
    """
    if arguments.script is None:
        _check_spec_run(arguments)
        return None
    if arguments.spec is not None:
        raise UsageError(
            f"expected SPEC or --script, got both ({arguments.spec}, {arguments.script}); "
            f"arguments of the script follow `{DASHES}`"
        )
    if not Path(arguments.script).is_file():
        raise UsageError(f"--script {arguments.script}: expected a Python file, found none")
    workload = {
        "script": arguments.script,
        "arguments": arguments.script_arguments,
        "samples_per_step": arguments.samples_per_step,
        "max_steps": arguments.max_steps,
        "warmup_steps": arguments.warmup_steps,
    }
    return {
        "schema": SCHEMA,
        "name": name_of_script(arguments.script),
        "workloads": [{key: value for key, value in workload.items() if value is not None}],
        "trials": list(_trials(arguments)),
    }


def _check_spec_run(arguments: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(arguments, name)]
    if arguments.script_arguments:
        given.append(f"`{DASHES} {' '.join(arguments.script_arguments)}`")
    if given:
        raise UsageError(f"{', '.join(given)}: only with --script; write it into the spec")
    if arguments.spec is None:
        raise UsageError(
            "expected SPEC (a TOML file or the name of a shipped experiment) or --script FILE.py"
        )


def _trials(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the baseline, and each strategy under each launcher and transport that it can use.

    A strategy of one rank runs without a launcher.
    """
    yield dict(BASELINE)
    for name in arguments.local_strategy or _strategies():
        strategy = {"local_strategy": name}
        if name == BASELINE["local_strategy"]:
            continue
        if name not in STRATEGIES or not STRATEGIES.get(name).has_peers_on_node:
            yield {**BASELINE, **strategy}
            continue
        if arguments.ranks is not None:
            strategy["ranks_per_node"] = arguments.ranks
        pairs = list(_pairs(arguments))
        yield from ({**strategy, "launcher": a, "transport": b} for a, b in pairs)


def _strategies() -> list[str]:
    return [strategy.name for strategy in STRATEGIES.all() if strategy.runs_scripts]


def _pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield launchers with the transports that they can offer; unknown names are kept, so that the
    rules of a spec report them."""
    launchers = arguments.launcher or _LAUNCHERS
    for transport in arguments.transport or _TRANSPORTS:
        needs = TRANSPORTS.get(transport).needs if transport in TRANSPORTS else None
        able = [n for n in launchers if n not in LAUNCHERS or needs in (None, *_provided(n))]
        yield from ((launcher, transport) for launcher in able or launchers)


def _provided(launcher: str) -> frozenset[str]:
    return LAUNCHERS.get(launcher).provides


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
