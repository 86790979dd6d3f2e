"""The command line of every job script, generated from the models of the spec.

Each key of [[workloads]], [[trials]], [telemetry], [limits] and [network] is an option. Values are
only converted here; the rules of a spec check them (`trial`), so that a mistake on the command line
gets the same message as one in a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.errors import UsageError
from paceline.spec.choices import key_models
from paceline.spec.extensions import (
    COMPRESSIONS,
    STRATEGIES,
    TRANSPORTS,
    WORKLOADS,
    ExtensionGroup,
)
from paceline.spec.models import (
    Limits,
    NetworkSettings,
    TelemetrySettings,
    TrialRequest,
    WorkloadRequest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

DEFAULT_NAME = "by-hand"
# Keys that the launcher decides, or that have no meaning for a single trial.
_NOT_OPTIONS = {
    *("launcher", "nodes", "workloads"),
    *("samples", "script", "arguments", "samples_per_step"),
}
_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON"}
# Keys whose values are the names of extensions.
_EXTENSIONS: dict[tuple[str, str], ExtensionGroup[Any]] = {
    ("workloads", "name"): WORKLOADS,
    ("trials", "local_strategy"): STRATEGIES,
    ("trials", "transport"): TRANSPORTS,
    ("trials", "compression"): COMPRESSIONS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options that were given. `tables` has the keys of a spec, by table."""

    trial_file: Path | None = None
    out: Path | None = None
    name: str | None = None
    seed: int | None = None
    repeat: int | None = None
    ranks: int | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def value(self, table: str, key: str) -> Any:
        """Return the value of a key; None if it was not given."""
        return self.tables.get(table, {}).get(key)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the spec, and the names of its options."""

    name: str
    title: str
    models: tuple[type[BaseModel], ...]
    option: Callable[[str], str]  # key -> option, without dashes

    def fields(self) -> Iterator[tuple[str, FieldInfo]]:
        for model in self.models:
            for key, info in model.model_fields.items():
                if key not in _NOT_OPTIONS:
                    yield key, info


def _tables() -> tuple[_Table, ...]:
    return (
        _Table("workloads", "the training task", (WorkloadRequest,), _workload_option),
        _Table("trials", "the configuration", (TrialRequest, *key_models()), str),
        _Table("limits", "limits, in seconds", (Limits,), lambda key: f"{_plain(key)}_timeout"),
        _Table("network", "network", (NetworkSettings,), str),
        _Table("telemetry", "the sidecar", (TelemetrySettings,), _telemetry_option),
    )


def _workload_option(key: str) -> str:
    return "workload" if key == "name" else key


def _telemetry_option(key: str) -> str:
    return "sidecar" if key == "enabled" else f"telemetry_{_plain(key)}"


def _plain(key: str) -> str:
    return key.removesuffix("_s")


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting, so that one of many ranks can report it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see --help")


def parse_options(prog: str, words: Sequence[str] | None = None) -> JobOptions:
    """Parse the options of the job script `prog`; words: sys.argv without the program.

    Raises UsageError.
    """
    given = vars(_parser(prog).parse_args(words))
    tables: dict[str, dict[str, Any]] = {}
    core: dict[str, Any] = {}
    for name, value in given.items():
        table, dot, key = name.partition(".")
        if not dot:
            core[name] = value
        elif value is not None:
            tables.setdefault(table, {})[key] = value
    return JobOptions(**core, tables=tables)


def option_name(table: str, key: str) -> str:
    """Return the option of a spec's key, as in `--global-batch`."""
    (found,) = (t for t in _tables() if t.name == table)
    return "--" + found.option(key).replace("_", "-")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        argument_default=None,
        allow_abbrev=False,
        description="Train one trial as one rank, or as all of them.",
        epilog="exit codes: 0 done, 2 wrong usage, 3 environment lacks something, 4 bad data, "
        "5 a rank failed, 6 timed out",
    )
    add = parser.add_argument
    add("--trial", dest="trial_file", type=Path, metavar="TRIAL_JSON",
        help="a planned trial; allows only --out and --repeat beside it")  # fmt: skip
    add("--out", type=Path, metavar="RUN_DIR", help="the job keeps its records there")
    add("--name", metavar="NAME", help=f"of the run (default: {DEFAULT_NAME})")
    add("--repeat", type=int, metavar="N", help="number of this repeat, from 0")
    add("--seed", type=int, metavar="N")
    add("--ranks", type=int, metavar="N", help="on all nodes together")
    taken: set[str] = set()
    for table in _tables():
        group = parser.add_argument_group(table.title)
        for key, info in table.fields():
            if table.option(key) not in taken:  # [[trials]] repeats some keys of [[workloads]]
                taken.add(table.option(key))
                _add_key(group, table, key, info)
    return parser


def _add_key(group: argparse._ArgumentGroup, table: _Table, key: str, info: FieldInfo) -> None:
    types = _types(info.annotation)
    flag = "--" + table.option(key).replace("_", "-")
    settings: dict[str, Any] = {"dest": f"{table.name}.{key}", "help": info.description}
    if bool in types:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        extensions = _EXTENSIONS.get((table.name, key))
        metavar = _metavar(types) if extensions is None else "|".join(extensions.names())
        settings |= {"metavar": metavar, "type": _converter(types)}
    group.add_argument(flag, **settings)


def _types(annotation: Any) -> list[Any]:
    """Return the members of a union, without None and annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [found for member in get_args(annotation) for found in _types(member)]
    return [] if annotation is NoneType else [annotation]


def _metavar(types: list[Any]) -> str:
    return "|".join(_metavars(types))


def _metavars(types: list[Any]) -> Iterator[str]:
    for each in types:
        origin = get_origin(each)
        if origin is Literal:
            yield from map(str, get_args(each))
        elif origin is tuple:
            inner = _metavar(_types(get_args(each)[0]))
            yield f"{inner},…"
        else:
            is_table = isinstance(each, type) and issubclass(each, BaseModel)
            yield "JSON" if is_table else _METAVARS.get(origin or each, "VALUE")


def _converter(types: list[Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        for each in types:
            try:
                return _converted(text, each)
            except ValueError:
                continue
        raise argparse.ArgumentTypeError(f"expected {_metavar(types)}, got {text!r}")

    return convert


def _converted(text: str, kind: Any) -> Any:
    """Return `text` as a value of one type. Raises ValueError if it cannot be one."""
    origin = get_origin(kind)
    if origin is tuple:
        inner = _types(get_args(kind)[0])
        return [_converted(word, inner[0]) for word in text.split(",")]
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return json.loads(text)
    if kind in (int, float):
        return kind(text)
    return text  # the rules of a spec know which words are allowed
