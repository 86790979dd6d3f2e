"""The extensions that one [[trials]] entry uses, and the keys that they add to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from paceline.plan.spec.descriptors import Compression, Descriptor
from paceline.plan.spec.extensions import (
    COMPRESSIONS,
    LAUNCHERS,
    STRATEGIES,
    TRANSPORTS,
    NamedChoices,
    quoted,
)
from paceline.plan.spec.models import TrialRequest, keys_of_tables
from paceline.plan.spec.sentences import no_such_key, sentences
from paceline.plan.spec.transport_rules import transport_of
from paceline.plan.spec.values import BEST

_GROUPS: dict[str, NamedChoices[Any]] = {
    "local_strategy": STRATEGIES,
    "transport": TRANSPORTS,
    "launcher": LAUNCHERS,
    "compression": COMPRESSIONS,
}


def chosen(request: TrialRequest) -> dict[str, Descriptor | Compression]:
    """Return the descriptors that a request uses, by the key that names them.

    A transport that the entry does not name is the default one. The local strategy "best" and
    unknown names are left out.
    """
    names = {**_names(request), "transport": transport_of(request)}
    return {key: group.get(str(n)) for key, group in _GROUPS.items() if (n := names[key]) in group}


def _names(request: TrialRequest) -> dict[str, str | None]:
    """Return the names that the request gives, by the key that gives them."""
    return {key: getattr(request, key, None) for key in _GROUPS}


def accepts(request: TrialRequest, key: str) -> bool:
    """Return whether an extension that the request uses has this key."""
    return any(key in descriptor.Keys.model_fields for descriptor in chosen(request).values())


def declared_keys() -> list[str]:
    """Return every key that extensions add to a [[trials]] entry."""
    descriptors = (descriptor for group in _GROUPS.values() for descriptor in group.all())
    return sorted({key for descriptor in descriptors for key in descriptor.Keys.model_fields})


def name_faults(request: TrialRequest) -> Iterator[str]:
    """Yield names that no installed extension has."""
    for key, name in _names(request).items():
        is_search = key == "local_strategy" and name == BEST
        if name is not None and name not in _GROUPS[key] and not is_search:
            yield _GROUPS[key].unknown(name)


def key_faults(request: TrialRequest) -> Iterator[str]:
    """Yield keys that the chosen extensions do not have, and values that they do not allow."""
    used = chosen(request)
    for key in request.extension_keys:
        if not any(key in descriptor.Keys.model_fields for descriptor in used.values()):
            yield _misplaced(key, request, used)
    yield from value_faults(request)


def value_faults(request: TrialRequest) -> Iterator[str]:
    """Yield values of extension keys that the chosen extensions do not allow."""
    for model in {descriptor.Keys for descriptor in chosen(request).values()}:
        try:
            request.keys(model)
        except ValidationError as error:
            yield from sentences(error.errors())


def _misplaced(key: str, request: TrialRequest, used: dict[str, Descriptor | Compression]) -> str:
    """Return the message for a key that belongs to other extensions, or to none."""
    for kind, group in _GROUPS.items():
        owners = tuple(d.name for d in group.all() if key in d.Keys.model_fields)
        if not owners:
            continue
        if kind == "local_strategy" and request.local_strategy == BEST:
            return f'{key}: the search finds it for "best"; remove it, or name the strategy'
        name = f'{kind} "{used[kind].name}"' if kind in used else f"a trial without {kind}"
        return f"{key}: has no meaning for {name}; remove it, or use {kind} = {quoted(owners)}"
    known = [*TrialRequest.model_fields, *declared_keys()]
    return f"{key}: {no_such_key(key, known, keys_of_tables())}"
