"""Rules: which cause can take how much time, and by which evidence.

Each rule looks at two measurements and returns the seconds of a step that its evidence can explain,
with the evidence as sentences. NaN: it was not measured. The seconds are signed, so that their
noise between repeats can be tested (see `explanation`). Limits of the evidence:

- percentages of the time, such as that stopped by a quota: by how much longer a step has them;
- a product, such as bytes and time per byte: by the change of one factor, see `_product`;
- configuration, such as more threads: by the change of what it can make wait.

Split a difference in the time on cores into CPU time and cores at work: The ranks spend w = C / q
seconds of a step on their cores (computation, optimiser, other). C is the CPU time of the run per
step, and q the cores that were at work meanwhile: the allocated cores k times the share u of them
that was at work. The logarithmic mean L(a, b) = (b - a) / ln(b / a) divides the difference exactly
(logarithmic mean Divisia index: B. W. Ang, Energy Policy 32(9), 2004):

    w_b - w_a = L(w_a, w_b) * (ln(C_b / C_a) - ln(k_b / k_a) - ln(u_b / u_a))

More CPU time for the same arithmetic means slower cores (memory bandwidth, caches, frequency, a
shared physical core) or more work (other threads of the same processes). A smaller share u means
waiting for cores (quota, steal, competition), for locks or for other threads of an operation.
Threads that work while the ranks wait for data or for other ranks count, too, so the share can
exceed 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.analysis.explain.evidence import (
    CAUSE_PARTS,
    FIGURES_BY_NAME,
    HOST_CORES,
    ON_CORES,
    StepMeasurement,
    amount,
)
from paceline.analysis.trial.phases import theoretical_bubble
from paceline.analysis.trial.reading import pipeline_counts
from paceline.measure.records.phases import LABELS

CPU_TIME, ALLOCATED, AT_WORK = "cpu_time", "allocated_cores", "cores_at_work"
# A switch itself takes 2 to 4 microseconds, and the caches are filled again after it (C. Li, C.
# Ding, K. Shen, Quantifying the Cost of Context Switch, 2007).
_SWITCH_S = 10e-6
_MORE_THREADS = 0.5  # a mean over samples, of which the first may be before their start
_COLD_BYTES = 10_000  # read from disks in a step; fewer are not the samples
_LEAST_TRAFFIC = 1e5  # bytes per second: less is not the gradients' traffic
_IDLE_PERCENT = 15.0  # of all cores: with less, readers compete for cores
_LEAST_KNOWN = 0.1  # of the larger amount: less has no time per byte worth measuring
# Of the longer waiting for data: less may also be work of the readers between two waits for disks.
_LEAST_REST = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of the time on cores in both configurations, and its part of the difference."""

    factor: str
    label: str
    unit: str
    faster: float
    slower: float
    difference_s: float  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two measurements side by side: of one repeat, or the means."""

    faster: StepMeasurement
    slower: StepMeasurement

    def more(self, figure: str) -> float:
        """Return by how much more of a figure the slower one has; NaN if it is unknown."""
        return self.slower.figure(figure) - self.faster.figure(figure)

    def longer_s(self, percentage: str) -> float:
        """Return by how much longer a step has what a percentage of the time measures."""
        return self.slower.share_s(percentage) - self.faster.share_s(percentage)

    def part_s(self, name: str) -> float:
        return self.slower.part_s(name) - self.faster.part_s(name)

    def words(self, *figures: str) -> list[str]:
        """Return for each known figure for example `IOWait: 12 % instead of 1 %`."""
        found = []
        for figure in (FIGURES_BY_NAME[name] for name in figures):
            ours, theirs = (s.figure(figure.name) for s in (self.faster, self.slower))
            if not math.isnan(theirs - ours):
                values = f"{amount(theirs, figure.unit)} instead of {amount(ours, figure.unit)}"
                found.append(f"{figure.label}: {values}")
        return found

    def factors(self) -> tuple[Factor, ...]:
        """Return the factors of the time on cores, which add up; none without CPU times."""
        sides = self.faster, self.slower
        walls_s = [side.part_s(ON_CORES) for side in sides]
        cpu_s = [side.per_step("run_cores") for side in sides]
        if not all(c > 0 and w > 0 for c, w in zip(cpu_s, walls_s, strict=True)):
            return ()
        cores = [side.cores for side in sides]
        at_work = [c / w / k for c, w, k in zip(cpu_s, walls_s, cores, strict=True)]
        mean_s = _log_mean(*walls_s)
        return tuple(
            Factor(
                factor=name, label=label, unit=unit, faster=float(a), slower=float(b),
                difference_s=sign * mean_s * math.log(b / a),
            )
            for name, label, unit, (a, b), sign in (
                (CPU_TIME, "CPU time per step", "s", cpu_s, 1),
                (ALLOCATED, "allocated cores", "", cores, -1),
                (AT_WORK, "share of the allocated cores at work", "", at_work, -1),
            )
        )  # fmt: skip

    def factor_s(self, *names: str) -> float:
        """Return the difference that factors of the time on cores make; NaN without them."""
        found = [f.difference_s for f in self.factors() if f.factor in names]
        return sum(found) if found else math.nan

    def factor_words(self, *names: str) -> list[str]:
        return [
            f"{f.label}: {amount(f.slower, f.unit)} instead of {amount(f.faster, f.unit)}"
            for f in self.factors()
            if f.factor in names
        ]

    @property
    def same_layout(self) -> bool:
        """Tell whether both have the same strategy, ranks and threads."""
        ours, theirs = self.faster.trial, self.slower.trial
        return (ours.local_strategy, ours.placement) == (theirs.local_strategy, theirs.placement)


Found = tuple[float, list[str]]  # seconds per step that the evidence can explain, and the evidence
_NOT_FOUND: Found = (0.0, [])


def cpu_quota(pair: Pair) -> Found:
    return pair.longer_s("throttled"), pair.words("throttled", "run_cores", "cpu_idle")


def steal(pair: Pair) -> Found:
    """Take of the time on cores the share of the wanted CPU time that was stolen."""
    return _stolen_s(pair.slower) - _stolen_s(pair.faster), pair.words("steal", "cpu_idle")


def context_switches(pair: Pair) -> Found:
    names = "voluntary_switches", "involuntary_switches"
    ours, theirs = (sum(s.per_step(n) for n in names) / s.cores for s in (pair.faster, pair.slower))
    return _SWITCH_S * (theirs - ours), pair.words(*names)


def slow_rank(pair: Pair) -> Found:
    late = pair.slower.straggler
    if late is None:
        return _NOT_FOUND
    where = "" if late.host is None else f" on {late.host}"
    delay = amount(pair.slower.delay_s, "s")
    found = [f"rank {late.rank}{where} is last, {delay} behind the next"]
    if late.phase is not None:
        found.append(f"it spends more time than the others in: {LABELS[late.phase]}")
    return pair.slower.delay_s - pair.faster.delay_s, found


def fewer_cores(pair: Pair) -> Found:
    if pair.slower.cores >= pair.faster.cores:
        return _NOT_FOUND
    return pair.factor_s(ALLOCATED), pair.factor_words(ALLOCATED)


def frequency(pair: Pair) -> Found:
    """Take the CPU time that grew as the frequency fell."""
    walls_s = [side.part_s(ON_CORES) for side in (pair.faster, pair.slower)]
    ratio = pair.faster.figure("frequency") / pair.slower.figure("frequency")
    if not ratio > 0:
        return math.nan, []
    limit_s = _log_mean(*walls_s) * math.log(ratio)
    return _least(limit_s, pair.factor_s(CPU_TIME)), pair.words("frequency")


def cold_cache(pair: Pair) -> Found:
    figure, by_bytes_s, _ = _reading_s(pair)
    return by_bytes_s, pair.words(figure, "iowait", "io_pressure")


def storage(pair: Pair) -> Found:
    figure, _, by_rate_s = _reading_s(pair)
    return by_rate_s, pair.words("iowait", "io_pressure", figure)


def layer_communication(pair: Pair) -> Found:
    ours, theirs = pair.faster.pass_comm_s, pair.slower.pass_comm_s
    seconds = f"{amount(theirs, 's')} per step instead of {amount(ours, 's')}"
    of = "as of batch normalisation or sharded parameters"
    return theirs - ours, [f"within the passes, {of}: {seconds}"]


def more_traffic(pair: Pair) -> Found:
    by_bytes_s, _, words = _sending_s(pair)
    return by_bytes_s, words


def slow_link(pair: Pair) -> Found:
    """Take the longer time per byte between hosts; processes of one host have no link."""
    if pair.slower.trial.placement.nodes == 1 or _has_other_transport(pair):
        return _NOT_FOUND
    _, by_rate_s, words = _sending_s(pair)
    return by_rate_s, words


def transport(pair: Pair) -> Found:
    if not _has_other_transport(pair):
        return _NOT_FOUND
    ours, theirs = pair.faster.trial.transport, pair.slower.trial.transport
    changed = f"transport {theirs} instead of {ours}"
    if ours == theirs:
        changed = f"transport {theirs} with other options"
    _, by_rate_s, words = _sending_s(pair)
    seconds = _transfer_s(pair.slower) - _transfer_s(pair.faster)
    return seconds if math.isnan(by_rate_s) else by_rate_s, [changed, *words]


def oversubscription(pair: Pair) -> Found:
    """Take what the threads wait for a core: of T threads on k cores, each waits 1 - k / T."""
    ours, theirs = pair.faster, pair.slower
    if _waiting_share(theirs) <= _waiting_share(ours):
        return _NOT_FOUND
    seconds = theirs.step_s * _waiting_share(theirs) - ours.step_s * _waiting_share(ours)
    threads = f"{_threads(theirs)} computing threads on {theirs.cores} cores"
    words = [threads, *pair.words("involuntary_switches", "cpu_pressure")]
    return _least(seconds, pair.longer_s("cpu_pressure")), words


def own_threads(pair: Pair) -> Found:
    """Take the time on cores that other threads may have taken: by a lock (GIL), or in Java."""
    replicas = [side.trial.placement.replicas_per_rank for side in (pair.faster, pair.slower)]
    if _waiting_share(pair.slower) > 0:
        return _NOT_FOUND
    seconds, found = pair.factor_s(CPU_TIME, AT_WORK), []
    if replicas[1] > replicas[0]:
        found = [f"{replicas[1]} replicas in threads of one process"]
    elif pair.same_layout and pair.more("threads") >= _MORE_THREADS:
        # each second of their CPU time stops the others for a second at most
        more_cpu_s = pair.slower.per_step("run_cores") - pair.faster.per_step("run_cores")
        seconds = _least(seconds, more_cpu_s)
    else:
        return _NOT_FOUND
    figures = pair.words("threads", "voluntary_switches", "involuntary_switches")
    return seconds, [*found, *pair.factor_words(CPU_TIME, AT_WORK), *figures]


def intraop_threads(pair: Pair) -> Found:
    ours, theirs = (s.trial.placement.threads_per_worker for s in (pair.faster, pair.slower))
    if theirs <= ours or _waiting_share(pair.slower) > 0:
        return _NOT_FOUND
    threads = f"{theirs} threads divide each operation instead of {ours}"
    return pair.factor_s(CPU_TIME, AT_WORK), [threads, *pair.factor_words(CPU_TIME, AT_WORK)]


def micro_batches(pair: Pair) -> Found:
    counts, before = (pipeline_counts(s.trial) for s in (pair.slower, pair.faster))
    if counts is None or (before is not None and before[1] >= counts[1]):
        return _NOT_FOUND
    words = [f"{counts[1]} micro-batches: each operation has fewer samples"]
    return pair.factor_s(CPU_TIME, AT_WORK), words


def competition(pair: Pair) -> Found:
    """Take what others had of the cores, if the run had less of its cores or waited longer.

    Cores that a quota took were not lost to other processes.
    """
    waits_s = sum(max(0.0, pair.part_s(name)) for name in ("data_wait", "comm_wait"))
    lost_s = pair.factor_s(AT_WORK) - np.fmax(0.0, cpu_quota(pair)[0])
    could_s = math.nan if math.isnan(lost_s) else max(0.0, lost_s) + waits_s
    others_s = [s.share_s("others") * s.figure(HOST_CORES) for s in (pair.faster, pair.slower)]
    seconds = others_s[1] - others_s[0]
    words = pair.words("others", "cpu_pressure", "involuntary_switches")
    if math.isnan(seconds):
        return seconds, words
    return _least(seconds, pair.longer_s("cpu_pressure"), could_s), words


def memory_contention(pair: Pair) -> Found:
    """Take the CPU time that grew while others, or more of the own cores, used the memory."""
    others = pair.more("others") / 100 * pair.slower.figure(HOST_CORES)
    own = 0.0 if pair.same_layout else pair.more("run_cores")
    name = "others" if others >= own else "run_cores"
    share = min(1.0, np.nanmax([others, own, 0.0]))
    limit_s = pair.slower.part_s(ON_CORES) * share
    by_clock_s = np.fmax(0.0, frequency(pair)[0])
    words = [*pair.factor_words(CPU_TIME), *pair.words(name)]
    return _least(pair.factor_s(CPU_TIME) - by_clock_s, limit_s), words


def decoding(pair: Pair) -> Found:
    return _decoding_s(pair), pair.words("cpu_idle", "cpu_pressure")


def slow_reader(pair: Pair) -> Found:
    """Take the waiting for data in which the readers waited neither for disks nor for cores."""
    longer_s = pair.part_s("data_wait")
    io_s = _io_s(pair.slower) - _io_s(pair.faster)
    known = "a core" if math.isnan(io_s) else "I/O or a core"
    rest_s = longer_s - float(np.fmax(0.0, io_s)) - max(0.0, _decoding_s(pair))
    if math.isnan(pair.slower.figure("cpu_idle")) or rest_s < _LEAST_REST * longer_s:
        return _NOT_FOUND
    words = f"{amount(rest_s, 's')} of the longer wait for data are no wait for {known}"
    return rest_s, [words, *pair.words("iowait", "io_pressure", "cpu_idle", "cpu_pressure")]


def bubble(pair: Pair) -> Found:
    counts = pipeline_counts(pair.slower.trial)
    if counts is None:
        return _NOT_FOUND
    stages, count = counts
    words = f"{stages} stages, {count} micro-batches"
    if not pair.slower.trial.reduction.updates_within_step:  # the pipeline drains in every step
        share = 100 * theoretical_bubble(stages, count)
        words += f": idle for at least {share:.0f} % of the passes"
    return pair.part_s("bubble"), [words]


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause and the parts of CAUSE_PARTS that it makes longer."""

    name: str
    label: str
    acts_on: tuple[str, ...]
    find: Callable[[Pair], Found]


