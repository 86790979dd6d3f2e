"""`paceline run SCRIPT.py`: an experiment from the command line, for a user's own script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS
from paceline.spec.models import SCHEMA, name_of_script
from paceline.spec.values import BASELINE

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

    @property
    def given(self) -> list[str]:
        """The names of the options that were given, as the user types them."""
        names = [
            field.name for field in fields(self) if getattr(self, field.name) not in (None, ())
        ]
        return [f"--{name.replace('_', '-')}" for name in names]


def is_script(word: str) -> bool:
    """Return whether the first argument of `paceline run` is a script, and no spec."""
    return word.endswith(".py")


def script_experiment(
    script: Path, arguments: Sequence[str], options: ScriptOptions
) -> dict[str, Any]:
    """Return the spec of a run of a script. Raises UsageError if there is no such script."""
    if not script.is_file():
        raise UsageError(f"{script}: expected a Python file, found none")
    workload = {
        "script": str(script),
        "arguments": list(arguments),
        "samples_per_step": options.samples_per_step,
        "max_steps": options.max_steps,
        "warmup_steps": options.warmup_steps,
    }
    return {
        "schema": SCHEMA,
        "name": name_of_script(str(script)),
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
        pairs = list(_pairs(options))
        yield from ({**strategy, "launcher": a, "transport": b} for a, b in pairs)


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
