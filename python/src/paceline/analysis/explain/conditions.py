"""Conditions of the rules: each returns the evidence for one cause as sentences, or none.

A condition holds only with evidence: a figure of the host traces, or of the records, that differs
between the two configurations by more than its limit. The limits lie above the differences between
repeats of equal configurations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.analysis.explain.evidence import amount
from paceline.analysis.explain.pair import ALLOCATED, AT_WORK, CPU_TIME
from paceline.analysis.trial.configuration import pipeline_counts
from paceline.analysis.trial.pipeline import theoretical_bubble
from paceline.records.phases import LABELS

if TYPE_CHECKING:
    from paceline.analysis.explain.pair import Pair

_PERCENT = 2.0  # of the time or of all cores: larger than between equal runs
_OTHERS_PERCENT = 5.0  # of all cores, used by other processes
_PRESSURE_PERCENT = 5.0  # of the time
_CPU_TIME_GROWTH = 1.03  # of the CPU time for the same arithmetic
_FREQUENCY_DROP = 0.97
_MORE_THREADS = 0.5  # a mean over samples, of which the first may be before their start
_COLD_BYTES = 10_000  # read from disks in a step
_SAME_BYTES = 1.2  # a smaller growth of the traffic per step is not its cause
_LEAST_TRAFFIC = 1e5  # bytes per second: less is not the gradients' traffic
_IDLE_PERCENT = 15.0  # of all cores: with less, readers compete for cores


def cpu_quota(pair: Pair) -> list[str]:
    if pair.rise("throttled") < _PERCENT:
        return []
    return pair.words("throttled", "run_cores", "cpu_idle")


def steal(pair: Pair) -> list[str]:
    return pair.words("steal") if pair.rise("steal") >= _PERCENT else []


def oversubscription(pair: Pair) -> list[str]:
    ours, theirs = pair.faster, pair.slower
    if theirs.threads <= theirs.cores or theirs.threads / theirs.cores <= ours.threads / ours.cores:
        return []
    threads = f"{theirs.threads} computing threads on {theirs.cores} cores"
    return [threads, *pair.words("involuntary_switches", "cpu_pressure")]


def slow_rank(pair: Pair) -> list[str]:
    late, before = pair.slower.straggler, pair.faster.straggler
    if late is None or (before is not None and before.delay_s >= late.delay_s):
        return []
    where = "" if late.host is None else f" on {late.host}"
    found = [f"rank {late.rank}{where} is last, {amount(late.delay_s, 's')} behind the next"]
    if late.phase is not None:
        found.append(f"it spends more time than the others in: {LABELS[late.phase]}")
    return found


def own_threads(pair: Pair) -> list[str]:
    if pair.rise("others") >= _OTHERS_PERCENT:
        return []
    replicas = [side.trial.placement.replicas_per_rank for side in (pair.faster, pair.slower)]
    more_replicas = replicas[1] > replicas[0] and pair.factor_s(AT_WORK) > 0
    more_threads = (
        pair.same_layout and pair.rise("threads") >= _MORE_THREADS and _slower_cores(pair)
    )
    if not (more_replicas or more_threads):
        return []
    found = [f"{replicas[1]} replicas in threads of one process"] if more_replicas else []
    return [
        *found,
        *pair.factor_words(CPU_TIME),
        *pair.factor_words(AT_WORK),
        *pair.words("threads", "voluntary_switches", "involuntary_switches"),
    ]


def intraop_threads(pair: Pair) -> list[str]:
    ours, theirs = (s.trial.placement.threads_per_worker for s in (pair.faster, pair.slower))
    if theirs <= ours:
        return []
    threads = f"{theirs} threads divide each operation instead of {ours}"
    return [threads, *pair.factor_words(CPU_TIME), *pair.factor_words(AT_WORK)]


def micro_batches(pair: Pair) -> list[str]:
    counts, before = (pipeline_counts(s.trial) for s in (pair.slower, pair.faster))
    if counts is None or (before is not None and before[1] >= counts[1]):
        return []
    return [f"{counts[1]} micro-batches: each operation has fewer samples"]


def competition(pair: Pair) -> list[str]:
    if pair.rise("others") < _OTHERS_PERCENT or pair.factor_s(AT_WORK) <= 0:
        return []
    return pair.words("others", "cpu_pressure", "involuntary_switches")


def frequency(pair: Pair) -> list[str]:
    ours, theirs = (side.evidence.get("frequency") for side in (pair.faster, pair.slower))
    if not ours or theirs is None or theirs > _FREQUENCY_DROP * ours or not _slower_cores(pair):
        return []
    return pair.words("frequency")


def memory_contention(pair: Pair) -> list[str]:
    if not _slower_cores(pair):
        return []
    by_others = pair.rise("others") >= _OTHERS_PERCENT
    by_own_cores = pair.rise("run_cores") >= 0.1
    if not (by_others or by_own_cores):
        return []
    return [*pair.factor_words(CPU_TIME), *pair.words("others" if by_others else "run_cores")]


def fewer_cores(pair: Pair) -> list[str]:
    return pair.factor_words(ALLOCATED) if pair.slower.cores < pair.faster.cores else []


def cold_cache(pair: Pair) -> list[str]:
    """Reads of the run itself, or of all programs where the kernel does not tell them apart."""
    for figure in ("run_read", "disk_read"):
        ours, theirs = (side.per_step(figure) for side in (pair.faster, pair.slower))
        if ours is not None and theirs is not None:
            is_cold = theirs >= max(_COLD_BYTES, 2 * ours)
            return pair.words(figure, "iowait", "io_pressure") if is_cold else []
    return []


def storage(pair: Pair) -> list[str]:
    if pair.rise("iowait") < _PERCENT and pair.rise("io_pressure") < _PRESSURE_PERCENT:
        return []
    return pair.words("iowait", "io_pressure", "disk_read")


def decoding(pair: Pair) -> list[str]:
    idle = pair.slower.evidence.get("cpu_idle")
    return [] if idle is None or idle > _IDLE_PERCENT else pair.words("cpu_idle", "cpu_pressure")


def slow_reader(pair: Pair) -> list[str]:
    if pair.slower.evidence.get("cpu_idle") is None:
        return []
    return ["neither the disks nor the cores were busy", *pair.words("iowait", "cpu_idle")]


def layer_communication(pair: Pair) -> list[str]:
    ours, theirs = pair.faster.pass_comm_s, pair.slower.pass_comm_s
    if theirs - ours < pair.difference.part("comm_transfer").difference_s.mean / 2:
        return []
    seconds = f"{amount(theirs, 's')} per step instead of {amount(ours, 's')}"
    return [f"layers communicate within the passes (batch normalisation): {seconds}"]


def transport(pair: Pair) -> list[str]:
    ours, theirs = pair.faster.trial, pair.slower.trial
    if (ours.transport, ours.transport_options) == (theirs.transport, theirs.transport_options):
        return []
    changed = f"transport {theirs.transport} instead of {ours.transport}"
    if ours.transport == theirs.transport:
        changed = f"transport {theirs.transport} with other options"
    return [changed, *pair.words("network_sent")]


def more_traffic(pair: Pair) -> list[str]:
    ours, theirs = _traffic(pair)
    if ours is None or theirs is None or theirs < _SAME_BYTES * ours:
        return []
    return [f"traffic per step: {theirs / 1e6:.3g} MB instead of {ours / 1e6:.3g} MB"]


def slow_link(pair: Pair) -> list[str]:
    ours, theirs = _traffic(pair)
    part = pair.difference.part("comm_transfer")
    if ours is None or theirs is None or part.faster_s <= 0 or part.slower_s <= 0:
        return []
    before, after = ours / part.faster_s, theirs / part.slower_s
    if after >= before:
        return []
    rates = f"{after / 1e6:.3g} MB/s of exposed transfer instead of {before / 1e6:.3g} MB/s"
    return [f"traffic per step: {theirs / 1e6:.3g} MB, as before", rates]


def bubble(pair: Pair) -> list[str]:
    counts = pipeline_counts(pair.slower.trial)
    if counts is None:
        return []
    stages, micro_batches = counts
    share = 100 * theoretical_bubble(stages, micro_batches)
    return [f"{stages} stages, {micro_batches} micro-batches: at least {share:.0f} % of a step"]


def _slower_cores(pair: Pair) -> bool:
    """Tell whether the same arithmetic took more CPU time."""
    growth = next((f.slower / f.faster for f in pair.factors if f.factor == CPU_TIME), 1.0)
    return growth >= _CPU_TIME_GROWTH


def _traffic(pair: Pair) -> tuple[float | None, float | None]:
    """Return the bytes that both send in a step; None where there is no traffic to speak of."""
    known = [side.evidence.get("network_sent") for side in (pair.faster, pair.slower)]
    if any(rate is None or rate < _LEAST_TRAFFIC for rate in known):
        return None, None
    return pair.faster.per_step("network_sent"), pair.slower.per_step("network_sent")
