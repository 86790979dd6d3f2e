"""Load of this machine by processes that are not ours, looked at before a training.

The times of the cores are those that the sidecar samples during a trial, so that both looks agree:
niced processes count, interrupts do not. They cover the whole machine, while a container may hide
the processes that use it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.analysis.trial.load import DISTURBING_PERCENT
from paceline.base.errors import TimedOut
from paceline.measure.records.virtual_clock import OWNER_VARIABLE
from paceline.measure.telemetry.host_reading import HostReader, Processes, read_processes

LOOK_S = 1.0
_POLL_S = 2.0
_NAMED = 3
_NAMED_PERCENT = 1.0  # of the cores; a smaller share is not worth a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The CPU times of a machine and its processes at one moment."""

    cpu_seconds: Mapping[str, float]  # by mode, as in the trace of the sidecar
    processes: Processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """CPU time that was taken from us between two moments, in percent of all cores."""

    others_percent: float
    stolen_percent: float  # by the hypervisor, for other machines
    named: Mapping[str, float]  # of `others_percent`, by name of the program
    is_known: bool = True

    @property
    def is_disturbing(self) -> bool:
        return self.others_percent + self.stolen_percent > DISTURBING_PERCENT

    @property
    def lines(self) -> list[str]:
        """One line for the start of a run, if there is a load that disturbs it."""
        if not self.is_disturbing:
            return []
        return [f"{self.words}: speeds may be too low; `paceline run --when-idle SECONDS` waits"]

    @property
    def words(self) -> str:
        """Names the shares, those of the largest programs first."""
        if not self.is_known:
            return "what other processes use cannot be seen here"
        largest = sorted(self.named.items(), key=lambda item: -item[1])[:_NAMED]
        parts = [f"{name} {share:.0f} %" for name, share in largest if share >= _NAMED_PERCENT]
        unseen = self.others_percent - sum(self.named.values())
        if unseen > DISTURBING_PERCENT:
            parts.append(f"{unseen:.0f} % by processes that have ended or are hidden")
        text = f"other processes use {self.others_percent:.0f} % of the cores"
        if parts:
            text += f" ({', '.join(parts)})"
        if self.stolen_percent >= _NAMED_PERCENT:
            text += f"; the hypervisor gives {self.stolen_percent:.0f} % to other machines"
        return text


class Looking:
    """Looks at the load of this machine from now on."""

    def __init__(self) -> None:
        self._reader = HostReader(gpus=dict)
        self._began_s = time.monotonic()
        self._before = _glance(self._reader)

    def end(self) -> Load:
        """Return the load since the begin; takes what is left of `LOOK_S`."""
        time.sleep(max(0.0, self._began_s + LOOK_S - time.monotonic()))
        return load_between(self._before, _glance(self._reader))


def wait_until_idle(limit_s: float, say: Callable[[str], object]) -> None:
    """Return when others use no more than the limit. Raises TimedOut after `limit_s`.

    say: gets one line if there is something to wait for.
    """
    deadline_s = time.monotonic() + limit_s
    is_said = False
    while (load := Looking().end()).is_disturbing:
        if time.monotonic() > deadline_s:
            raise TimedOut(
                f"--when-idle: expected an idle machine within {limit_s:g} s, but {load.words}; "
                "wait longer, or leave out --when-idle to measure beside that"
            )
        if not is_said:
            say(f"waits at most {limit_s:g} s for an idle machine: {load.words}")
        is_said = True
        time.sleep(_POLL_S)


def load_between(before: Glance, after: Glance) -> Load:
    """Return the load between two moments; unknown where the kernel shows no CPU times."""
    grown = {mode: s - before.cpu_seconds[mode] for mode, s in after.cpu_seconds.items()}
    total_s = sum(grown.values())
    if total_s <= 0:
        return Load(others_percent=0.0, stolen_percent=0.0, named={}, is_known=False)
    ours_s = 0.0
    named_s: defaultdict[str, float] = defaultdict(float)
    for key, process in after.processes.items():
        # one that is new has used all of its time since then
        used_s = process.cpu_s - (before.processes[key].cpu_s if key in before.processes else 0.0)
        if process.is_ours:
            ours_s += used_s
        else:
            named_s[process.name] += used_s
    others_s = max(0.0, grown["user"] + grown["nice"] + grown["system"] - ours_s)
    return Load(
        others_percent=100 * others_s / total_s,
        stolen_percent=100 * grown["steal"] / total_s,
        named={name: 100 * used_s / total_s for name, used_s in named_s.items() if used_s > 0},
    )


def _glance(reader: HostReader) -> Glance:
    # the lab's scheduler and its Spark are no load of others
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    found = read_processes(owner)
    return Glance(cpu_seconds=reader.read(slow=False)["cpu_seconds"], processes=found)
