"""Arguments and options that several verbs share. One notion has one name in all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.base.errors import DataError
from paceline.base.host.files import how_to_fetch
from paceline.base.host.messages import say
from paceline.base.host.own_runs import odd_content
from paceline.measure.records.files import check_types, read_json
from paceline.measure.records.layout import MADE, RunFiles, TrialFiles
from paceline.plan.spec.values import REMOTE_SCHEMES, is_remote

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)
Decorator = Callable[[Decorated], Decorated]

RUNS = Path("runs")
count = click.IntRange(min=1)
seed = click.IntRange(min=0)


def existing_run(value: str | Path) -> Path:
    """Return an existing directory. Raises click.BadParameter, which suggests a similar name."""
    if is_remote(str(value)):
        fetch = how_to_fetch(str(value))
        raise click.BadParameter(
            f"{value}: expected a run directory on this machine; copy it here with: {fetch}"
        )
    path = Path(value)
    if path.is_dir():
        odd = odd_content(path, unread=MADE)
        if odd is not None:
            raise click.BadParameter(odd)
        return path
    siblings = [each.name for each in path.parent.glob("*") if each.is_dir()]
    close = get_close_matches(path.name, siblings)
    similar = f" Did you mean {path.parent / close[0]}?" if close else ""
    raise click.BadParameter(f"{path}: expected a run directory, found none.{similar}")


def percentage(value: Any) -> float:
    """Return a number of percent with its sign as a share of 1. Raises click.BadParameter."""
    try:
        number = float(str(value).removesuffix("%")) / 100
    except ValueError:
        number = math.nan
    if not str(value).endswith("%") or not 0 <= number < 1:
        raise click.BadParameter(f"{value}: expected a percentage below 100 such as 3%.")
    return number


class _FiniteFloat(click.FloatRange):
    """A finite number in a range; click's own accepts `nan`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


FILE = click.Path(dir_okay=False, path_type=Path)
positive = _FiniteFloat(min=0, min_open=True)
poll_seconds = _FiniteFloat(min=0.2, max=60)


def newest_run(*, to_compare: bool = False) -> Path:
    """Return the run in `runs` that began last, and say so. Raises click.UsageError without one.

    to_compare: pass over runs without a timed trial, such as those of `verify` and `watch`.
    """
    newest = _newest_in_runs(to_compare=to_compare)
    if newest is None:
        kind = "run with a finished trial to compare" if to_compare else "run"
        raise click.UsageError(
            f"expected RUN_DIR, because there is no {kind} in {RUNS}/; `paceline run` makes one"
        )
    say(f"newest run: {newest}")
    return existing_run(newest)


def _newest_in_runs(*, to_compare: bool) -> Path | None:
    began = {path: time_s for path in RUNS.glob("*") for time_s in _began_unix_s(path)}
    newest_first = sorted(began, key=lambda path: began[path], reverse=True)
    return next((path for path in newest_first if not to_compare or _has_timed(path)), None)


def run_dirs_of(words: Sequence[str]) -> list[Path]:
    """Return the run directories that a command reads: those among its words, else the newest."""
    named = [Path(word) for word in words[1:] if Path(word).is_dir()]
    newest = {_newest_in_runs(to_compare=each) for each in (False, True)}
    return named or [path for path in newest if path is not None]


def _has_timed(path: Path) -> bool:
    """Return whether a run has a spec and a finished trial that measures speed."""
    run = RunFiles(path)
    with suppress(DataError, OSError):
        if "spec_toml" not in read_json(run.manifest):
            return False
        return any(_is_timed(files) for _, files in run.trials())
    return False  # it has only searched so far, or is damaged


def _is_timed(files: TrialFiles) -> bool:
    if not files.outcome.exists() or read_json(files.outcome).get("status") != "ok":
        return False
    training = read_json(files.trial).get("training")
    place = f"{files.trial}: training"
    script = check_types(training, {"script": (dict, type(None))}, place).get("script") or {}
    return script.get("observe") is None and script.get("resume") is None


