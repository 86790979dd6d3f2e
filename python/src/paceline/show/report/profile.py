"""Parts of the time of a training, without a second configuration to compare it with.

Communication time, by `paceline profile` for the terminal and as a section of the page; and the
verdict on one recorded command: the parts of a step, the slow rank, the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType

from paceline.analysis.compare.row import COMPUTATION, Row, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.communication import (
    RankCommunication,
    SizeBin,
    SumCheck,
    TrialCommunication,
    trial_communication,
)
from paceline.analysis.trial.stragglers import Straggling
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import LABELS, STEP_PHASES
from paceline.show.report.section import (
    Column,
    Detail,
    Section,
    Table,
    terminal_table,
    terminal_view,
)
from paceline.show.report.sections import of_workloads
from paceline.show.report.wording import (
    DASH,
    NOT_MEASURED,
    in_milliseconds,
    listed,
    milliseconds,
    number,
    share,
    short_ids,
)

_NOT_RECORDED = (
    "No operation was recorded (ranks/*/communication.jsonl): the transport does not record. "
    "The following values come from the steps."
)


def profile_view(profile: TrialCommunication) -> RenderableType:
    """Show one trial: ranks, operations, the straggler, and whether the sums agree."""
    steps = max(rank.steps for rank in profile.ranks)
    intro = f"{steps} steps after the warm-up, {len(profile.ranks)} ranks"
    if not profile.operations_recorded:
        intro += f"\n{_NOT_RECORDED}"
    parts = [Section(intro="A step of each rank, ms", table=_rank_table(profile))]
    if profile.operations_recorded:
        heading = "Operations in a step of a rank, mean over the ranks; times in ms"
        parts.append(Section(intro=heading, table=_operation_table(profile)))
    parts.append(Section(sentences=_straggler_sentences(profile)))
    section = Section(title=profile.trial, intro=intro, parts=parts, notes=_facts(profile))
    return terminal_view(section)


def overview(profiles: Sequence[TrialCommunication]) -> RenderableType:
    """Show one line for each trial: means over its ranks, in milliseconds per step."""
    names = short_ids([profile.trial for profile in profiles])
    columns: list[Column[TrialCommunication]] = [
        Column("trial", lambda profile: names[profile.trial], "id"),
        Column("step\nms", lambda profile: _mean(profile, lambda rank: rank.step_s)),
        Column("waiting\nms", lambda profile: _mean(profile, _phase("comm_wait"))),
        Column("transfer\nms", lambda profile: _mean(profile, _phase("comm_transfer"))),
        Column("straggler\nms a step", _short_stragglers),
    ]
    return terminal_table(Table(columns=columns, items=profiles))


def communication_section(comparison: Comparison) -> Section | None:
    """Show the first repeat of each configuration that communicates; None if none does."""
    return of_workloads(
        comparison,
        _communication_part,
        title="Communication",
        anchor="communication",
        intro=(
            "After the warm-up, first repeat of each configuration that communicates. Waiting "
            "ends when the last rank has begun the operation; transfer is the rest. Exposed time "
            "adds to the step; overlapped time runs in parallel with the backward pass. Times and "
            "MB are those of a step of a rank."
        ),
    )


def _communication_part(comparison: Comparison, workload: str) -> Section | None:
    # The terminal needs no Plotly.
    from paceline.show.report.figures.charts import communication_chart, first_repeats  # noqa: PLC0415

    profiles = [
        (short_name(row, comparison.rows), profile)
        for row, trial in first_repeats(comparison, workload)
        if (profile := trial_communication(trial.record)) is not None
    ]
    if not profiles:
        return None
    tables = [_page_part(name, profile) for name, profile in profiles]
    return Section(charts=(communication_chart(workload, profiles),), parts=tables)


def _page_part(name: str, profile: TrialCommunication) -> Section:
    table = _operation_table(profile) if profile.bins else None
    missing = "" if profile.bins else _NOT_RECORDED
    words = "Clock errors, messages sent, and checks of the sums"
    return Section(
        title=name,
        intro=missing,
        table=table,
        sentences=_straggler_sentences(profile),
        parts=(Section(title=words, folded=True, sentences=_facts(profile)),),
    )


def _facts(profile: TrialCommunication) -> list[str]:
    checks = [check_sentence(check) for check in profile.checks]
    return [clock_sentence(profile), *sent_sentences(profile.bins), *checks]


def _straggler_sentences(profile: TrialCommunication) -> list[str]:
    return [straggler_sentence(found) for found in profile.stragglers]


def _rank_table(profile: TrialCommunication) -> Table[RankCommunication]:
    columns: list[Column[RankCommunication]] = [
        Column("rank", lambda rank: str(rank.rank)),
        Column("host", lambda rank: rank.host or NOT_MEASURED, "text"),
        Column("step", lambda rank: in_milliseconds(rank.step_s)),
        Column("compute", lambda rank: in_milliseconds(rank.compute_s)),
    ]
    if any(rank.phases_s["bubble"] is not None for rank in profile.ranks):
        columns.append(Column("bubble", lambda rank: in_milliseconds(rank.phases_s["bubble"])))
    columns += [
        Column("waiting", lambda rank: in_milliseconds(rank.phases_s["comm_wait"])),
        Column("transfer", lambda rank: in_milliseconds(rank.phases_s["comm_transfer"])),
    ]
    if profile.operations_recorded:
        columns += [
            Column("over-\nlapped", lambda rank: in_milliseconds(rank.overlapped_s)),
            Column("be-\ntween", lambda rank: in_milliseconds(rank.between_s)),
        ]
    return Table(columns=columns, items=profile.ranks)


def _operation_table(profile: TrialCommunication) -> Table[SizeBin]:
    """Return the operations in a step of a rank; times in milliseconds."""
    steps = sum(rank.steps for rank in profile.ranks)

    def ms(value: Callable[[SizeBin], float | None]) -> Callable[[SizeBin], str]:
        return lambda each: in_milliseconds(_divided(value(each), steps))

    columns: list[Column[SizeBin]] = [
        Column("operation", _operation, "text"),
        Column("size,\nMB", size_words, "name"),
        Column("num-\nber", lambda each: number(each.count / steps)),
        Column("MB", lambda each: number(each.payload_bytes / 1e6 / steps)),
        Column(
            "ms\neach", lambda each: in_milliseconds(each.time_s / each.count), detail=Detail.PAGE
        ),
        Column("wait-\ning", ms(lambda each: each.wait_s)),
        Column("trans-\nfer", ms(lambda each: each.transfer_s)),
        Column("ex-\nposed", ms(lambda each: each.exposed_s)),
        Column("over-\nlapped", ms(lambda each: each.overlapped_s)),
        Column("GB/s", lambda each: number(_divided(each.bandwidth_bytes_per_s, 1e9))),
    ]
    return Table(columns=columns, items=profile.bins)


def _operation(each: SizeBin) -> str:
    return each.operation if each.algorithm is None else f"{each.operation} {each.algorithm}"


def _divided(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _phase(name: str) -> Callable[[RankCommunication], float]:
    return lambda rank: rank.phases_s[name] or 0.0


def _mean(profile: TrialCommunication, value: Callable[[RankCommunication], float]) -> str:
    return in_milliseconds(sum(map(value, profile.ranks)) / len(profile.ranks))


def _short_stragglers(profile: TrialCommunication) -> str:
    named = [
        f"rank {found.straggler}: {number(1000 * found.ranks[0].delay_s.mean, 2)}"
        for found in profile.stragglers
        if found.straggler is not None
    ]
    return ", ".join(named) or NOT_MEASURED


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


def size_words(each: SizeBin) -> str:
    """Return the range of sizes in MB, for example `1-10`."""
    low = each.least_bytes / 1e6
    if each.most_bytes is None:
        return f"> {low:g}"
    high = each.most_bytes / 1e6
    return f"{low:g}{DASH}{high:g}" if low else f"< {high:g}"


def sent_sentences(bins: Sequence[SizeBin]) -> list[str]:
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


def _total(bins: Sequence[SizeBin], name: str) -> int:
    return sum(getattr(each, name) or 0 for each in bins)


_LEAST_SHARE = 0.005  # of a step: a smaller phase is not named


def attached_section(comparison: Comparison) -> Section:
    """Return the verdict on the only trial of a run."""
    row = comparison.rows[0]
    [trial] = comparison.trials[row.configuration]
    sentences = [_steps(trial, row)]
    if row.speed.step_s is not None:
        sentences += [_main_cost(row), _phases(row), *_ranks(trial)]
    sentences += _hosts(row)
    return Section(sentences=sentences, notes=[f"! {flag}" for flag in comparison.flags])


def _steps(trial: TrialAnalysis, row: Row) -> str:
    done = len(trial.steps.step)
    ranks = "1 rank" if row.placement.ranks == 1 else f"{row.placement.ranks} ranks"
    joined = "" if row.placement.ranks == 1 else f", {row.setup.transport}"
    words = f"{done} steps on {ranks} ({row.setup.launcher}{joined})"
    if row.speed.step_s is None:
        warmup = trial.record.trial.training.warmup_steps
        return f"{words}: too few to measure, because the first {warmup} are the warm-up."
    rate = (
        "" if row.speed.samples_per_s is None else f", {number(row.speed.samples_per_s)} samples/s"
    )
    slow = (
        ""
        if row.speed.step_p95_s is None
        else f" (95 % within {milliseconds(row.speed.step_p95_s)})"
    )
    return f"{words}: {milliseconds(row.speed.step_s.estimate)} a step{slow}{rate}."


def _main_cost(row: Row) -> str:
    name = row.times.main_cost or COMPUTATION
    words = "waiting for data" if name == "data_wait" else LABELS.get(name, name)
    return f"Main cost: {words}, {share(row.times.main_cost_share)} of a step."


def _phases(row: Row) -> str:
    known = {
        name: s for name in STEP_PHASES if (s := row.times.step_phases_s.get(name)) is not None
    }
    whole = sum(known.values())
    parts = [
        f"{LABELS[n]} {share(s / whole)}" for n, s in known.items() if s > _LEAST_SHARE * whole
    ]
    return f"A step: {', '.join(parts)}."


def _ranks(trial: TrialAnalysis) -> Iterator[str]:
    if trial.record.trial.placement.ranks == 1:
        return
    found = trial_communication(trial.record)
    if found is None:
        yield "Its ranks exchanged nothing that was recorded."
        return
    yield from map(straggler_sentence, found.stragglers)


def _hosts(row: Row) -> Iterator[str]:
    if row.usage.cpu_percent is None:
        return
    words = f"Hosts: CPU {number(row.usage.cpu_percent)} % busy"
    if row.usage.iowait_percent is not None:
        words += f", {number(row.usage.iowait_percent)} % waiting for I/O"
    if row.usage.memory_peak_bytes is not None:
        words += f"; peak memory of the command {number(row.usage.memory_peak_bytes / 2**20)} MiB"
    yield f"{words}."
