"""Record what a script writes beside itself, and notice that it continues from an earlier trial.

All trials run in the user's folder: a copy of it would break relative paths to data beside it, and
may be large. So a snapshot that one trial writes is found by the next one. Therefore each rank
records the files and folders that it makes there, and when the trial has ended they are moved into
its own folder (`runner.trials.run_trial`). What a rank has read before its first step stays: such
data are prepared once for all trials.

What stays can still be a snapshot, such as a file of the user that an earlier trial has replaced. A
script that opens one before its first step, and loads a state, is refused.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import UsageError
from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome, TouchedFilesRow
from paceline.train.rank.script.phases import replaced

# What holds no weights: code, and caches and settings that libraries of data share between runs.
_NO_STATE = (
    *(".py", ".pyc", ".so", ".json", ".jsonl", ".toml", ".yaml", ".yml", ".txt", ".csv", ".log"),
    *(".arrow", ".parquet", ".lock"),
)


class TouchedFiles:
    """The files that this rank reads before its first step, and what it makes in the training."""

    def __init__(self, files: TrialFiles, own: RankFiles, folder: Path) -> None:
        """folder: in which new files and folders are recorded, the working folder of the script."""
        self._files, self._own = files, own
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100  (links keep their names)
        self._run = RunFiles(files.root.parents[1])
        self._read: dict[str, int] = {}  # path: time of its last change in ns
        self._made: dict[str, None] = {}
        self._loads_state = False
        self._is_before_steps = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Notice touched files and loaded states while the context is active; record them then."""
        with ExitStack() as stack:
            for owner in (builtins, io):
                stack.enter_context(replaced(owner, "open", self._open))
            stack.enter_context(replaced(os, "mkdir", self._make_folder))
            for name in ("rename", "replace"):
                stack.enter_context(replaced(os, name, self._rename))
            stack.enter_context(replaced(torch, "save", self._save))
            for kind in (nn.Module, Optimizer):
                stack.enter_context(replaced(kind, "load_state_dict", self._load))
            try:
                yield
            finally:
                self._record()

    def check(self, script: str) -> None:
        """Raise UsageError if the script continues a training of another trial; once."""
        if not self._is_before_steps:
            return
        self._is_before_steps = False
        if not self._loads_state:
            return
        for path, changed_ns in self._read_new().items():
            writer = None if path.endswith(_NO_STATE) else self._writer(path, changed_ns)
            if writer is not None:
                raise UsageError(
                    f"script {script}: it continues from {path}, which trial {writer} of this run "
                    "has written; expected each trial to start anew. Turn its saving off, or let "
                    "it save into a folder with the name of the trial, which is in the variable "
                    "TORCHELASTIC_RUN_ID"
                )

    def _open(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        mode = str(arguments[1] if len(arguments) > 1 else named.get("mode", "r"))
        path = _path(arguments[0] if arguments else named.get("file"))
        if path is not None and not mode.startswith("r"):
            self._note_made(path)
        elif path is not None and self._is_before_steps and path.is_file():
            self._read[str(path)] = path.stat().st_mtime_ns
        return function(*arguments, **named)

    def _make_folder(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_made(_path(arguments[0] if arguments else named.get("path")))
        return function(*arguments, **named)

    def _rename(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_made(_path(arguments[1] if len(arguments) > 1 else named.get("dst")))
        return function(*arguments, **named)

    def _save(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_made(_path(arguments[1] if len(arguments) > 1 else named.get("f")))
        return function(*arguments, **named)

    def _load(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._loads_state = True
        return function(*arguments, **named)

    def _note_made(self, path: Path | None) -> None:
        """Note the uppermost part of a path that does not exist yet.

        Names that begin with a dot are left out: caches of libraries are called so.
        """
        if path is None or not path.is_relative_to(self._folder):
            return
        if path.is_relative_to(os.path.abspath(self._run.root)):  # noqa: PTH100
            return
        made = self._folder
        for part in path.relative_to(self._folder).parts:
            made /= part
            if part.startswith(".") or str(made) in self._made:
                return
            if not os.path.lexists(made):
                self._made[str(made)] = None
                return

    def _record(self) -> None:
        read = self._read_new()
        if read or self._made:
            row = TouchedFilesRow(read_changed_ns=read, made=tuple(self._made))
            write_json(self._own.touched_files, row)

    def _read_new(self) -> dict[str, int]:
        """Return the files that were read, and that have changed since the run began."""
        if not self._run.manifest.exists():  # a trial that was started by hand
            return {}
        began_ns = self._run.manifest.stat().st_mtime_ns
        return {path: changed for path, changed in self._read.items() if changed > began_ns}

    def _writer(self, path: str, changed_ns: int) -> str | None:
        """Return the trial during which a file was changed; None if it has read this version.

        A trial does not read its own snapshots, but what it downloads it reads.
        """
        for folder in sorted(self._files.root.parent.iterdir()):
            trial = TrialFiles(folder)
            outcome = document(trial.outcome, Outcome) if folder != self._files.root else None
            if outcome is None:
                continue
            if outcome.launched_unix_s <= changed_ns / 1e9 <= outcome.ended_unix_s:
                rows = [document(rank.touched_files, TouchedFilesRow) for _, rank in trial.ranks()]
                seen = [row.read_changed_ns.get(path) for row in rows if row is not None]
                return None if changed_ns in seen else folder.name
        return None


def _path(file: object) -> Path | None:
    """Return the absolute path of what a function opens; None for a descriptor or a stream."""
    if not isinstance(file, str | bytes | os.PathLike):
        return None
    return Path(os.path.abspath(os.fsdecode(file)))  # noqa: PTH100  (links keep their names)