def _began_unix_s(path: Path) -> Iterator[float]:
    """Yield when the run in a directory began, or its search; nothing for another directory."""
    files = RunFiles(path)
    for manifest in (files.manifest, files.tune.manifest):
        if manifest.exists():
            yield manifest.stat().st_mtime


def or_newest(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
    """Replace a missing run directory by the newest run."""
    return value if value or ctx.resilient_parsing else newest_run()


def _or_newest_to_compare(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
    """Replace a missing run directory, or an empty tuple of them, by the newest run to compare."""
    if value or ctx.resilient_parsing:
        return value
    newest = newest_run(to_compare=True)
    return (newest,) if value == () else newest


class _Pair(click.ParamType[tuple[str, str]]):
    """A name and its value, with an equals sign between them."""

    name = "pair"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):  # click converts a converted value again
            return value
        key, _, content = value.partition("=")
        if not (key and content):
            self.fail(
                f"expected {param.metavar if param else self.name}, got {value!r}", param, ctx
            )
        return key, content


pair = _Pair()
# The help of a verb says so, because arguments have no help text.
run_dir_argument: Decorator[Any] = click.argument(
    "run_dir", type=existing_run, metavar="[RUN_DIR]", required=False, callback=or_newest
)
compared_run_argument: Decorator[Any] = click.argument(
    "run_dir",
    type=existing_run,
    metavar="[RUN_DIR]",
    required=False,
    callback=_or_newest_to_compare,
)
compared_runs_argument: Decorator[Any] = click.argument(
    "run_dirs",
    type=existing_run,
    metavar="[RUN_DIR]...",
    nargs=-1,
    callback=_or_newest_to_compare,
)
spec_argument: Decorator[Any] = click.argument("spec", metavar="SPEC")
json_option: Decorator[Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for other programs."
)
# The commands that have it call `paceline.base.host.own_runs.check_own_run` without it.
trust_option: Decorator[Any] = click.option(
    "--trust-run",
    is_flag=True,
    help="Run what a run directory names, also if you did not make the run here.",
)
baseline_option: Decorator[Any] = click.option(
    "--baseline",
    metavar="NAME",
    help="Show speedups over this configuration, or over the fastest one that matches this shell "
    "pattern; default: that of the spec, else the sequential one.",
)


def all_of(*options: Decorator[Any]) -> Decorator[Any]:
    """Return the decorator that adds all these options, in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class _Place(click.Path):
    """A path, or where that is allowed the URL of a remote folder as text."""

    def __init__(self, *, remote: bool) -> None:
        super().__init__(path_type=Path)
        self._remote = remote

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        text = str(value)
        if self._remote and is_remote(text):
            return text
        if "://" in text:
            schemes = f" or a URL of {', '.join(REMOTE_SCHEMES)}" if self._remote else ""
            self.fail(f"{text}: expected a path{schemes}.", param, ctx)
        return super().convert(value, param, ctx)


def out_option(
    metavar: str, text: str, *, required: bool = False, remote: bool = False
) -> Decorator[Any]:
    """Return the option for the output, which has one name in all verbs.

    remote: it may be the URL of a remote folder, which stays a str; else it is a Path.
    """
    return click.option(
        "-o", "--out", metavar=metavar, type=_Place(remote=remote), help=text, required=required,
    )  # fmt: skip


def limit_option(text: str) -> Decorator[Any]:
    """Return the option for the limit of time, which has one name in all verbs."""
    return click.option(
        "--limit", "limit_s", metavar="SECONDS", type=positive, help=text
    )  # fmt: skip


def list_option(name: str, metavar: str, text: str, **settings: Any) -> Decorator[Any]:
    """Return an option for a list, whose values are separated by commas."""

    def split(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        words = (word.strip() for value in values for word in value.split(","))
        return tuple(word for word in words if word)

    # a repeated option adds to the list, instead of a silent loss of what was given first
    return click.option(name, metavar=metavar, multiple=True, callback=split, help=text, **settings)