_EVERYTHING = tuple(CAUSE_PARTS)
_WAITING = (ON_CORES, "data_wait", "bubble", "comm_wait")
# The evidence of these is itself a time, so they come first.
MEASURED = (
    Rule("cpu_quota", "CPU quota of the control group", _EVERYTHING, cpu_quota),
    Rule("steal", "CPU time stolen by the hypervisor", _WAITING, steal),
    Rule("context_switches", "more context switches", (ON_CORES, "comm_wait"), context_switches),
    Rule("slow_rank", "a slow rank (straggler)", ("comm_wait",), slow_rank),
    Rule("fewer_cores", "fewer allocated cores", (ON_CORES,), fewer_cores),
    Rule("frequency", "lower clock frequency", (ON_CORES,), frequency),
    Rule("cold_cache", "data from disks, not from the page cache", ("data_wait",), cold_cache),
    Rule("storage", "slow storage", ("data_wait",), storage),
    Rule(
        "layer_communication",
        "communication of layers within the passes",
        ("comm_transfer",),
        layer_communication,
    ),
    Rule("transport", "another transport", ("comm_transfer",), transport),
    Rule("more_traffic", "more bytes per step", ("comm_transfer",), more_traffic),
    Rule("slow_link", "slow link", ("comm_transfer",), slow_link),
)
# The evidence of these is that they were there; it limits their time, but does not measure it.
_PRESENT = (
    Rule(
        "oversubscription",
        "more threads than cores",
        (ON_CORES, "bubble", "comm_wait", "comm_transfer"),
        oversubscription,
    ),
    Rule("own_threads", "other threads of the run", (ON_CORES,), own_threads),
    Rule("intraop_threads", "threads within operations", (ON_CORES,), intraop_threads),
    Rule("micro_batches", "smaller operations", (ON_CORES,), micro_batches),
    Rule(
        "memory_contention",
        "slower cores: memory bandwidth, caches or shared cores",
        (ON_CORES,),
        memory_contention,
    ),
    Rule(
        "competition",
        "other processes on the cores",
        (ON_CORES, "data_wait", "comm_wait"),
        competition,
    ),
    Rule("decoding", "readers on the same cores", ("data_wait",), decoding),
    Rule("slow_reader", "slow reader or remote storage", ("data_wait",), slow_reader),
    Rule("pipeline_bubble", "pipeline bubbles", ("bubble",), bubble),
)
RULES = (*MEASURED, *_PRESENT)


