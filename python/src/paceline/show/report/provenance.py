"""Sections of the page about equivalence, the resources of ranks, commands, machine and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.analysis.compare.row import Row, full_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.equivalence.check import Equivalence
from paceline.analysis.equivalence.checks import Check
from paceline.analysis.equivalence.tensor_checks import REPLAY
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.base.host.cgroups import CgroupLimits
from paceline.measure.records.rows import RankEnvironment
from paceline.show.report.columns import MARK_STYLES, mark_cell
from paceline.show.report.section import Cell, Column, Section, Table
from paceline.show.report.wording import NOT_MEASURED, number

Fact = tuple[str, str]
# a row, the first result of its repeats, and the worst result of each check by name
Checked = tuple[Row, Equivalence, Mapping[str, Check]]
# the name of the configuration, for its first rank only
RankResources = tuple[str, RankEnvironment]

_CHECK_WORDS = {
    "sample_log": "samples of every step",
    "training": "training values",
    "initial_weights": "initial weights",
    "first_loss": "loss of step 1",
    "first_gradient": "gradient of step 1",
    "first_steps": "first steps of a script",
    "weights_step16": "weights after 16 steps",
    "every_step": "a change in every step",
    "final_weights": "final weights",
    "replicas": "all replicas",
    "evaluation": "evaluations",
}
_MARKS = {True: "✓", False: "✗", None: "?"}


def equivalence_section(comparison: Comparison) -> Section:
    """Show every check of every configuration: the worst of its repeats."""
    found = list(_checked(comparison))
    names = dict.fromkeys(name for _, _, checks in found for name in checks)
    columns: list[Column[Checked]] = [
        Column("configuration", lambda item: full_name(item[0], comparison.rows), "name"),
        Column("arithmetic", lambda item: item[1].arithmetic, "text"),
        *(Column(_check_words(name), _check_cell(name)) for name in names),
        Column(
            "largest difference\nof a weight",
            lambda i: number(i[0].equivalence.max_abs_weight_diff, 2),
        ),
        Column("equivalent", lambda item: mark_cell(item[0])),
    ]
    details = [
        Section(
            title=f"{full_name(row, comparison.rows)}, against {first.baseline_id}",
            sentences=[
                f"{_mark(check)} {_check_words(name)}: {check.reason}"
                for name, check in checks.items()
            ],
        )
        for row, first, checks in found
    ]
    return Section(
        title="Equivalence",
        anchor="equivalence",
        intro=(
            "Distributing a batch changes only the order in which gradients are added. The "
            "tolerances follow from that (fp32 rounding, the number of summands, layers and "
            "steps). Every value is relative to the loss, to the norm of the gradient, or to the "
            "change of the weights. Over more than 64 steps rounding alone may move weights apart, "
            "so steps from the baseline's states are replayed in place of the final weights. ✓ is "
            "about the whole training, ✓¹ only about its first steps. Configurations that fail are "
            "not ranked; ~ marks those that are lossy on purpose."
        ),
        table=Table(columns=columns, items=found) if found else None,
        sentences=() if found else ("No baseline has finished, so nothing was checked.",),
        parts=[Section(title="Result of each check", folded=True, parts=details)] if found else (),
    )


def worst_checks(equivalences: Sequence[Equivalence]) -> dict[str, Check]:
    """Return the worst result of each check over the repeats, which may have different checks."""
    by_name: dict[str, list[Check]] = {}
    for equivalence in equivalences:
        for check in equivalence.checks:
            by_name.setdefault(check.name, []).append(check)
    return {name: _worst(checks) for name, checks in by_name.items()}


def _checked(comparison: Comparison) -> Iterable[Checked]:
    for row in comparison.rows:
        trials = comparison.trials.get(row.configuration, ())
        equivalences = [t.equivalence for t in trials if t.equivalence is not None]
        if equivalences:
            yield row, equivalences[0], worst_checks(equivalences)


def _worst(checks: Iterable[Check]) -> Check:
    severity = {False: 2, None: 1, True: 0}
    return max(checks, key=lambda check: (severity[check.passed], check.value or 0.0))


def _check_cell(name: str) -> Callable[[Checked], Cell]:
    def cell(item: Checked) -> Cell:
        check = item[2].get(name)
        if check is None:
            return Cell("")
        mark = _mark(check)
        value = "" if check.value is None else f" {number(check.value, 2)}"
        allowed = "" if check.tolerance is None else f"allowed {number(check.tolerance, 2)}"
        return Cell(f"{mark}{value}", allowed, MARK_STYLES.get(mark, ""), check.reason)

    return cell


def _check_words(name: str) -> str:
    first = name.removeprefix(REPLAY)
    return _CHECK_WORDS.get(name, name) if first == name else f"steps replayed from {first}"


def _mark(check: Check) -> str:
    return _MARKS[check.passed] if check.decisive else NOT_MEASURED


def ranks_section(comparison: Comparison) -> Section:
    """Show the resources that each rank really had, in the first repeat of each row."""
    ranks = [
        (full_name(row, comparison.rows) if number_ == 0 else "", environment)
        for row in comparison.rows
        for trial in comparison.trials.get(row.configuration, ())[:1]
        for number_, environment in enumerate(_environments(trial))
    ]
    columns: list[Column[RankResources]] = [
        Column("configuration", lambda item: item[0], "name"),
        Column("rank", lambda item: str(item[1].rank)),
        Column("host", lambda item: item[1].host, "text"),
        Column("intra-op\nthreads", lambda item: str(item[1].intraop_threads)),
        Column("inter-op\nthreads", lambda item: str(item[1].interop_threads)),
        Column("cores", lambda item: _affinity(item[1]), "text"),
        Column("OpenMP and BLAS settings", lambda i: _settings(i[1].omp_environment), "text"),
        Column("cgroup limits", lambda item: _limits(item[1]), "text"),
        Column("precision", lambda i: f"{i[1].precision}, {i[1].memory_format}", "name"),
        Column("transport", lambda item: _transport(item[1]), "name"),
        Column("clock offset, ms", lambda item: _clock(item[1])),
    ]
    return Section(
        title="Resources of each rank",
        anchor="ranks",
        intro="Read back inside the ranks; first repeat of each configuration.",
        table=Table(columns=columns, items=ranks),
    )


def commands_section(comparison: Comparison) -> Section:
    """Show the exact command of each trial, in the order of the rows, and the spec."""
    trials = [
        Section(title=trial.record.trial.id, code=trial.record.command.strip())
        for row in comparison.rows
        for trial in comparison.trials.get(row.configuration, ())
        if trial.record.command
    ]
    parts = [Section(title=f"{len(trials)} trials", folded=True, parts=trials)]
    spec = comparison.manifest.get("spec_toml")
    if spec:
        parts.append(Section(title="The spec", folded=True, code=spec))
    return Section(title="Exact commands", anchor="commands", parts=parts)


def machine_section(comparison: Comparison) -> Section:
    """Show machine, versions and data."""
    machine = _machine(comparison) or [("not recorded", "")]
    parts = [
        Section(title="Machine", table=facts_table(machine)),
        Section(title="Versions", table=facts_table(_versions(comparison))),
    ]
    parts += [
        Section(title=f"Data of {workload}", table=facts_table([("data set", dataset)]))
        for workload, dataset in _mapping(comparison.manifest, "data").items()
    ]
    return Section(title="Machine, versions, data", anchor="machine", parts=parts)


def facts_table(facts: Sequence[Fact]) -> Table[Fact]:
    """Return a table of names and values, without headings."""
    columns: list[Column[Fact]] = [
        Column("", lambda fact: Cell(fact[0], style="soft"), "name"),
        Column("", lambda fact: fact[1], "text"),
    ]
    return Table(columns=columns, items=facts)


def _environments(trial: TrialAnalysis) -> list[RankEnvironment]:
    return [r.environment for r in trial.record.ranks if r.environment is not None]


def _all_environments(comparison: Comparison) -> list[RankEnvironment]:
    trials = [trial for found in comparison.trials.values() for trial in found]
    return [environment for trial in trials for environment in _environments(trial)]


def _versions(comparison: Comparison) -> list[Fact]:
    """Return library versions as planned and as the ranks found them."""
    found: dict[str, set[str]] = {}
    for name, version in _mapping(comparison.manifest, "versions").items():
        found.setdefault(name, set()).add(str(version))
    for environment in _all_environments(comparison):
        for name, version in environment.versions.items():
            found.setdefault(name, set()).add(version)
    return [(name, ", ".join(sorted(values))) for name, values in sorted(found.items())]


def _machine(comparison: Comparison) -> list[Fact]:
    """Return facts of the host that started the run, else of the hosts of the ranks."""
    facts = [
        (_words(name), _fact(name, value))
        for name, value in _mapping(comparison.manifest, "host").items()
        if value is not None and not isinstance(value, dict)
    ]
    if facts:
        git = _mapping(comparison.manifest, "git")
        if git:
            changes = ", with local changes" if git.get("has_local_changes") else ""
            facts.append(("git commit", f"{git.get('commit')}{changes}"))
        return facts
    hosts = {each.host: each.cpu_model for each in _all_environments(comparison)}
    return sorted(hosts.items())


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _fact(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return str(value)


def _settings(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items())) or NOT_MEASURED


def _limits(environment: RankEnvironment) -> str:
    found = CgroupLimits(
        cpus=environment.cgroup_cpu_limit, memory_bytes=environment.cgroup_memory_limit_bytes
    )
    return found.words or "none"


def _transport(environment: RankEnvironment) -> str:
    if environment.transport == "none":
        return NOT_MEASURED
    return f"{environment.transport} on {environment.interface}"


def _clock(environment: RankEnvironment) -> str:
    offset, error = 1000 * environment.clock_offset_s, 1000 * environment.clock_error_s
    return f"{offset:.2f} ± {error:.2f}"


def _affinity(environment: RankEnvironment) -> str:
    """List the cores of a rank, those of each replica thread, and the NUMA nodes."""
    cores = _ranges(environment.affinity)
    if environment.workers:
        each = " | ".join(_ranges(w.affinity) for w in environment.workers)
        cores += f" (replicas: {each})"
    if environment.numa_nodes:
        cores += f", NUMA {_ranges(environment.numa_nodes)}"
    return cores


def _ranges(cores: list[int]) -> str:
    """Return ranges, for example `0-3, 8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"
