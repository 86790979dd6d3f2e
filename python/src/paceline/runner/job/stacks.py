"""Stacks of ranks: where each one is, and which operation it waits for.

Every rank writes the Python stacks of all its threads when it gets SIGUSR2. The handler is in C, so
it works while the rank waits in a library, and also while it holds Python's lock. Ranks of other
hosts get the signal from the sidecar there, which sees the request in a file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import DataError
from paceline.base.host.processes import STACKS_SIGNAL, answers, send
from paceline.base.host.programs import PACKAGE
from paceline.collectives.host import host_name, wait_until
from paceline.measure.records.communication import LastOperation, last_operations
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import read_json, text_of
from paceline.measure.records.layout import HostFiles, RankFiles, TrialFiles

_WRITTEN_S = 2.0  # a busy host may take a second to run the handler
_PASSED_ON_S = 2.0  # sidecars look for a request once a second
_THREAD = re.compile(r"^(?:Current thread|Thread|Error) [^\n]*:\n", re.MULTILINE)
_ERROR = "Error (most recent call first):\n"
_FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)
_OF_A_RANK = "runner/job/rank.py"  # is in the stack of the thread that trains
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    | {str(PACKAGE), sys.prefix, "<frozen"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """One rank that has not ended. frames: of the thread that trains, the last call first."""

    rank: int
    host: str
    frames: tuple[Frame, ...]
    operations: tuple[LastOperation, ...]

    @property
    def place(self) -> Frame | None:
        """The last call in code of the user, else the last call."""
        own = (each for each in self.frames if not each.file.startswith(_LIBRARIES))
        return next(own, next(iter(self.frames), None))


def answer_requests(files: RankFiles) -> None:
    """Write the stacks of this process to the rank's file at every request, until its end."""
    files.stacks.parent.mkdir(parents=True, exist_ok=True)
    files.stacks.write_text("")
    file = files.stacks.open("a")  # faulthandler keeps it open; `write_error` adds to it, too
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def request_stacks(files: TrialFiles, *, of_done: bool = False, elsewhere: bool = False) -> None:
    """Let all other ranks of this host that still run write their stacks; wait a moment.

    of_done: instead of them, those that are done but whose process has not ended. elsewhere: also
    running ranks of other hosts that have a sidecar.
    """
    wanted = "done" if of_done else "running"
    asked = [
        status
        for status in read_statuses(files)
        if status.state == wanted and files.rank(status.rank).stacks.exists()
    ]
    here = [s for s in asked if s.host == host_name() and s.pid != os.getpid() and s.is_alive()]
    here = [s for s in here if answers(s.pid, STACKS_SIGNAL, files.rank(s.rank).stacks)]
    far = [s for s in asked if elsewhere and s.host != host_name()]
    far = [s for s in far if _has_sidecar(files.host(s.host))]
    paths = [files.rank(status.rank).stacks for status in [*here, *far]]
    sizes = {path: path.stat().st_size for path in paths}
    send([status.pid for status in here], STACKS_SIGNAL)
    if far:
        with suppress(OSError):  # the run directory of another user
            files.stacks_request.touch()
    limit_s = _WRITTEN_S + (_PASSED_ON_S if far else 0.0)
    wait_until(lambda: all(path.stat().st_size > size for path, size in sizes.items()), limit_s)


def _has_sidecar(host: HostFiles) -> bool:
    try:
        return read_json(host.sidecar).get("ended") is None
    except DataError:
        return False


def write_error(files: RankFiles, error: BaseException) -> None:
    """Write where an error was raised: the calls that led to it have ended."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    calls = reversed(traceback.extract_tb(error.__traceback__))
    lines = [f'  File "{call.filename}", line {call.lineno} in {call.name}\n' for call in calls]
    with suppress(OSError), files.stacks.open("a") as file:  # a full disk must not hide the error
        file.write("".join((_ERROR, *lines)))


def read_stacks(files: TrialFiles) -> list[RankStack]:
    """Return the last stack of each rank that has not ended well."""
    return [
        RankStack(
            rank=status.rank,
            host=status.host,
            frames=tuple(_frames(files.rank(status.rank).stacks)),
            operations=tuple(last_operations(files.rank(status.rank).operations)),
        )
        for status in read_statuses(files)
        if status.state != "done"
    ]


def _frames(path: Path) -> list[Frame]:
    """Return the calls of the thread that trains, from the last dump of a file."""
    try:
        text = text_of(path)
    except FileNotFoundError:
        return []
    error = text.rpartition(_ERROR)[2] if _ERROR in text else ""
    threads = _THREAD.split(text)[1:]
    training = [thread for thread in threads if _OF_A_RANK in thread]
    chosen = _THREAD.split(error)[0] or (training or threads or [""])[-1]
    return [
        Frame(file=file, line=int(line), function=function)
        for file, line, function in _FRAME.findall(chosen)
    ]


def stacks_sentence(stacks: Sequence[RankStack]) -> str | None:
    """Say who waits for whom, and where each rank is; None without any stack."""
    if not any(each.frames or each.operations for each in stacks):
        return None
    waits = _longest_wait(stacks)
    if waits is None:
        return "; ".join(f"rank {each.rank} is {_at(each)}" for each in stacks)
    first, waiting, missing = waits
    names = dict.fromkeys(operation.operation for operation, _ in waiting)
    seconds = max(0.0, time.time() - first.begun_unix_s)
    number = f"operation {first.sequence} of their group"
    if len(names) > 1:
        parts = (f"rank {each.rank} in {op.operation} at {each.place}" for op, each in waiting)
        return f"ranks wait in different operations ({number}): {', '.join(parts)}"
    many = len(waiting) > 1
    ranks = ", ".join(str(each.rank) for _, each in waiting)
    words = (
        f"rank{'s' if many else ''} {ranks} wait{'' if many else 's'} in {first.operation} "
        f"({number}) for {seconds:.0f} s"
    )
    if not missing:
        return f"{words}, which all ranks have begun"
    absent = "; ".join(f"rank {each.rank} has not begun it and is {_at(each)}" for each in missing)
    return f"{words}; {absent}"


def _longest_wait(
    stacks: Sequence[RankStack],
) -> tuple[LastOperation, list[tuple[LastOperation, RankStack]], list[RankStack]] | None:
    """Return the operation that ranks wait for longest, these ranks, and those that are missing."""
    pending = [
        (operation, each) for each in stacks for operation in each.operations if operation.pending
    ]
    if not pending:
        return None
    first, _ = min(pending, key=lambda pair: pair[0].begun_unix_s)
    same = (first.group, first.sequence)
    waiting = [pair for pair in pending if (pair[0].group, pair[0].sequence) == same]
    missing = [each for each in stacks if not _has_begun(each, first)]
    return first, waiting, missing


def _has_begun(stack: RankStack, operation: LastOperation) -> bool:
    return any(
        last.group == operation.group and last.sequence >= operation.sequence
        for last in stack.operations
    )


def _at(stack: RankStack) -> str:
    place = stack.place
    return f"on {stack.host}, its stack is not known" if place is None else f"at {place}"
