"""Paths in a run directory. No other module knows file names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def _checked(name: str, what: str) -> str:
    if not _SAFE_NAME.fullmatch(name):
        raise UsageError(
            f"{what} {name!r}: expected letters, digits, '.', '_' and '-' (it becomes a file name)"
        )
    return name


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files of one rank; no other process writes them."""

    root: Path

    @property
    def spans(self) -> Path:
        return self.root / "spans.jsonl"

    @property
    def steps(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def sample_log(self) -> Path:
        return self.root / "sample_log.jsonl"

    @property
    def communication(self) -> Path:
        return self.root / "communication.jsonl"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Files of the sidecar of one host; no other process writes them."""

    root: Path

    @property
    def trace(self) -> Path:
        return self.root / "trace.jsonl"

    @property
    def ranks(self) -> Path:
        """Samples of the ranks on this host."""
        return self.root / "ranks.jsonl"

    @property
    def final_metrics(self) -> Path:
        """Last values in Prometheus's text format, for runs shorter than a scrape interval."""
        return self.root / "final.prom"

    @property
    def sidecar(self) -> Path:
        """State of the sidecar: process id, address and port of its metrics, how it ended."""
        return self.root / "sidecar.json"


@dataclass(frozen=True, slots=True)
class TrialFiles:
    root: Path

    @property
    def trial(self) -> Path:
        return self.root / "trial.json"

    @property
    def command(self) -> Path:
        return self.root / "command.txt"

    @property
    def launcher_log(self) -> Path:
        return self.root / "launcher.log"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def equivalence(self) -> Path:
        """Result of the comparison with the baseline."""
        return self.root / "equivalence.json"

    @property
    def gradient(self) -> Path:
        """Averaged gradient of the first step, safetensors."""
        return self.root / "tensors" / "gradient_step1.safetensors"

    @property
    def initial_weights(self) -> Path:
        """Weights before the first step, safetensors; only while a script trains."""
        return self.root / "tensors" / "weights_initial.safetensors"

    @property
    def weights(self) -> Path:
        """Weights after the last step, safetensors."""
        return self.root / "tensors" / "weights_final.safetensors"

    @property
    def claims(self) -> Path:
        """Assignment of ranks to Spark tasks; exists only while rounds of tasks train."""
        return self.root / "claims"

    def rank(self, rank: int) -> RankFiles:
        return RankFiles(self.root / "ranks" / str(rank))

    def ranks(self) -> Iterator[tuple[int, RankFiles]]:
        """Yield the ranks that have files, in order."""
        found = (int(p.name) for p in (self.root / "ranks").glob("*") if p.name.isdigit())
        for rank in sorted(found):
            yield rank, self.rank(rank)

    def host(self, name: str) -> HostFiles:
        return HostFiles(self.root / "hosts" / _checked(name, "host name"))

    def hosts(self) -> Iterator[tuple[str, HostFiles]]:
        for path in sorted((self.root / "hosts").glob("*")):
            yield path.name, HostFiles(path)


@dataclass(frozen=True, slots=True)
class RunFiles:
    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def comparison(self) -> Path:
        return self.root / "comparison.json"

    @property
    def repeats(self) -> Path:
        """The looks of `repeats = "auto"`, and why no further repeat ran."""
        return self.root / "repeats.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def export(self) -> Path:
        """Files of `paceline export`, unless it gets another folder."""
        return self.root / "export"

    @property
    def tune(self) -> RunFiles:
        """Run directory of the search before this run's trials."""
        return RunFiles(self.root / "tune")

    @property
    def tuned_spec(self) -> Path:
        """The spec with the best settings of a search."""
        return self.root / "tuned.toml"

    @property
    def tuning(self) -> Path:
        """Result of a search."""
        return self.root / "tuning.json"

    @property
    def targets(self) -> Path:
        """File-based service discovery of Prometheus: a file for each running sidecar."""
        return self.root / "targets"

    @property
    def monitor(self) -> Path:
        """Files of `paceline monitor`: configuration and storage of Prometheus."""
        return self.root / "monitor"

    def trial(self, trial_id: str) -> TrialFiles:
        return TrialFiles(self.root / "trials" / _checked(trial_id, "trial id"))

    def trials(self) -> Iterator[tuple[str, TrialFiles]]:
        """Yield the trials that have a `trial.json`, by name."""
        for path in sorted((self.root / "trials").glob("*/trial.json")):
            yield path.parent.name, TrialFiles(path.parent)