def _product(before_s: float, after_s: float, before: float, after: float) -> tuple[float, float]:
    """Divide the change of amount x time per amount: into that of the amount, and the rest.

    Each is multiplied by the mean of the other one in both configurations, so that they add up and
    neither comes first. An amount that was next to nothing before has the time per amount of after.
    """
    if math.isnan(after - before + after_s - before_s) or after <= 0:
        return math.nan, math.nan
    rates = [after_s / after if before < _LEAST_KNOWN * after else before_s / before]
    rates.append(after_s / after)
    by_amount_s = (after - before) * sum(rates) / 2
    return by_amount_s, after_s - before_s - by_amount_s


def _reading_s(pair: Pair) -> tuple[str, float, float]:
    """Return the figure of bytes read, and the longer waiting for disks by bytes and by rate.

    Bytes are those of the run itself, or of all programs where the kernel does not tell them apart.
    """
    sides = pair.faster, pair.slower
    waits_s = [_io_s(side) for side in sides]
    known = [name for name in ("run_read", "disk_read") if not math.isnan(pair.more(name))]
    if not known:
        return "disk_read", math.nan, waits_s[1] - waits_s[0]
    read = [side.per_step(known[0]) for side in sides]
    if read[1] < _COLD_BYTES:
        return known[0], 0.0, waits_s[1] - waits_s[0]
    return known[0], *_product(*waits_s, *read)


