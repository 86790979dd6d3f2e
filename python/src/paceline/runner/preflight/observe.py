"""The measurements between hosts, in the order in which each needs the earlier ones."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from paceline.measure.records.files import jsonable
from paceline.plan.costs import all_reduce
from paceline.runner.preflight.hosts import NoAnswer, Probes
from paceline.runner.preflight.probe import Address, Facts, ProbedLink, Seen, Stream

_Value = TypeVar("_Value")
Pair = tuple[int, int]  # numbers of two hosts: from, to

_START_S = 60.0  # of Python and Paceline from a slow shared file system
_ANSWER_S = 30.0  # longer than the limits within a probe
_FOLDER_S = 60.0
_IMPORT_S = 60.0  # of torch
_ALL_REDUCE_S = 30.0
_PAYLOAD_S = 0.3  # the time of an all-reduce at the speed of the slowest link
_SEEMS_SLOW = 0.5  # of the fastest link
_LEAST_PAYLOAD_BYTES, _MOST_PAYLOAD_BYTES = 2**16, 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAllReduce:
    """An all-reduce over all hosts. limit_s: what the slowest link needs for it."""

    payload_bytes: int
    seconds: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A shared folder in use by all hosts."""

    path: Path
    faults: Mapping[int, NoAnswer]
    seen: Mapping[int, Seen]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswers:
    """Answers of all probes, by the numbers of hosts; all_reduce: None if it was not tried."""

    names: Sequence[str]
    interface: str
    facts: Mapping[int, Facts]
    faults: Mapping[int, NoAnswer]  # of hosts without facts
    links: Mapping[Pair, ProbedLink | NoAnswer]
    streams: Mapping[Pair, Stream | NoAnswer]
    all_reduce: ProbedAllReduce | NoAnswer | None
    folder: Folder


def observe(names: Sequence[str], agent: str, interface: str | None, folder: Path) -> ProbeAnswers:
    """Start probes on all hosts and ask them everything. Raises EnvironmentLacks.

    interface: None takes that by which the first host sends to the second one.
    """
    with Probes(names, agent) as probes:
        if interface is None:
            interface = _chosen_interface(probes)
        arguments = {"names": names, "interface": interface}
        answers = probes.ask(Facts, "facts", _to_all(probes, arguments), _START_S)
        facts = {n: found for n, found in answers.items() if isinstance(found, Facts)}
        links, streams = _measure_links(probes, facts, interface)
        used = _use_folder(probes, folder, sorted(facts))
        return ProbeAnswers(
            names=names,
            interface=interface,
            facts=facts,
            faults={n: found for n, found in answers.items() if isinstance(found, NoAnswer)},
            links=links,
            streams=streams,
            all_reduce=_measure_all_reduce(probes, interface, links, streams),
            folder=used,
        )


def document(seen: ProbeAnswers) -> dict[str, Any]:
    """Return the measurements as JSON values, with the names of the hosts."""
    links = [
        {
            "from": seen.names[pair[0]],
            "to": seen.names[pair[1]],
            **jsonable(link),
            **jsonable(seen.streams.get(pair, {})),
        }
        for pair, link in seen.links.items()
    ]
    return {
        "interface": seen.interface,
        "hosts": {seen.names[n]: jsonable(facts) for n, facts in seen.facts.items()},
        "links": links,
        "all_reduce": jsonable(seen.all_reduce),
    }


def _chosen_interface(probes: Probes) -> str:
    asked = {0: {"name": probes.names[1]}}
    found = probes.ask(str, "interface_to", asked, _START_S)[0]
    if isinstance(found, NoAnswer):
        raise found.as_error(probes.names[0])
    return found


