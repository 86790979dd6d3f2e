"""Notice a script that continues from a file which an earlier trial of the run has written.

All trials run in the user's folder: a copy of it would break relative paths to data beside it, and
may be large. So a snapshot that one trial writes is found by the next one. Only files that were
opened before the first step are looked at, and only if the script has loaded a state: a cache of
data may well be shared.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import UsageError
from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome
from paceline.train.rank.script.phases import replaced

# What holds no weights: code, and caches and settings that libraries of data share between runs.
_NO_STATE = (
    *(".py", ".pyc", ".so", ".json", ".jsonl", ".toml", ".yaml", ".yml", ".txt", ".csv", ".log"),
    *(".arrow", ".parquet", ".lock"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """Files that were written in the run and that a rank has read: when each was changed, in ns."""

    changed_ns: dict[str, int]


class FormerFiles:
    """The files that this rank opens before its first step."""

    def __init__(self, files: TrialFiles, own: RankFiles) -> None:
        self._files, self._own = files, own
        self._read: dict[str, int] = {}
        self._loads_state = False
        self._is_looking = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Notice opened files and loaded states while the context is active."""
        with ExitStack() as stack:
            for owner in (builtins, io):
                stack.enter_context(replaced(owner, "open", self._open))
            for kind in (nn.Module, Optimizer):
                stack.enter_context(replaced(kind, "load_state_dict", self._load))
            yield

    def check(self, script: str) -> None:
        """Raise UsageError if the script continues a training of another trial; once."""
        if not self._is_looking:
            return
        self._is_looking = False
        manifest = RunFiles(self._files.root.parents[1]).manifest
        if not manifest.exists():  # a trial that was started by hand
            return
        began_ns = manifest.stat().st_mtime_ns
        new = {path: changed for path, changed in self._read.items() if changed > began_ns}
        if not new:
            return
        write_json(self._own.read_files, ReadFiles(changed_ns=new))
        if not self._loads_state:
            return
        for path, changed_ns in new.items():
            writer = self._writer(path, changed_ns)
            if writer is not None:
                raise UsageError(
                    f"script {script}: it continues from {path}, which trial {writer} of this run "
                    "has written; expected each trial to start anew. Turn its saving off, or let "
                    "it save into a folder with the name of the trial, which is in the variable "
                    "TORCHELASTIC_RUN_ID"
                )

    def _open(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._is_looking and arguments:
            self._note(arguments[0], arguments[1] if len(arguments) > 1 else named.get("mode", "r"))
        return function(*arguments, **named)

    def _note(self, file: object, mode: object) -> None:
        """Note the time of the last change of a file that is opened."""
        if not isinstance(file, str | os.PathLike) or not str(mode).startswith("r"):
            return
        path = os.path.abspath(file)  # noqa: PTH100  (links keep their names)
        if isinstance(path, str) and not path.endswith(_NO_STATE) and os.path.isfile(path):  # noqa: PTH113
            self._read[path] = os.stat(path).st_mtime_ns  # noqa: PTH116

    def _load(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._loads_state = True
        return function(*arguments, **named)

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
                read = [document(rank.read_files, ReadFiles) for _, rank in trial.ranks()]
                seen = [each.changed_ns.get(path) for each in read if each is not None]
                return None if changed_ns in seen else folder.name
        return None
