"""Find what a spec can name: extensions through entry points, and methods of compression.

Our own extensions and third-party ones are found the same way. A descriptor is loaded when it is
first asked for, and an implementation when `load_object` is called, so looking at names costs
nothing. Extensions that cannot be loaded are reported as warnings with their reason; the others
keep working.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from paceline.base.errors import PacelineWarning, UsageError
from paceline.plan.spec.descriptors import (
    Compression,
    Descriptor,
    LauncherDescriptor,
    StrategyDescriptor,
    TransportDescriptor,
    WorkloadDescriptor,
)
from paceline.plan.spec.sentences import did_you_mean

D = TypeVar("D", bound=Descriptor)
N = TypeVar("N", bound=Descriptor | Compression)


class NamedChoices(Generic[N]):
    """All that a spec can name of one kind. word: what a message calls one of them."""

    def __init__(self, word: str) -> None:
        self._word = word

    def get(self, name: str) -> N:
        """Return the one of that name.

        Raises UsageError for an unknown name, with the known ones.
        """
        if name not in self._by_name:
            raise UsageError(self.unknown(name))
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def all(self) -> tuple[N, ...]:
        """Return all, in the order of lists and tables."""
        return tuple(self._by_name.values())

    def names(self) -> tuple[str, ...]:
        """Return every name, in the order of lists and tables."""
        return tuple(self._by_name)

    def package_of(self, name: str) -> str:  # noqa: ARG002  (extensions have others)
        """Return the name of the package that provides it."""
        return "paceline"

    def unknown(self, name: object, place: str | None = None) -> str:
        """Return the message for an unknown name.

        place: where it stands in the spec.
        """
        hint = did_you_mean(str(name), self.names())
        return f'{place or self._word}: expected one of {quoted(self.names())}, got "{name}".{hint}'

    @cached_property
    def _by_name(self) -> dict[str, N]:
        raise NotImplementedError


class ChoiceTable(NamedChoices[N]):
    """Choices in a tuple of the package. path: "module:attribute", imported on first use."""

    def __init__(self, path: str, word: str) -> None:
        super().__init__(word)
        self._path = path

    @cached_property
    def _by_name(self) -> dict[str, N]:
        return {each.name: each for each in load_object(self._path)}


class ExtensionGroup(NamedChoices[D]):
    """The descriptors of one entry-point group. Look-ups are cached for the life of the process."""

    def __init__(self, group: str, base: type[D], word: str) -> None:
        super().__init__(word)
        self.group = group
        self._base = base

    def package_of(self, name: str) -> str:
        return next(
            package for point, package in installed_points(self.group) if point.name == name
        )

    @cached_property
    def _by_name(self) -> dict[str, D]:
        loaded = [found for point in self._entry_points() if (found := self._load(point))]
        return {d.name: d for d in sorted(loaded, key=lambda d: (d.position, d.name))}

    def _entry_points(self) -> list[EntryPoint]:
        """Return the group's entry points. Raises UsageError if two packages claim one name."""
        found: dict[str, tuple[EntryPoint, str]] = {}
        for point, package in installed_points(self.group):
            if point.name in found and found[point.name][0].value != point.value:
                raise UsageError(
                    f'{self._word} "{point.name}": packages {found[point.name][1]} and {package} '
                    "both provide it; uninstall one of them"
                )
            found[point.name] = (point, package)
        if not found:
            raise UsageError(
                f"no {self._word} is installed: the package metadata has no entry points "
                f"{self.group}; install Paceline again (pip install), or use the wheel as archive"
            )
        return [point for point, _ in found.values()]

    def _load(self, point: EntryPoint) -> D | None:
        """Return the descriptor; warn and return None if it cannot be used."""
        try:
            descriptor = point.load()()
        except Exception as error:  # noqa: BLE001  (third-party code may raise anything)
            reason = f"{type(error).__name__}: {error}"
        else:
            if not isinstance(descriptor, self._base):
                reason = f"expected a subclass of {self._base.__name__}"
            elif descriptor.name != point.name:
                reason = f'its name is "{descriptor.name}", expected "{point.name}"'
            else:
                return descriptor
        self._warn(point, reason)
        return None

    def _warn(self, point: EntryPoint, reason: str) -> None:
        warnings.warn(
            f'{self._word} "{point.name}" ({point.value}) cannot be used: {reason}',
            PacelineWarning,
            stacklevel=2,
        )


_all_entry_points = cache(entry_points)


def installed_points(group: str) -> list[tuple[EntryPoint, str]]:
    """Return the entry points of a group, each with the name of its package."""
    found = _all_entry_points().select(group=group)
    return [(point, point.dist.name if point.dist else "") for point in found]


STRATEGIES = ExtensionGroup("paceline.strategies", StrategyDescriptor, "local_strategy")
TRANSPORTS = ExtensionGroup("paceline.transports", TransportDescriptor, "transport")
LAUNCHERS = ExtensionGroup("paceline.launchers", LauncherDescriptor, "launcher")
WORKLOADS = ExtensionGroup("paceline.workloads", WorkloadDescriptor, "workload")
COMPRESSIONS = ChoiceTable[Compression](
    "paceline.train.transports.descriptors:COMPRESSIONS", "compression"
)
GROUPS: dict[str, NamedChoices[Any]] = {
    "workloads": WORKLOADS,
    "strategies": STRATEGIES,
    "launchers": LAUNCHERS,
    "transports": TRANSPORTS,
    "compressions": COMPRESSIONS,
}


def load_object(path: str) -> Any:
    """Import and return "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def quoted(names: tuple[str, ...]) -> str:
    """Return names as in `"a", "b" or "c"`."""
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last