def _io_s(side: StepMeasurement) -> float:
    """Return the time of a step in which a task waited for I/O; IOWait counts idle cores only."""
    iowait_s = side.share_s("iowait") * side.figure(HOST_CORES)
    return float(np.fmax(side.share_s("io_pressure"), iowait_s))


def _sending_s(pair: Pair) -> tuple[float, float, list[str]]:
    """Return the longer exposed transfer by bytes and by time per byte, and the evidence."""
    sides = pair.faster, pair.slower
    if not all(side.figure("network_sent") >= _LEAST_TRAFFIC for side in sides):
        return math.nan, math.nan, []
    sent, seconds = [s.per_step("network_sent") for s in sides], [_transfer_s(s) for s in sides]
    each = [1e9 * time_s / count for time_s, count in zip(seconds, sent, strict=True)]
    words = [
        f"sent by the hosts per step: {sent[1] / 1e6:.3g} MB instead of {sent[0] / 1e6:.3g} MB",
        f"exposed transfer: {each[1]:.3g} ms/MB instead of {each[0]:.3g} ms/MB",
    ]
    return *_product(*seconds, *sent), words


def _transfer_s(side: StepMeasurement) -> float:
    """Return the exposed transfer of gradients, without that of layers within the passes."""
    return max(0.0, side.part_s("comm_transfer") - side.pass_comm_s)


