"""Conclusions from fabricated answers of three hosts: each fault changes one finding."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from paceline.base.errors import ExitCode
from paceline.runner.preflight.findings import exit_code, findings_of, verdict
from paceline.runner.preflight.hosts import NoAnswer
from paceline.runner.preflight.observe import Folder, ProbeAnswers, ProbedAllReduce
from paceline.runner.preflight.probe import Facts, ProbedLink, Seen, Stream

NAMES = ["a", "b", "c"]
PAIRS = list(permutations(range(3), 2))
GBIT = 1e9 / 8
LINK = ProbedLink(latency_s=50e-6, offset_s=0.0, offset_error_s=60e-6)


def facts(number: int) -> Facts:
    return Facts(
        host=f"node{number}",
        identity=f"boot{number} net:[1] node{number}",
        boot_id=f"boot{number}",
        address=f"10.0.0.{number + 1}",
        address_fault=None,
        resolved={name: f"10.0.0.{n + 1}" for n, name in enumerate(NAMES)},
        versions={"python": "3.11.7", "torch": "2.13.0", "paceline": "0.3.0"},
        threads={},
        cores=4,
        cgroup_cores=None,
        cgroup_memory_bytes=None,
    )


HEALTHY = ProbeAnswers(
    names=NAMES,
    interface="eth0",
    facts={n: facts(n) for n in range(3)},
    faults={},
    links=dict.fromkeys(PAIRS, LINK),
    streams=dict.fromkeys(PAIRS, Stream(bytes_per_s=GBIT)),
    all_reduce=ProbedAllReduce(payload_bytes=2**20, seconds=0.02, limit_s=0.012),
    folder=Folder(
        path=Path("/shared"),
        faults={},
        seen=dict.fromkeys(range(3), Seen(appended=3, renamed=3, excluded=True)),
    ),
)


def faults_of(seen: ProbeAnswers, slots=None, rate=None) -> dict[str, tuple[str, str]]:
    findings = findings_of(seen, slots or {}, rate)
    return {each.what: (each.found, each.why) for each in findings if not each.ok}


def changed(number: int, **values) -> ProbeAnswers:
    return replace(
        HEALTHY, facts={**HEALTHY.facts, number: replace(HEALTHY.facts[number], **values)}
    )


def looking(**values) -> ProbeAnswers:
    """Let host c see another shared folder."""
    seen = {**HEALTHY.folder.seen, 2: replace(HEALTHY.folder.seen[2], **values)}
    return replace(HEALTHY, folder=replace(HEALTHY.folder, seen=seen))


def test_healthy_hosts_have_no_fault():
    assert faults_of(HEALTHY, {0: 4, 1: 4, 2: 4}, 1.1e9) == {}
    found = {each.what: each.found for each in findings_of(HEALTHY, {0: 4, 1: 4, 2: 4}, None)}
    assert found == {
        "hosts": "3 of 3 answer",
        "names": "known",
        "machines": "3 for 3 hosts",
        "interface": "eth0 on 3 of 3",
        "ports": "6 of 6 ways",
        "latency": "0.05 ms",
        "bandwidth": "1 Gbit/s",
        "all-reduce": "60% of link",
        "clocks": "0 ms apart",
        "versions": "equal",
        "cores": "4 a host",
        "run folder": "shared",
        "slots": "12",
    }


@pytest.mark.parametrize(
    ("seen", "what", "text"),
    [
        (changed(1, resolved={"a": "10.0.0.1", "b": "127.0.1.1", "c": None}), "names", "c on b"),
        (changed(1, resolved={"a": "127.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}),
         "names", "a on b has no address"),
        (changed(2, identity=facts(0).identity), "machines", "a = c is one host"),
        (changed(2, address=None, address_fault="interface 'eth0' on host c"),
         "interface", "on host c"),
        (changed(2, address="10.0.0.1"), "interface", "10.0.0.1 on 2 hosts"),
        (replace(HEALTHY, links={**HEALTHY.links, (0, 2): NoAnswer("timed out")}),
         "ports", "a -> c: timed out; allow TCP"),
        (replace(HEALTHY, streams={**HEALTHY.streams, (2, 1): NoAnswer("reset")}),
         "ports", "c -> b: reset"),
        (replace(HEALTHY, all_reduce=NoAnswer("Gloo fails")), "all-reduce", "Gloo fails"),
        (replace(HEALTHY, all_reduce=ProbedAllReduce(payload_bytes=8, seconds=1.1, limit_s=0.1)),
         "all-reduce", "other work"),
        (changed(1, versions={"python": "3.11.7", "torch": "2.9.0", "paceline": "0.3.0"}),
         "versions", "torch 2.13.0 on a, c, 2.9.0 on b;"),
        (changed(1, versions={"python": "3.11.7", "torch": "2.13.0"}),
         "versions", "paceline 0.3.0 on a, c, missing on b;"),
        (changed(1, cores=2), "cores", "cores: 4 on a, c, 2 on b"),
        (changed(1, threads={"OMP_NUM_THREADS": "1"}), "cores", "OMP_NUM_THREADS=1 on b"),
        (looking(excluded=None), "run folder", "no locks (flock) on c"),
        (looking(excluded=False), "run folder", "no locks of other hosts on c"),
        (looking(appended=2), "run folder", "no appends of other hosts on c"),
        (looking(renamed=2), "run folder", "no renames of other hosts on c"),
        (replace(HEALTHY, faults={2: NoAnswer("its probe has ended: no route")}),
         "hosts", "c: its probe has ended: no route"),
    ],
)  # fmt: skip
def test_fault_is_named(seen, what, text):
    found = faults_of(seen)
    assert list(found) == [what]
    assert text in found[what][1]


def slower(pairs, share: float) -> ProbeAnswers:
    slow = dict.fromkeys(pairs, Stream(bytes_per_s=GBIT * share))
    return replace(HEALTHY, streams={**HEALTHY.streams, **slow})


def test_slow_links_are_named_by_their_common_host():
    seen = slower([pair for pair in PAIRS if 2 in pair], 0.2)
    assert (
        "every link of c: less than 0.25 Gbit/s, a quarter of the fastest"
        in faults_of(seen)["bandwidth"][1]
    )
    seen = slower([(0, 1)], 0.2)
    assert faults_of(seen)["bandwidth"][1].startswith("a -> b: less")
    assert faults_of(slower([(0, 1)], 0.26)) == {}


def test_links_are_compared_with_a_given_rate():
    assert "Gbit/s, half of --link" in faults_of(HEALTHY, rate=2.1e9)["bandwidth"][1]
    assert faults_of(HEALTHY, rate=1.9e9) == {}


@pytest.mark.parametrize(("ahead_s", "wrong"), [((0, 0, 30), "c"), ((30, 0, 0), "a")])
def test_wrong_clock_is_that_which_differs_from_most(ahead_s, wrong):
    links = {
        (here, there): replace(LINK, offset_s=float(ahead_s[there] - ahead_s[here]))
        for here, there in PAIRS
    }
    found, why = faults_of(replace(HEALTHY, links=links))["clocks"]
    assert why.startswith(f"{wrong} is +30.000 s off (uncertainty 0.06 ms)")
    assert found == "3e+04 ms apart"


def test_clock_within_its_uncertainty_is_no_fault():
    links = dict.fromkeys(PAIRS, ProbedLink(latency_s=1.0, offset_s=0.5, offset_error_s=0.41))
    assert faults_of(replace(HEALTHY, links=links)) == {}


def test_parts_of_one_machine_are_stated():
    seen = changed(1, boot_id="boot0")
    [machines] = [each for each in findings_of(seen, {}, None) if each.what == "machines"]
    assert machines.ok
    assert machines.found == "2 for 3 hosts"
    assert machines.why.startswith("a, b are parts of one machine")


def test_slots_are_compared_with_cores_and_their_limit():
    assert faults_of(HEALTHY, {1: 5})["slots"] == (
        "too few",
        "b has 4 cores for 5; use fewer slots there, or give it more cores (affinity, cgroup)",
    )
    assert "a has 1.5 cores for 2" in faults_of(changed(0, cgroup_cores=1.5), {0: 2})["slots"][1]


def test_verdict_and_exit_code_count_the_faults():
    healthy = findings_of(HEALTHY, {}, None)
    assert verdict(healthy) == "no fault found: the hosts can train together"
    assert exit_code(healthy) == ExitCode.OK
    seen = replace(changed(1, cores=2), all_reduce=NoAnswer("Gloo fails"))
    faulty = findings_of(seen, {}, None)
    assert verdict(faulty) == "2 faults (all-reduce, cores): correct them before `paceline run`"
    assert exit_code(faulty) == ExitCode.ENVIRONMENT
