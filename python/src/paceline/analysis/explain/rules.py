"""Rules that name the cause of a slower part, each with the evidence that it requires.

The order matters: the first rule whose evidence is there takes the parts on which its cause acts.
What no rule takes is named by its part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.analysis.explain import conditions as evidence_of
from paceline.analysis.explain import interventions
from paceline.analysis.explain.factors import ALLOCATED, AT_WORK, CPU_TIME
from paceline.analysis.explain.interventions import Propose
from paceline.analysis.explain.pair import Pair
from paceline.analysis.explain.parts import ON_CORES

# what a lack of CPU slows down; the parts on cores count only where their factors are unknown
_ON_CORES = (CPU_TIME, AT_WORK, *ON_CORES)
_EVERYTHING = (*_ON_CORES, "data_wait", "bubble", "comm_wait", "comm_transfer")


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause, the parts or factors that it slows down, and the test for its evidence."""

    name: str
    label: str
    acts_on: tuple[str, ...]
    evidence: Callable[[Pair], list[str]]  # sentences; empty if the cause cannot be named
    intervention: Propose = interventions.nothing  # the change that removes it
    # Whether time on cores that becomes shorter is its effect, too: while the training waits, its
    # readers compete less for cores. Then the cause explains the sum.
    relieves_cores: bool = False


RULES: tuple[Rule, ...] = (
    Rule("cpu_quota", "CPU quota of the control group", _EVERYTHING, evidence_of.cpu_quota),
    Rule("steal", "CPU time stolen by the hypervisor", _EVERYTHING, evidence_of.steal),
    Rule(
        "oversubscription",
        "more threads than cores",
        _EVERYTHING,
        evidence_of.oversubscription,
        interventions.threads_for_the_cores,
    ),
    Rule("slow_rank", "a slow rank (straggler)", ("comm_wait",), evidence_of.slow_rank),
    Rule("fewer_cores", "fewer allocated cores", (ALLOCATED,), evidence_of.fewer_cores),
    Rule("own_threads", "other threads of the processes (GIL)", _ON_CORES, evidence_of.own_threads),
    Rule(
        "intraop_threads",
        "threads within operations",
        (CPU_TIME, AT_WORK),
        evidence_of.intraop_threads,
        interventions.threads_of_the_faster,
    ),
    Rule("micro_batches", "smaller operations", (CPU_TIME, AT_WORK), evidence_of.micro_batches),
    Rule("frequency", "lower clock frequency", (CPU_TIME,), evidence_of.frequency),
    Rule(
        "memory_contention",
        "slower cores: memory bandwidth, caches or shared cores",
        (CPU_TIME,),
        evidence_of.memory_contention,
    ),
    Rule(
        "competition",
        "other processes competed for cores",
        (AT_WORK, *ON_CORES, "comm_wait"),
        evidence_of.competition,
    ),
    Rule(
        "cold_cache",
        "data from disks, not from the page cache",
        ("data_wait",),
        evidence_of.cold_cache,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "storage",
        "slow storage",
        ("data_wait",),
        evidence_of.storage,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "decoding",
        "readers compete for cores",
        ("data_wait",),
        evidence_of.decoding,
        interventions.data_from_memory,
    ),
    Rule(
        "slow_reader",
        "slow reader or remote storage",
        ("data_wait",),
        evidence_of.slow_reader,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "layer_communication",
        "communication of layers (batch normalisation)",
        ("comm_transfer",),
        evidence_of.layer_communication,
        interventions.statistics_per_replica,
    ),
    Rule("transport", "another transport", ("comm_transfer",), evidence_of.transport),
    Rule(
        "more_traffic",
        "more bytes per step",
        ("comm_transfer",),
        evidence_of.more_traffic,
        interventions.half_the_bytes,
    ),
    Rule(
        "slow_link",
        "slow link",
        ("comm_transfer",),
        evidence_of.slow_link,
        interventions.half_the_bytes,
    ),
    Rule(
        "pipeline_bubble",
        "pipeline bubble",
        ("bubble",),
        evidence_of.bubble,
        interventions.more_micro_batches,
    ),
)
