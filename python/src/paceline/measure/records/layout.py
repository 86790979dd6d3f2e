"""Paths in a run directory. No other module knows file names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import DataError, UsageError
from paceline.plan.spec.values import FILE_NAME_PATTERN

_TRIALS = "trials"  # folder of a run
MADE = "made"  # folder of a trial, with files of the user's script
_SAFE_NAME = re.compile(FILE_NAME_PATTERN)
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")


def _checked(name: str, what: str) -> str:
    if not _SAFE_NAME.fullmatch(name):
        raise UsageError(
            f"{what} {name!r}: expected letters, digits, '.', '_' and '-' (it becomes a file name)"
        )
    return name


def _found(path: Path) -> str:
    """Return the name of a folder that was found. It may have been made by somebody else."""
    if not _SAFE_NAME.fullmatch(path.name):
        raise DataError(
            f"{path.parent}: expected folders with names of letters, digits, '.', '_' and '-', "
            f"found {path.name!r}; remove it"
        )
    return path.name


class _File:
    """Path of a file or folder in the folder of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: RankFiles | HostFiles | TrialFiles | RunFiles, _kind: type) -> Path:
        return owner.root / self._name


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files of one rank; no other process writes them."""

    root: Path

    spans = _File("spans.jsonl")
    steps = _File("steps.jsonl")
    sample_log = _File("sample_log.jsonl")
    communication = _File("communication.jsonl")
    evaluations = _File("evaluations.jsonl")
    updates = _File("updates.jsonl")  # of training without a barrier in each step
    checkpoints = _File("checkpoints.jsonl")
    # the rank's starts after the first one, and what it did before each
    continuations = _File("continuations.jsonl")
    interrupted = _File("interrupted.json")  # how the attempt before this one was left
    environment = _File("environment.json")
    memory = _File("memory.json")  # peak memory of the process, after the last step
    weights = _File("weights.json")  # checksums of the final weights
    stacks = _File("stacks.txt")  # of Python, at every request
    operations = _File("operations.bin")  # the last one of each group; see `communication`
    observed = _File("observed.json")  # of a script under `paceline verify`
    own_steps = _File("own_steps.json")  # the same
    trained_rows = _File("trained_rows.json")  # the same
    resumed = _File("resumed.json")  # of a script under `paceline verify --resume-with`
    touched_files = _File("touched_files.json")  # of a script: what it has read and made
    sources = _File("sources.json")  # files of the user's code; see records.sources
    status = _File("status.json")
    log = _File("log.txt")


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Files of the sidecar of one host; no other process writes them."""

    root: Path

    trace = _File("trace.jsonl")
    ranks = _File("ranks.jsonl")  # samples of the ranks on this host
    # last values in Prometheus's text format, for runs shorter than a scrape interval
    final_metrics = _File("final.prom")
    # state of the sidecar: process id, address and port of its metrics, how it ended
    sidecar = _File("sidecar.json")


@dataclass(frozen=True, slots=True)
class TrialFiles:
    root: Path

    trial = _File("trial.json")
    command = _File("command.txt")
    launcher_log = _File("launcher.log")
    outcome = _File("outcome.json")
    # of a rank that could not write its own, by the program that started it
    reported = _File("reported_failure.json")
    failures = _File("failures.jsonl")  # after which the trial was started again
    stacks_request = _File("stacks.request")  # changed when hosts shall ask their ranks for stacks
    made = _File(MADE)  # files that the script has made in its working folder
    last_step = _File("last_step")  # after which the ranks of a script that is verified end
    injected = _File("injected.jsonl")  # failures that the run itself has caused
    slices = _File("slices")  # of lab hosts that took turns; see records.virtual_clock
    result = _File("result.json")
    equivalence = _File("equivalence.json")  # result of the comparison with the baseline
    shown = _File("shown.json")  # of a script that is verified for the marks of a run
    # averaged gradient of the first step, safetensors
    gradient = _File("tensors/gradient_step1.safetensors")
    # weights before the first step, safetensors; only while a script trains
    initial_weights = _File("tensors/weights_initial.safetensors")
    tensors = _File("tensors")
    weights = _File("tensors/weights_final.safetensors")  # after the last step, safetensors
    # a folder for each checkpoint; see records.checkpoints
    checkpoints = _File("checkpoints")
    # assignment of ranks to Spark tasks; exists only while rounds of tasks train
    claims = _File("claims")

    def weights_at(self, point: str) -> Path:
        """Return the weights at a point of comparison, see records.comparison_points."""
        return self.tensors / f"weights_{point}.safetensors"

    def gradient_at(self, point: str) -> Path:
        """Return the gradient of the first step of a replay."""
        return self.tensors / f"gradient_{point}.safetensors"

    def replay(self, training_sha256: str) -> Path:
        """Return the folder of the baseline's states, which all trials of a training replay."""
        in_run = self.root.parent.name == _TRIALS
        return RunFiles(self.root.parents[1] if in_run else self.root).replay / training_sha256[:16]

    def rank(self, rank: int) -> RankFiles:
        return RankFiles(self.root / "ranks" / str(rank))

    def ranks(self) -> Iterator[tuple[int, RankFiles]]:
        """Yield the ranks that have files, in order."""
        found = (p.name for p in (self.root / "ranks").glob("*"))
        for rank in sorted(int(name) for name in found if _RANK.fullmatch(name)):
            yield rank, self.rank(rank)

    def host(self, name: str) -> HostFiles:
        return HostFiles(self.root / "hosts" / _checked(name, "host name"))

    def hosts(self) -> Iterator[tuple[str, HostFiles]]:
        """Yield the hosts that have files, by name. Raises DataError for a name of no host."""
        for path in sorted((self.root / "hosts").glob("[!.]*")):
            yield _found(path), HostFiles(path)


@dataclass(frozen=True, slots=True)
class RunFiles:
    root: Path

    manifest = _File("manifest.json")
    lock = _File(".lock")  # locked while `paceline run` or a search runs trials
    comparison = _File("comparison.json")
    # states of the baseline, from which trials replay steps; only while trials run
    replay = _File("replay")
    # the looks of `repeats = "auto"`, and why no further repeat ran
    repeats = _File("repeats.json")
    report = _File("report.html")
    copy = _File("copy.json")  # the remote place of a copy
    export = _File("export")  # files of `paceline export`, unless it gets another folder
    tuned_spec = _File("tuned.toml")  # the spec with the best settings of a search
    tuning = _File("tuning.json")  # result of a search
    # file-based service discovery of Prometheus: a file for each running sidecar
    targets = _File("targets")
    batch = _File("batch.json")  # result of `paceline tune batch`
    shares = _File("shares")  # runs with the batch of a node's share, by `paceline predict`
    # files of `paceline monitor`: configuration and storage of Prometheus
    monitor = _File("monitor")

    @property
    def tune(self) -> RunFiles:
        """Run directory of the search before this run's trials."""
        return RunFiles(self.root / "tune")

    def verified(self, workload: str) -> RunFiles:
        """Return the directory of the trainings that give the rows of a script their marks."""
        return RunFiles(self.root / "verified" / _checked(workload, "workload"))

    def trial(self, trial_id: str) -> TrialFiles:
        return TrialFiles(self.root / _TRIALS / _checked(trial_id, "trial id"))

    def trials(self) -> Iterator[tuple[str, TrialFiles]]:
        """Yield the trials that have a `trial.json`, by name. Raises DataError for a name of no
        trial."""
        for path in sorted((self.root / _TRIALS).glob("[!.]*/trial.json")):
            yield _found(path.parent), TrialFiles(path.parent)
