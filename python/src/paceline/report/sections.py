"""Tables of the report as plain values for the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import distinctions, short_name
from paceline.records.phases import LABELS
from paceline.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.analysis.checks import Check
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.records.rows import RankEnvironment

_CHECK_WORDS = {
    "sample_log": "samples of every step",
    "training": "training values",
    "initial_weights": "initial weights",
    "first_loss": "loss of step 1",
    "first_gradient": "gradient of step 1",
    "final_weights": "final weights",
    "evaluation": "evaluations",
}
_MARKS = {True: "✓", False: "✗", None: "?"}


def cost_label(row: Row) -> str:
    """Return the main cost of a row with its share of the step."""
    if row.main_cost is None or row.main_cost_share is None:
        return wording.NOT_MEASURED
    label = LABELS.get(row.main_cost, row.main_cost)
    return f"{label} {100 * row.main_cost_share:.0f} %"


def layout_words(comparison: Comparison, row: Row) -> str:
    """Return the layout of a row and the options that distinguish it."""
    return ", ".join([row.layout, *distinctions(row, comparison.rows)])


def equivalence_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return every check of every configuration: the worst of its repeats."""
    found: list[dict[str, Any]] = []
    for row in comparison.rows:
        trials = comparison.trials.get(row.configuration, ())
        equivalences = [t.equivalence for t in trials if t.equivalence is not None]
        if not equivalences:
            continue
        checks = [_worst(same) for same in zip(*(i.checks for i in equivalences), strict=False)]
        found.append(
            {
                "row": row,
                "name": f"{row.workload}: {short_name(row, comparison.rows)}",
                "arithmetic": equivalences[0].arithmetic,
                "baseline": equivalences[0].baseline_id,
                "checks": [_check_cells(check) for check in checks],
            }
        )
    names = list(dict.fromkeys(check["name"] for item in found for check in item["checks"]))
    for item in found:  # scripts and evaluations have other checks
        by_name = {check["name"]: check for check in item["checks"]}
        item |= {"names": names, "by_name": by_name}
    return found


def _worst(checks: Iterable[Check]) -> Check:
    severity = {False: 2, None: 1, True: 0}
    return max(checks, key=lambda c: (severity[c.passed], c.value or 0.0))


def _check_cells(check: Check) -> dict[str, Any]:
    return {
        "name": _CHECK_WORDS.get(check.name, check.name),
        "mark": _MARKS[check.passed] if check.decisive else wording.NOT_MEASURED,
        "value": check.value,
        "tolerance": check.tolerance,
        "reason": check.reason,
    }


def environment_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the resources that each rank really had, in the first repeat of each row."""
    return [
        {
            "name": f"{row.workload}: {short_name(row, comparison.rows)}" if number == 0 else "",
            "environment": environment,
            "affinity": _affinity(environment),
            "omp": _settings(environment.omp_environment),
            "limits": _limits(environment),
        }
        for row in comparison.rows
        for trial in comparison.trials.get(row.configuration, ())[:1]
        for number, environment in enumerate(_environments(trial))
    ]


def _environments(trial: TrialAnalysis) -> list[RankEnvironment]:
    return [r.environment for r in trial.record.ranks if r.environment is not None]


def commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return trial and exact command, in the order of the rows."""
    return [
        (trial.record.trial.id, trial.record.command.strip())
        for row in comparison.rows
        for trial in comparison.trials.get(row.configuration, ())
        if trial.record.command
    ]


def versions(comparison: Comparison) -> list[tuple[str, str]]:
    """Return library versions as planned and as the ranks found them."""
    found: dict[str, set[str]] = {}
    for name, version in _mapping(comparison.manifest, "versions").items():
        found.setdefault(name, set()).add(str(version))
    for trials in comparison.trials.values():
        for trial in trials:
            for environment in _environments(trial):
                for name, version in environment.versions.items():
                    found.setdefault(name, set()).add(version)
    return [(name, ", ".join(sorted(values))) for name, values in sorted(found.items())]


def machine(comparison: Comparison) -> list[tuple[str, str]]:
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
            facts.append(("git commit", f"{git['commit']}{changes}"))
        return facts
    environments = [
        e for trials in comparison.trials.values() for t in trials for e in _environments(t)
    ]
    hosts = {e.host: e.cpu_model for e in environments}
    return [(host, model) for host, model in sorted(hosts.items())]


def data_rows(manifest: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return facts of each data set, and the time of its ingest, which is in no trial."""
    ingest = _mapping(manifest, "ingest_s")
    rows = []
    for workload, facts in _mapping(manifest, "data").items():
        known = facts if isinstance(facts, dict) else {"data set": facts}
        listed = [(_words(name), _fact(name, value)) for name, value in known.items()]
        if workload in ingest:
            listed.append(("ingest, s (in no trial's time)", wording.number(ingest[workload])))
        rows.append((workload, listed))
    return rows


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _fact(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return _settings({str(k): str(v) for k, v in value.items()})
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return str(value)


def _settings(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items())) or wording.NOT_MEASURED


def _limits(environment: RankEnvironment) -> str:
    parts = []
    if environment.cgroup_cpu_limit is not None:
        parts.append(f"{environment.cgroup_cpu_limit:g} cores")
    if environment.cgroup_memory_limit_bytes is not None:
        parts.append(f"{environment.cgroup_memory_limit_bytes / 2**30:.1f} GiB")
    return ", ".join(parts) or "none"


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
