"""Answer a script that starts its ranks itself, with torch.multiprocessing.

The launcher has started all ranks. So `spawn` runs its function here, as this rank, if it asks for
as many processes as there are ranks. Other child processes run, but may not train: nothing would
record them, and they would wait for peers with the addresses of this rank. Where the script starts
one `Process` for each rank, they end when they join their process group, and the one of this rank
then runs here, from its beginning.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing

from paceline.base.errors import UsageError
from paceline.plan.trials.trial import RankContext
from paceline.train.rank.script.phases import replaced

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Script

# Exit status of a child process that would train, and of one that would join a process group;
# multiprocessing has only status and signal.
_TRAINS, _JOINS = 86, 87
_OTHERS_S = 30.0  # within which processes of all ranks must have ended, too
# torchrun's sign that a store listens at MASTER_PORT: true of a rank, not of its children.
_STORE_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    """A process that runs a function of the script."""

    process: BaseProcess
    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def status(self) -> int | None:
        return self.process.exitcode


class SpawnedProcesses:
    """The processes that a script starts."""

    def __init__(self, script: Script, context: RankContext) -> None:
        self._script = script
        self._context = context
        self._started: list[_Child] = []
        self._ranks: list[_Child] = []  # of which the one of this rank has run here
        self._has_spawned = False
        self._joined_s: float | None = None  # when the first one would have joined a group

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer the functions that start processes while the context is active."""
        with ExitStack() as stack:
            for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
                for name in ("spawn", "start_processes"):
                    stack.enter_context(replaced(owner, name, partial(self._spawn, name)))
            stack.enter_context(replaced(BaseProcess, "start", self._start))
            stack.enter_context(replaced(BaseProcess, "join", self._join))
            yield

    def check(self, *, is_over: bool = False) -> None:
        """Run the process of this rank here, if all of them would join a process group.

        Raises UsageError if a process of the script would have trained otherwise. is_over: no more
        processes come.
        """
        new = [each for each in self._started if each not in self._ranks]
        if any(each.status == _TRAINS for each in new):
            self._refuse()
        joined = [each for each in new if each.status == _JOINS]
        if not joined:
            return
        ranks = [each for each in new if each.target is joined[0].target]
        ranks = ranks[: self._context.ranks_on_node]
        is_whole = len(ranks) == self._context.ranks_on_node
        if is_whole and not self._ranks and all(each.status == _JOINS for each in ranks):
            self._ranks = ranks
            self._run(ranks[self._context.local_rank])
        elif is_over or self._ranks or self._are_late():
            self._refuse()

    def finish(self) -> None:
        """Answer the processes for which the script has not waited."""
        for each in self._started:
            if not each.process.daemon:
                each.process.join()
        self.check(is_over=True)

    def _run(self, own: _Child) -> None:
        own.target(*own.arguments, **own.named)
        for each in self._ranks:  # the script may look at their status
            vars(each.process)["_popen"].returncode = 0

    def _are_late(self) -> bool:
        """Return whether others have not followed the first one that would have joined a group."""
        if self._joined_s is None:
            self._joined_s = time.monotonic()
            signals = threading.Timer(_OTHERS_S, os.kill, (os.getpid(), signal.SIGCHLD))
            signals.daemon = True
            signals.start()
        return time.monotonic() >= self._joined_s + _OTHERS_S

    def _refuse(self) -> NoReturn:
        for each in self._started:
            each.process.terminate()
        raise UsageError(
            f"script {self._script.path}: expected it to train in the processes that the launcher "
            "starts, but it trains in child processes of its own (torch.multiprocessing.Process), "
            "which cannot be recorded; let each rank that the launcher starts train, as under "
            "torchrun, or start them with torch.multiprocessing.spawn and "
            'nprocs=int(os.environ["LOCAL_WORLD_SIZE"])'
        )

    def _spawn(
        self,
        name: str,
        _function: Callable[..., Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_others: Any,
        **_named: Any,
    ) -> Any:
        ranks = self._context.ranks_on_node
        if nprocs != ranks:
            raise UsageError(
                f"script {self._script.path}: it starts {nprocs} ranks itself "
                f"(torch.multiprocessing.{name}), expected {ranks}, the ranks of this trial on "
                'its node; let it start int(os.environ["LOCAL_WORLD_SIZE"]) ranks, or compare only '
                f"layouts with {nprocs} ranks per node"
            )
        if self._has_spawned and dist.is_initialized():
            dist.destroy_process_group()  # that of the processes before, which ended with them
        self._has_spawned = True
        fn(self._context.local_rank, *args)
        return None if join else _Ended()

    def _start(self, function: Callable[..., Any], process: Any) -> None:
        """Start a process, which may not train if it runs a function of the script."""
        target = getattr(process, "_target", None)
        if target is not None and self._is_of_script(target):
            # multiprocessing has no hook in the child
            process._target = functools.partial(_run_child, target)  # noqa: SLF001
            if not self._started:
                _notice_ends(self.check)
            known = vars(process)  # which lacks them once it is started
            child = _Child(process, target, known["_args"], known["_kwargs"])
            self._started.append(child)
        hidden = os.environ.pop(_STORE_LISTENS, None)
        try:
            function(process)
        finally:
            if hidden is not None:
                os.environ[_STORE_LISTENS] = hidden

    def _join(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        function(*arguments, **named)
        self.check()  # its wait takes the exit status away from the handler of the signal

    def _is_of_script(self, target: Callable[..., Any]) -> bool:
        while isinstance(target, functools.partial):
            target = target.func
        code = getattr(target, "__code__", None)
        file = Path("" if code is None else code.co_filename)
        folder = Path(self._script.path).parent
        return file.is_relative_to(folder) and "site-packages" not in file.parts


class _Ended:
    """The processes of a `spawn` that is not waited for: they have ended."""

    def join(self, *_arguments: Any, **_named: Any) -> bool:
        return True


def _notice_ends(check: Callable[[], None]) -> None:
    """Call `check` when a child ends: the script may wait for something that never comes."""
    before = signal.getsignal(signal.SIGCHLD)

    def ended(number: int, frame: FrameType | None) -> None:
        check()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGCHLD, ended)


def _run_child(target: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Run a function of the script in a child process, to its first sign of a training."""
    vars(dist.distributed_c10d)["rendezvous"] = partial(_end_child, _JOINS)
    dist.init_process_group = partial(_end_child, _JOINS)
    torch.autograd.backward = partial(_end_child, _TRAINS)
    target(*arguments, **named)


def _end_child(status: int, *_arguments: Any, **_named: Any) -> NoReturn:
    os._exit(status)
