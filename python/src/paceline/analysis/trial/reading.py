"""Read the files of a trial: small documents as values, rows as Polars frames, the user's code.

An unfinished last row and unknown fields are ignored. A missing or damaged field raises an error
that names the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from paceline.base.errors import DataError
from paceline.measure.records.documents import read_status
from paceline.measure.records.files import (
    FieldTypes,
    check_types,
    document,
    read_json,
    text_of,
)
from paceline.measure.records.layout import HostFiles, RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import (
    SCHEMA,
    ContinuationRow,
    Outcome,
    RankEnvironment,
    RankStatus,
    SpanRow,
    TrainingResult,
)
from paceline.measure.records.sources import read_sources
from paceline.measure.records.tables import (
    HOST_SAMPLES,
    RANK_SAMPLES,
    read_header,
    read_table,
    rows,
)
from paceline.plan.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The documents of one rank."""

    rank: int
    spans: tuple[SpanRow, ...]
    environment: RankEnvironment | None
    status: RankStatus | None
    continuations: tuple[ContinuationRow, ...] = ()  # starts after failures

    @property
    def clock_offset_s(self) -> float:
        """Seconds to add to this rank's unix times to get rank 0's; 0 if not measured."""
        return 0.0 if self.environment is None else self.environment.clock_offset_s

    @property
    def clock_error_s(self) -> float:
        """Largest error of `clock_offset_s` in seconds; 0 on the host of rank 0."""
        return 0.0 if self.environment is None else self.environment.clock_error_s

    @property
    def host(self) -> str | None:
        if self.environment is not None:
            return self.environment.host
        return None if self.status is None else self.status.host

    def span(self, name: str) -> SpanRow | None:
        """Return the first span called `name`."""
        return next((s for s in self.spans if s.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrace:
    """The trace of one host's sidecar: counters and gauges as they were recorded.

    header: facts about the host and the sidecar (cores, interval_s, boot_id).
    samples: one row per tick, the columns of HOST_SAMPLES.
    """

    host: str
    header: Mapping[str, Any]
    samples: pl.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial with its small documents. Steps and traces are large and are read when needed."""

    trial: Trial
    files: TrialFiles
    outcome: Outcome | None
    result: TrainingResult | None
    ranks: tuple[RankRecord, ...]  # in order of rank
    command: str | None

    @property
    def finished(self) -> bool:
        """Tell whether the trial ended well, so that it can be compared."""
        return self.outcome is not None and self.outcome.status == "ok"

    @property
    def dilation(self) -> int:
        """Return how many lab hosts took turns on the same cores; 1 if each had its own."""
        known = (rank.environment for rank in self.ranks)
        return max((found.dilation for found in known if found is not None), default=1)

    @property
    def link(self) -> str | None:
        """Return the rate of the links between its hosts, if a lab limited them."""
        if self.trial.placement.nodes == 1:
            return None
        known = (rank.environment for rank in self.ranks)
        return next((found.link for found in known if found is not None), None)


def by_workload(records: Iterable[TrialRecord]) -> dict[str, list[TrialRecord]]:
    """Return the trials of each workload, in their order.

    The trainings of one entry of [[workloads]] are in the order of their global batches.
    """
    found: dict[str, list[TrialRecord]] = defaultdict(list)
    entries: dict[str, int] = {}
    for record in records:
        training = record.trial.training
        entries.setdefault(training.entry_name, len(entries))
        found[training.workload].append(record)

    def place(name: str) -> tuple[int, int]:
        training = found[name][0].trial.training
        return entries[training.entry_name], training.global_batch

    return {name: found[name] for name in sorted(found, key=place)}


def load_run(run: RunFiles) -> list[TrialRecord]:
    """Read all trials of a run: first in the order of the manifest, then the others by name.

    Raises DataError if a file is damaged.
    """
    found = dict(run.trials())
    planned = dict.fromkeys(load_manifest(run).get("trials", []))
    order = [i for i in planned if i in found] + [i for i in found if i not in planned]
    return [load_trial(found[trial_id]) for trial_id in order]


def load_shares(run: RunFiles) -> list[TrialRecord]:
    """Read the finished trials with the batch of a node's share, of `paceline predict --measure`.

    Raises DataError if a file is damaged.
    """
    begun = run.shares.glob("*/trials/*/trial.json")
    roots = sorted({path.parents[2] for path in begun})
    return [record for root in roots for record in load_run(RunFiles(root)) if record.finished]


def load_manifest(run: RunFiles) -> dict[str, Any]:
    """Read the manifest; empty where there is none (trials that were started by hand).

    Raises DataError if the run was written by a version with another schema, or it is damaged.
    """
    if not run.manifest.exists():
        return {}
    manifest = check_types(read_json(run.manifest), _TYPES_OF_MANIFEST, str(run.manifest))
    for key in ("trials", "data"):
        texts = manifest.get(key) or []
        if not all(isinstance(each, str) for each in [*texts, *_values(texts)]):
            raise DataError(f"{run.manifest}: expected names in {key}, got {texts!r:.80}")
    schema = manifest.get("schema")
    if schema not in (None, SCHEMA):
        raise DataError(f"{run.manifest}: expected schema {SCHEMA}, got {schema!r}")
    return manifest


_TYPES_OF_MANIFEST: FieldTypes = {
    "schema": (int, type(None)),
    **{name: (str, type(None)) for name in ("name", "description", "spec_toml", "baseline")},
    "trials": (list,),
    **{name: (dict, type(None)) for name in ("data", "git", "versions", "packages", "host")},
    "created_unix_s": (int, float, type(None)),
}


def _values(table: object) -> Iterable[object]:
    return table.values() if isinstance(table, dict) else ()


def load_trial(files: TrialFiles) -> TrialRecord:
    """Read one trial. Raises DataError if a file is damaged."""
    return TrialRecord(
        trial=read_trial(files),
        files=files,
        outcome=document(files.outcome, Outcome),
        result=document(files.result, TrainingResult),
        ranks=tuple(_load_rank(rank, rank_files) for rank, rank_files in files.ranks()),
        command=text_of(files.command) if files.command.exists() else None,
    )


def read_trial(files: TrialFiles) -> Trial:
    """Read the trial as it was planned. Raises DataError if `trial.json` is damaged or missing."""
    trial = document(files.trial, Trial)
    if trial is None:
        raise DataError(f"{files.trial}: expected a trial, found no such file")
    return trial


def read_hosts(files: TrialFiles) -> tuple[HostTrace, ...]:
    """Read the traces of all hosts of a trial. Raises DataError if a row is damaged."""
    return tuple(
        HostTrace(
            host=name,
            header=read_header(host_files.trace),
            samples=read_table(host_files.trace, HOST_SAMPLES),
        )
        for name, host_files in files.hosts()
    )


def read_rank_samples(files: HostFiles) -> pl.DataFrame:
    """Read the samples of the ranks on one host, the columns of RANK_SAMPLES."""
    return read_table(files.ranks, RANK_SAMPLES)


def _load_rank(rank: int, files: RankFiles) -> RankRecord:
    return RankRecord(
        rank=rank,
        spans=rows(files.spans, SpanRow),
        environment=document(files.environment, RankEnvironment),
        status=read_status(files),
        continuations=rows(files.continuations, ContinuationRow),
    )


# --- facts of a planned trial that tables and comparisons need -----------------------------------
#
# The extensions know their own options; only this module of the analysis asks a trial for them.

TIMES, DOT = "\N{MULTIPLICATION SIGN}", "\N{MIDDLE DOT}"


def node_setup(trial: Trial) -> Hashable:
    """Identify what a node does, independent of the launcher and of what connects the nodes."""
    place = trial.placement
    return (
        trial.local_strategy,
        place.replicas_per_node,
        place.stages,
        place.threads_per_worker,
        trial.layout,
        tuple(trial.strategy_options.details()) if place.stages > 1 else (),
        trial.device,
        trial.training.activation_checkpointing,
        trial.training.accumulation_steps,
        trial.training.compile,
        trial.training.float32_matmul_precision,
        trial.training.cudnn_autotuning,
    )


def pipeline_counts(trial: Trial) -> tuple[int, int] | None:
    """Return the numbers of stages and micro-batches; None without a pipeline."""
    micro_batches = trial.option("micro_batches")
    if trial.placement.stages == 1 or micro_batches is None:
        return None
    return trial.placement.stages, int(micro_batches)


def why_not_equivalent(trial: Trial) -> str | None:
    """Explain why a trial is lossy and may end differently; None if it is exact."""
    return " and ".join(trial.inexact_reasons) or None


def exact_form(trial: Trial) -> Trial:
    """Return the same trial with the options that make it equivalent."""
    return trial.model_copy(
        update={
            "strategy_options": trial.strategy_options.exact_form(),
            "transport_options": trial.transport_options.exact_form(),
            "training": trial.training.model_copy(update={"batch_norm": "global"}),
        }
    )


_DIGITS = 12  # of a checksum: enough to tell versions apart


def with_sources(manifest: Mapping[str, Any], records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the manifest of a run with `sources`, the checksums of the files that its ranks read.

    There is none without files of the user's own, and for runs of older versions.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        for name, versions in read_sources(record.files).items():
            found[name] |= {sha256[:_DIGITS] for sha256 in versions}
    sources = {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}
    return {**manifest, **({"sources": sources} if sources else {})}


def source_flags(records: Sequence[TrialRecord]) -> Iterator[str]:
    """Describe files that have changed between the trials, or that ranks have read differently."""
    trials: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)  # checksums by path and trial
    names: dict[str, str] = {}
    for record in records:
        for name, versions in read_sources(record.files).items():
            if len(versions) > 1:
                yield f"{record.trial.id}: its ranks ran different versions of {name}"
            for sha256, path in versions.items():
                names[path] = name
                trials[path].setdefault(record.trial.id, set()).add(sha256)
    for path, versions_of in trials.items():
        own = [record for record in records if record.trial.id in versions_of]
        last = versions_of[max(own, key=_launched).trial.id]
        old = [record for record in own if not versions_of[record.trial.id] & last]
        if old:
            yield (
                f"{names[path]} has changed during the run; measured with an older version: "
                f"{', '.join(_rows(old, records))}"
            )


def _launched(record: TrialRecord) -> float:
    return 0.0 if record.outcome is None else record.outcome.launched_unix_s


def _rows(old: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield the configurations of trials, with the number of their repeats if it is not all."""
    for name in dict.fromkeys(record.trial.configuration for record in old):
        count, of = (
            sum(each.trial.configuration == name for each in group) for group in (old, records)
        )
        yield name if count == of else f"{name} ({count} of {of} repeats)"