def _to_all(probes: Probes, arguments: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return dict.fromkeys(range(len(probes.names)), arguments)


def _measure_links(
    probes: Probes, facts: Mapping[int, Facts], interface: str
) -> tuple[dict[Pair, ProbedLink | NoAnswer], dict[Pair, Stream | NoAnswer]]:
    """Measure each pair in both directions.

    At any time each host sends to one host and receives from one, as in a ring. A link that seems
    slow is measured again with less beside it: hosts may have been busy.
    """
    targets = _targets(probes, facts, interface)
    links: dict[Pair, ProbedLink | NoAnswer] = {}
    streams: dict[Pair, Stream | NoAnswer] = {}
    for turn in _turns(sorted(targets)):
        links |= _measure(probes, ProbedLink, "messages", turn, targets)
        reached = [pair for pair in turn if isinstance(links[pair], ProbedLink)]
        streams |= _measure(probes, Stream, "stream", reached, targets)
    fastest = max((_rate(stream) for stream in streams.values()), default=0.0)
    for turn in _turns(sorted(targets)):
        slow = [pair for pair in turn if 0 < _rate(streams.get(pair)) < _SEEMS_SLOW * fastest]
        again = _measure(probes, Stream, "stream", slow, targets)
        streams |= {p: found for p, found in again.items() if _rate(found) > _rate(streams[p])}
    return links, streams


def _targets(
    probes: Probes, facts: Mapping[int, Facts], interface: str
) -> dict[int, Mapping[str, Any]]:
    """Let every host with the interface listen; return where, by its number.

    Each has a token of its own, so a connection that ends at another host is noticed.
    """
    asked = {
        n: {"interface": interface, "token": secrets.token_hex(16)}
        for n, found in facts.items()
        if found.address is not None
    }
    answers = probes.ask(Address, "listen", asked, _ANSWER_S)
    return {
        n: {"host": found.host, "port": found.port, "token": asked[n]["token"]}
        for n, found in answers.items()
        if isinstance(found, Address)
    }


def _turns(hosts: Sequence[int]) -> Iterator[list[Pair]]:
    """Yield all pairs in turns in which each host sends once and receives once."""
    for shift in range(1, len(hosts)):
        yield list(zip(hosts, [*hosts[shift:], *hosts[:shift]], strict=True))


def _measure(
    probes: Probes,
    kind: type[_Value],
    request: str,
    pairs: Sequence[Pair],
    targets: Mapping[int, Mapping[str, Any]],
) -> dict[Pair, _Value | NoAnswer]:
    asked = {here: {"own": targets[here]["host"], **targets[there]} for here, there in pairs}
    answers = probes.ask(kind, request, asked, _ANSWER_S)
    return {pair: answers[pair[0]] for pair in pairs}


def _rate(stream: Stream | NoAnswer | None) -> float:
    """Return the bytes per second of a measured stream, else 0."""
    return stream.bytes_per_s if isinstance(stream, Stream) else 0.0


def _measure_all_reduce(
    probes: Probes,
    interface: str,
    links: Mapping[Pair, ProbedLink | NoAnswer],
    streams: Mapping[Pair, Stream | NoAnswer],
) -> ProbedAllReduce | NoAnswer | None:
    """Time an all-reduce of all hosts; None if they do not all reach each other."""
    count = len(probes.names)
    pairs = list(permutations(range(count), 2))
    rates = [s.bytes_per_s for s in map(streams.get, pairs) if isinstance(s, Stream)]
    latencies = [link.latency_s for link in links.values() if isinstance(link, ProbedLink)]
    if len(rates) < len(pairs):
        return None
    slowest = min(rates)
    wanted = int(slowest * _PAYLOAD_S)
    payload_bytes = max(_LEAST_PAYLOAD_BYTES, min(_MOST_PAYLOAD_BYTES, wanted))
    store = probes.ask(Address, "store", {0: {"interface": interface}}, _ANSWER_S)[0]
    if isinstance(store, NoAnswer):
        return store
    arguments = {
        rank: {
            "rank": rank,
            "names": probes.names,
            "host": store.host,
            "port": store.port,
            "interface": interface,
            "payload_bytes": payload_bytes,
            "limit_s": _ALL_REDUCE_S,
        }
        for rank in range(count)
    }
    answers = probes.ask(float, "all_reduce", arguments, _IMPORT_S + 2 * _ALL_REDUCE_S)
    faults = [found for found in answers.values() if isinstance(found, NoAnswer)]
    if faults:
        return faults[0]
    return ProbedAllReduce(
        payload_bytes=payload_bytes,
        seconds=max(found for found in answers.values() if isinstance(found, float)),
        limit_s=all_reduce("ring", count).seconds(
            payload_bytes, statistics.median(latencies), slowest
        ),
    )


def _use_folder(probes: Probes, path: Path, hosts: Sequence[int]) -> Folder:
    """Let all hosts append, rename and lock in a new folder below `path`."""
    if not hosts:
        return Folder(path=path, faults={}, seen={})
    first = hosts[0]
    made = probes.ask(str, "make_folder", {first: {"folder": str(path)}}, _FOLDER_S)[first]
    if isinstance(made, NoAnswer):
        return Folder(path=path, faults={first: made}, seen={})
    asked = {number: {"made": made, "number": number} for number in hosts}
    used = probes.ask(type(None), "use_folder", asked, _FOLDER_S)
    faults = {n: found for n, found in used.items() if isinstance(found, NoAnswer)}
    if first in faults:
        return Folder(path=path, faults=faults, seen={})
    locking = probes.ask(type(None), "lock_folder", {first: {"made": made}}, _FOLDER_S)
    faults |= {n: found for n, found in locking.items() if isinstance(found, NoAnswer)}
    able = [number for number in hosts if number not in faults]
    looking = {number: {"made": made, "hosts": len(able)} for number in able}
    seen = probes.ask(Seen, "look_at_folder", looking, _FOLDER_S)
    faults |= {n: found for n, found in seen.items() if isinstance(found, NoAnswer)}
    return Folder(
        path=path,
        faults=faults,
        seen={n: found for n, found in seen.items() if isinstance(found, Seen)},
    )
