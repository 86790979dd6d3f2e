"""Follow the files of a running run. Reading files does not disturb the run."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.analysis.host_frames import GAP_INTERVALS, host_frame, rank_frame
from paceline.analysis.operations import clock_errors
from paceline.analysis.phases import mean_over_ranks, mean_step, mean_steps
from paceline.analysis.reading import (
    HostTrace,
    RankRecord,
    TrialRecord,
    load_manifest,
    read_trial,
)
from paceline.analysis.steps import GlobalSteps, RankSteps, global_steps, rank_steps
from paceline.analysis.stragglers import find_straggler
from paceline.errors import DataError
from paceline.monitor.tail import RowTail
from paceline.monitor.views import HostView, RankView, RunView, TrialView
from paceline.records.documents import has_writer, read_stopping
from paceline.records.files import document
from paceline.records.rows import (
    HostSample,
    Outcome,
    RankEnvironment,
    RankSample,
    RankStatus,
    StepRow,
)
from paceline.records.tables import frame_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from paceline.plan.trial import Trial
    from paceline.records.layout import HostFiles, RankFiles, RunFiles, TrialFiles
    from paceline.records.phases import Phases

_STEPS = 120  # of each rank: for averages, sparklines and the straggler
_RECENT_STEPS = 20  # for the speed
_SAMPLES = 2  # of each host: rates are of the last tick
_STRAGGLER_EVERY_S = 5.0  # the detection is the most expensive computation here
_MOST_RANKS_COMPARED = 64
_SETTLED_S = 5.0  # without a new trial, if no closing document shows that the run has ended


class _Rank:
    """Files of one rank."""

    def __init__(self, rank: int, files: RankFiles) -> None:
        self._rank, self._files = rank, files
        self._tail = RowTail(files.steps, newest=_STEPS)
        self._steps: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self._environment = document(files.environment, RankEnvironment)

    def read(self) -> bool:
        rows = self._tail.new_rows()
        self._steps.extend(rows)
        if self._environment is None:
            self._environment = document(self._files.environment, RankEnvironment)
        return bool(rows)

    @property
    def last_step(self) -> Mapping[str, Any] | None:
        return self._steps[-1] if self._steps else None

    def frame(self) -> pl.DataFrame:
        """Return its last steps."""
        return frame_of(list(self._steps), StepRow, self._files.steps)

    def record(self) -> RankRecord:
        return RankRecord(
            rank=self._rank,
            spans=(),
            environment=self._environment,
            status=document(self._files.status, RankStatus),
        )


class _Host:
    """Files of one sidecar."""

    def __init__(self, host: str, files: HostFiles) -> None:
        self._host, self._files = host, files
        self._trace, self._rank_rows = RowTail(files.trace), RowTail(files.ranks)
        self._samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self._ranks: dict[int, deque[dict[str, Any]]] = {}
        self._interval_s = math.inf
        self._gaps = 0

    def read(self) -> bool:
        rows = self._trace.new_rows()
        for row in rows:
            if "unix_s" not in row:
                self._interval_s = row.get("interval_s", math.inf)  # the header
                continue
            limit_s = GAP_INTERVALS * self._interval_s
            if self._samples and row["unix_s"] - self._samples[-1]["unix_s"] > limit_s:
                self._gaps += 1
            self._samples.append(row)
        for row in self._rank_rows.new_rows():
            self._ranks.setdefault(row.get("rank", -1), deque(maxlen=_SAMPLES)).append(row)
        return bool(rows)

    def view(self) -> tuple[HostView | None, dict[int, dict[str, Any]]]:
        """Return the newest sample of the host, and of each rank. Raises DataError if damaged."""
        rows = [row for rows in self._ranks.values() for row in rows]
        ranks = rank_frame(frame_of(rows, RankSample, self._files.ranks))
        by_rank = {row["rank"]: row for row in ranks.iter_rows(named=True)}
        samples = frame_of(list(self._samples), HostSample, self._files.trace)
        if samples.is_empty():
            return None, by_rank
        derived = host_frame(HostTrace(host=self._host, header={}, samples=samples))
        sample = derived.row(-1, named=True)
        return HostView(host=self._host, sample=sample, gaps=self._gaps), by_rank


class TrialFollower:
    """Files of one trial; each call continues where the last one stopped."""

    def __init__(self, files: TrialFiles) -> None:
        self.trial: Trial = read_trial(files)
        self._files = files
        self._ranks: dict[int, _Rank] = {}
        self._hosts: dict[str, _Host] = {}
        self._straggler: str | None = None
        self._straggler_found_s = 0.0

    def read(self) -> bool:
        """Read new rows; return whether there were any. Raises DataError if a row is damaged."""
        for rank, rank_files in self._files.ranks():
            self._ranks.setdefault(rank, _Rank(rank, rank_files))
        for host, host_files in self._files.hosts():
            self._hosts.setdefault(host, _Host(host, host_files))
        new = [rank.read() for rank in self._ranks.values()]
        new += [host.read() for host in self._hosts.values()]
        return any(new)

    def view(self, number: int | None) -> TrialView:
        record = self._record()
        table = rank_steps(record, {n: rank.frame() for n, rank in self._ranks.items()})
        steps = global_steps(record, table) if self._all_there(record) else None
        recent = slice(-_RECENT_STEPS, None)
        means = mean_steps(table)
        last_steps = [step for r in self._ranks.values() if (step := r.last_step) is not None]
        hosts = [host.view() for host in self._hosts.values()]
        samples = {rank: row for _, rows in hosts for rank, row in rows.items()}
        return TrialView(
            trial_id=self.trial.id,
            number=number,
            steps=0 if steps is None or not len(steps.step) else int(steps.step[-1]) + 1,
            steps_planned=self.trial.training.max_steps,
            epoch=max((step["epoch"] for step in last_steps), default=None),
            samples_per_s=None
            if steps is None or not len(steps.step) or not steps.samples_known
            else float(steps.samples[recent].sum() / max(1e-9, steps.time_s[recent].sum())),
            loss=_last_loss(steps),
            rates=_rates(steps),
            losses=() if steps is None else tuple(map(float, steps.loss)),
            phases=mean_over_ranks(list(means.values())),
            ranks=tuple(
                self._rank_view(r, mean_step(means, r.rank), samples.get(r.rank))
                for r in record.ranks
            ),
            hosts=tuple(host for host, _ in hosts if host is not None),
            straggler=self._find_straggler(record, table),
        )

    def _record(self) -> TrialRecord:
        return TrialRecord(
            trial=self.trial,
            files=self._files,
            outcome=None,
            result=None,
            ranks=tuple(self._ranks[rank].record() for rank in sorted(self._ranks)),
            command=None,
        )

    def _all_there(self, record: TrialRecord) -> bool:
        """Return whether all ranks have started; before that, steps are incomplete."""
        return len(record.ranks) == self.trial.placement.ranks

    def _rank_view(
        self, rank: RankRecord, mean: Phases, sample: Mapping[str, Any] | None
    ) -> RankView:
        last = self._ranks[rank.rank].last_step
        step_s = None if last is None else sum(v for v in mean.values() if v is not None)
        waited = sum(mean[name] or 0.0 for name in ("comm_wait", "bubble"))
        return RankView(
            rank=rank.rank,
            host=rank.host,
            state="starting" if rank.status is None else rank.status.state,
            steps=0 if last is None else last["step"] + 1,
            step_s=step_s,
            waiting_share=waited / step_s if step_s and self.trial.placement.ranks > 1 else None,
            sample=sample,
        )

    def _find_straggler(self, record: TrialRecord, table: RankSteps) -> str | None:
        now = time.monotonic()
        if now - self._straggler_found_s < _STRAGGLER_EVERY_S:
            return self._straggler
        if not self._all_there(record) or not 1 < len(record.ranks) <= _MOST_RANKS_COMPARED:
            return None
        self._straggler_found_s = now
        found = [
            f"rank {late.rank} on {late.host} delays each step by {late.delay_share:.0%}"
            + (f", in {verdict.phase}" if verdict.phase else "")
            for verdict in find_straggler(record, table, clock_errors(record))
            if verdict.straggler is not None
            for late in verdict.ranks[:1]
        ]
        self._straggler = "; ".join(found) or None
        return self._straggler


class RunFollower:
    """Run directory; each call of `look` reads what is new."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._trial: TrialFollower | None = None
        self._trial_written: tuple[str, int, int] | None = None
        self._last_news_s = time.monotonic()
        self._counts: tuple[int, int] = (0, 0)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last new row or file."""
        return time.monotonic() - self._last_news_s

    @property
    def trial(self) -> Trial | None:
        """The trial that is running."""
        return None if self._trial is None else self._trial.trial

    def look(self) -> RunView:
        """Read new rows and files and return the state. Raises DataError if a file is damaged."""
        run = self._stage()
        manifest = load_manifest(run)
        found = dict(run.trials())
        outcomes = {name: document(files.outcome, Outcome) for name, files in found.items()}
        ended = [o for o in outcomes.values() if o is not None]
        failed = [o for o in ended if o.status != "ok"]
        planned: list[str] = manifest.get("trials", [])
        running = [files for name, files in found.items() if outcomes[name] is None]
        number = self._follow(max(running, key=_written_ns, default=None), planned)
        self._note((len(found), len(ended)))
        is_over = (
            run is self._run
            and _has_ended(run, planned, outcomes)
            # a search plans as it goes: its next trial starts at once
            and (run.tuning.exists() or run.comparison.exists() or self.quiet_s > _SETTLED_S)
        )
        last_unix_s = max((o.ended_unix_s for o in ended), default=None) if is_over else None
        return RunView(
            name=manifest.get("name") or self._run.root.resolve().name,
            stage="" if run is self._run else "tune",
            planned=len({*planned, *found}) if planned else None,
            done=len(ended) - len(failed),
            failed=len(failed),
            elapsed_s=_elapsed_s(manifest, last_unix_s),
            trial=None if self._trial is None else self._trial.view(number),
            ended=is_over,
            message=max(failed, key=lambda o: o.ended_unix_s).message if failed else None,
        )

    def _stage(self) -> RunFiles:
        """Return the directory of the search until the trials begin."""
        begun = self._run.manifest.exists() or any(self._run.trials())
        return self._run if begun or not self._run.tune.manifest.exists() else self._run.tune

    def _follow(self, files: TrialFiles | None, planned: list[str]) -> int | None:
        """Follow another trial, or a repeated one; return its number in the plan."""
        try:
            written = None if files is None else _identity(files)
            if written != self._trial_written:
                self._trial = None if files is None else TrialFollower(files)
                self._trial_written = written
            if self._trial is not None and self._trial.read():
                self._last_news_s = time.monotonic()
        except (DataError, FileNotFoundError):
            if files is not None and files.trial.exists():
                raise
            self._trial = self._trial_written = None  # it was just moved aside, to be repeated
        name = None if self._trial is None else self._trial.trial.id
        return planned.index(name) + 1 if name in planned else None

    def _note(self, counts: tuple[int, int]) -> None:
        if counts != self._counts:
            self._counts = counts
            self._last_news_s = time.monotonic()


def _last_loss(steps: GlobalSteps | None) -> float | None:
    if steps is None or not len(steps.loss) or math.isnan(steps.loss[-1]):
        return None
    return float(steps.loss[-1])


def _rates(steps: GlobalSteps | None) -> tuple[float, ...]:
    if steps is None or not len(steps.step):
        return ()
    return tuple(map(float, steps.samples / np.maximum(steps.time_s, 1e-9)))


def _written_ns(files: TrialFiles) -> int:
    try:
        return files.trial.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _identity(files: TrialFiles) -> tuple[str, int, int]:
    """Identify this attempt at a trial: it differs from that of a repetition."""
    status = files.trial.stat()
    return str(files.trial), status.st_ino, status.st_mtime_ns


def _elapsed_s(manifest: dict[str, Any], last_unix_s: float | None) -> float | None:
    """Return the duration until now, or until the end of the last trial of an ended run."""
    created = manifest.get("created_unix_s")
    until = time.time() if last_unix_s is None else last_unix_s
    return None if created is None else max(0.0, until - created)


def _has_ended(run: RunFiles, planned: list[str], outcomes: dict[str, Outcome | None]) -> bool:
    """Return whether the run has ended: no trial is left, or it stopped before.

    A run stops at a failed trial, or if `repeats = "auto"` needs no further repeat.
    """
    if run.tuning.exists():
        return True
    if not outcomes or None in outcomes.values() or has_writer(run):
        return False
    failed = any(o is not None and o.status != "ok" for o in outcomes.values())
    stopping = read_stopping(run)
    stopped = stopping is not None and stopping.stopped is not None
    return failed or stopped or set(planned) <= set(outcomes)
