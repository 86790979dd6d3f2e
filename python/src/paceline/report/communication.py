"""Communication time as sentences and plain values, for the report and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.communication import trial_communication
from paceline.analysis.labels import short_name
from paceline.records.phases import LABELS
from paceline.report import figures
from paceline.report.wording import DASH, listed, milliseconds, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.analysis.communication import SumCheck, TrialCommunication
    from paceline.analysis.communication_bins import Bin
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.stragglers import Straggling
    from paceline.report.figures import Chart

    # keeps a chart and returns its name
    Add = Callable[[Chart], str]


def communication(comparison: Comparison, add: Add) -> list[dict[str, Any]]:
    """Describe, for each workload, the first repeat of each configuration that communicates."""
    found = []
    for workload in comparison.workloads:
        profiles = []
        for row, trial in figures.first_repeats(comparison, workload):
            profile = trial_communication(trial.record)
            if profile is not None:
                profiles.append((short_name(row, comparison.rows), profile))
        if profiles:
            found.append(
                {
                    "workload": workload,
                    "chart": add(figures.communication_chart(workload, profiles)),
                    "parts": [_part(name, profile) for name, profile in profiles],
                    "disagree": any(not c.passed for _, p in profiles for c in p.checks),
                }
            )
    return found


def _part(name: str, profile: TrialCommunication) -> dict[str, Any]:
    return {
        "name": name,
        "sentences": [straggler_sentence(found) for found in profile.stragglers],
        "rows": [(size_words(b), per_step(b, profile), b) for b in profile.bins],
        "facts": [
            clock_sentence(profile),
            *sent_sentences(profile.bins),
            *(check_sentence(check) for check in profile.checks),
        ],
    }


def straggler_sentence(found: Straggling) -> str:
    """Describe the straggler and its delay, or why there is none."""
    where = "" if found.stage is None else f" of stage {found.stage}"
    if found.straggler is None:
        delays = [f"rank {r.rank} {milliseconds(r.delay_s.mean)}" for r in found.ranks[:2]]
        shown = f"; straggler delay per step: {listed(delays)}" if delays else ""
        return f"No straggler{where}: {found.reason}{shown}."
    first = found.ranks[0]
    host = "" if first.host is None else f" on {first.host}"
    delay = first.delay_s
    sentence = (
        f"Straggler{where}: rank {first.rank}{host} is last in {first.last_share:.0%} of the "
        f"steps and delays each step by {milliseconds(delay.mean)} "
        f"({milliseconds(delay.low)}{DASH}{milliseconds(delay.high)}), "
        f"{first.delay_share:.1%} of it"
    )
    if found.phase is not None and found.phase_excess_s is not None:
        more = milliseconds(found.phase_excess_s)
        sentence += f"; its phase “{LABELS[found.phase]}” takes {more} longer than the others'"
    return f"{sentence}."


def clock_sentence(profile: TrialCommunication) -> str:
    """State how well the times of different ranks can be compared."""
    hosts = {rank.host for rank in profile.ranks}
    if profile.clock_error_s == 0:
        return "All ranks use one clock." if len(hosts) == 1 else "The clocks were not compared."
    return (
        "The clocks of the ranks were compared with an error of "
        f"{number(1000 * profile.clock_error_s, 2)} ms: a shorter wait counts as transfer."
    )


def check_sentence(check: SumCheck) -> str:
    word = "yes" if check.passed else "NO"
    return f"{check.name}: {word}, to {abs(check.difference):.2%} (allowed {check.allowed:.0%})"


def size_words(each: Bin) -> str:
    """Return the range of sizes, for example `1-10 MB`."""
    if each.most_bytes is None:
        return f"> {_size(each.least_bytes)}"
    if each.least_bytes == 0:
        return f"< {_size(each.most_bytes)}"
    low, high = _size(each.least_bytes), _size(each.most_bytes)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{low}{DASH}{high}"


def per_step(each: Bin, profile: TrialCommunication) -> dict[str, float | None]:
    """Return a bin's numbers for one step of one rank, in milliseconds, megabytes and GB/s."""
    steps = sum(rank.steps for rank in profile.ranks)

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds / steps

    return {
        "count": each.count / steps,
        "megabytes": each.payload_bytes / 1e6 / steps,
        "each_ms": 1000 * each.time_s / each.count,
        "wait_ms": ms(each.wait_s),
        "transfer_ms": ms(each.transfer_s),
        "exposed_ms": ms(each.exposed_s),
        "overlapped_ms": ms(each.overlapped_s),
        "bandwidth": None
        if each.bandwidth_bytes_per_s is None
        else each.bandwidth_bytes_per_s / 1e9,
    }


def sent_sentences(bins: Sequence[Bin]) -> list[str]:
    """Compare the counted messages and bytes with the algorithm's formula."""
    found = []
    for algorithm in dict.fromkeys(b.algorithm for b in bins if b.sent_bytes is not None):
        own = [b for b in bins if b.algorithm == algorithm and b.sent_bytes is not None]
        sentence = (
            f"{algorithm or own[0].operation}: all ranks sent {_total(own, 'sent_messages'):,} "
            f"messages, {_total(own, 'sent_bytes'):,} bytes"
        )
        if all(b.expected_bytes is not None for b in own):
            sentence += (
                f"; the algorithm needs {_total(own, 'expected_bytes'):,} bytes, in at least "
                f"{_total(own, 'expected_messages'):,} messages"
            )
        found.append(sentence)
    return found


def _total(bins: Sequence[Bin], name: str) -> int:
    return sum(getattr(each, name) or 0 for each in bins)


def _size(size_bytes: int) -> str:
    return f"{size_bytes // 10**6} MB" if size_bytes >= 10**6 else f"{size_bytes // 10**3} kB"
