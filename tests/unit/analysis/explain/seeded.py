"""Made-up measurements with known causes, made by what the causes do to a machine.

Each disturbance lengthens a step by a given time, and leaves the traces that the kernel and the
network would show. Repeats have noise of whole runs, and the samples of the traces have their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from tests.unit.analysis import fabricate

from paceline.analysis.explain.evidence import PART_NAMES, StepMeasurement, Straggler
from paceline.analysis.explain.explanation import Explanation, explain_repeats
from paceline.analysis.statistics.intervals import Estimate
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.plan.trials.trial import Trial

HOST_CORES = 2
RUN_NOISE, SAMPLE_NOISE = 0.01, 0.03
BASE_S = {
    "computation": 0.5, "data_wait": 0.01, "bubble": 0.0, "comm_wait": 0.02,
    "comm_transfer": 0.1, "optimizer": 0.05, "other": 0.02, "remainder": 0.0,
}  # fmt: skip
TWO_HOSTS = dataclasses.replace(fabricate.MPI, nodes=2, ranks=1)
ONE_RANK = fabricate.make_trial_value(TWO_HOSTS)
MANY_THREADS = fabricate.make_trial_value(
    dataclasses.replace(TWO_HOSTS, threads=2, allocated_cores=1)
)


@dataclass
class Machine:
    """One step on two hosts with a rank each, and what its host counts meanwhile."""

    trial: Trial = ONE_RANK
    parts_s: dict[str, float] = field(default_factory=lambda: dict(BASE_S))
    cpu_s: float = 2 * 0.55  # of both ranks
    throttled_s: float = 0.0
    stolen_s: float = 0.0  # of each core that is busy
    others_s: float = 0.0
    others_cores: float = 0.01  # all the time
    cpu_waited_s: float = 0.0  # in which a task waited for a core
    io_waited_s: float = 0.0
    read: float = 100.0  # bytes; the rest is in the page cache
    sent: float = 4e6
    switches: float = 600.0
    delay_s: float = 0.0
    frequency: float = 2.5

    @property
    def on_cores_s(self) -> float:
        return sum(self.parts_s[n] for n in ("computation", "optimizer", "other"))


# What a second of each cause adds to parts of the step, and to what is counted.
CAUSES = {
    "cpu_quota": {"computation": 1.0, "throttled_s": 1.0, "cpu_waited_s": 1.0},
    "steal": {"computation": 1.0, "stolen_s": 1.0},
    "slow_reader": {"data_wait": 1.0},
    "storage": {"data_wait": 1.0, "io_waited_s": 1.0},
    "cold_cache": {"data_wait": 1.0, "io_waited_s": 1.0, "read": 50e6},
    "slow_link": {"comm_transfer": 1.0},
    "more_traffic": {"comm_transfer": 1.0, "sent": Machine.sent / BASE_S["comm_transfer"]},
    "slow_rank": {"comm_wait": 1.0, "delay_s": 1.0},
    "competition": {"computation": 1.0, "others_s": 1.0, "cpu_waited_s": 1.0},
    "memory_contention": {"computation": 1.0, "cpu_s": 2.0},
    "frequency": {"computation": 1.0},
    "oversubscription": {"computation": 1.0, "cpu_waited_s": 1.4},
}


def disturb(now: Machine, cause: str, seconds: float) -> None:
    """Make a step longer by this cause, with the traces that it leaves."""
    if cause == "memory_contention":
        # another program uses the memory from another core all the time, for which none waits
        now.others_cores += 1.0
    elif cause == "frequency":
        now.frequency /= 1 + seconds / now.on_cores_s
        now.cpu_s *= 1 + seconds / now.on_cores_s
    elif cause == "oversubscription":
        now.trial = MANY_THREADS  # two threads on the core of each rank
    for name, each in CAUSES[cause].items():
        if name in now.parts_s:
            now.parts_s[name] += each * seconds
        else:
            setattr(now, name, getattr(now, name) + each * seconds)


def measured(
    random: np.random.Generator, causes: Mapping[str, float], *, irrelevant: bool = False
) -> StepMeasurement:
    """Run one step with these causes, by their seconds, and measure it."""
    now = Machine()
    for name, seconds in causes.items():
        disturb(now, name, seconds)
    if irrelevant:
        disturb(now, "steal", 0.02 * now.on_cores_s)
        now.switches *= 1.05
    run = np.exp(RUN_NOISE * random.standard_normal())
    parts_s = run * np.array([now.parts_s[name] for name in PART_NAMES])
    parts_s *= np.exp(RUN_NOISE * random.standard_normal(len(parts_s)))
    step_s = float(parts_s.sum())

    def noisy(value: float) -> float:
        return float(value * np.exp(SAMPLE_NOISE * random.standard_normal()))

    def percent(seconds: float, cores: int = 1) -> float:
        return min(100.0, noisy(100 * seconds / step_s / cores))

    others_s = now.others_s + now.others_cores * step_s
    busy_s = now.cpu_s / 2 + others_s
    busy = 100 * busy_s / step_s / HOST_CORES
    stolen_share = now.stolen_s / now.on_cores_s
    stolen = percent(busy_s * stolen_share / (1 - stolen_share), HOST_CORES)
    iowait = percent(now.io_waited_s, HOST_CORES)
    return StepMeasurement(
        trial=now.trial,
        cores=2,
        parts_s=parts_s,
        figures={
            "throttled": percent(now.throttled_s),
            "steal": stolen,
            "iowait": iowait,
            "cpu_idle": max(0.0, 100 - busy - stolen - iowait),
            "io_pressure": percent(now.io_waited_s + 1e-4),
            "cpu_pressure": percent(now.cpu_waited_s + 0.01 * step_s),
            "others": percent(others_s, HOST_CORES),
            "run_cores": noisy(now.cpu_s) / step_s,
            "run_read": noisy(now.read) / step_s,
            "network_sent": noisy(now.sent) / step_s,
            "voluntary_switches": noisy(now.switches) / step_s,
            "involuntary_switches": noisy(now.switches) / step_s,
            "frequency": now.frequency,
            "threads": 14.0,
            "host_cores": float(HOST_CORES),
        },
        straggler=Straggler(rank=1, host="b", phase="backward") if now.delay_s else None,
        delay_s=noisy(now.delay_s),
    )


def explained(
    seed: int, causes: Mapping[str, float], *, repeats: int = 4, irrelevant: bool = False
) -> Explanation:
    """Explain repeats with these causes beside repeats without any."""
    random = np.random.default_rng(seed)
    clean = {n: measured(random, {}) for n in range(repeats)}
    slowed = {n: measured(random, causes, irrelevant=irrelevant) for n in range(repeats)}
    return explain_measurements(clean, slowed)


def explain_measurements(
    faster: dict[int, StepMeasurement], slower: dict[int, StepMeasurement]
) -> Explanation:
    log_ratio = log_ratio_of(faster, slower)
    return explain_repeats(("faster", "slower"), (faster, slower), log_ratio)


def log_ratio_of(
    faster: dict[int, StepMeasurement], slower: dict[int, StepMeasurement]
) -> Estimate | None:
    """Return log(speed of the first / speed of the second), as a comparison has it."""
    sides = {"faster": faster, "slower": slower}
    rates = RunRates(
        {
            name: {n: RepeatRate(log_rate=-float(np.log(m.step_s))) for n, m in side.items()}
            for name, side in sides.items()
        }
    )
    return rates.log_ratio("faster", "slower")