def _has_other_transport(pair: Pair) -> bool:
    ours, theirs = pair.faster.trial, pair.slower.trial
    return (ours.transport, ours.transport_options) != (theirs.transport, theirs.transport_options)


def _stolen_s(side: StepMeasurement) -> float:
    iowait = np.nan_to_num(side.figure("iowait"))
    wanted = 100 - side.figure("cpu_idle") - iowait  # cores that had something to do
    return side.part_s(ON_CORES) * side.figure("steal") / wanted if wanted > 0 else 0.0


def _threads(side: StepMeasurement) -> int:
    place = side.trial.placement
    return place.ranks * place.threads_per_rank


def _waiting_share(side: StepMeasurement) -> float:
    return max(0.0, 1 - side.cores / _threads(side))


def _decoding_s(pair: Pair) -> float:
    """Return the longer waiting for cores, beside that by which the computation became longer."""
    waited_s = pair.longer_s("cpu_pressure")
    if _waiting_share(pair.slower) > 0:
        return 0.0  # the computing threads wait for each other
    if not math.isnan(waited_s):
        return max(0.0, waited_s - max(0.0, pair.part_s(ON_CORES)))
    is_busy = pair.slower.figure("cpu_idle") <= _IDLE_PERCENT
    return pair.part_s("data_wait") if is_busy else 0.0


def _least(*seconds: float) -> float:
    """Return the smallest limit that is known; NaN if none is."""
    known = [each for each in seconds if not math.isnan(each)]
    return min(known, default=math.nan)


def _log_mean(a: float, b: float) -> float:
    if min(a, b) <= 0:
        return 0.0
    return a if math.isclose(a, b, rel_tol=1e-12) else (b - a) / math.log(b / a)
