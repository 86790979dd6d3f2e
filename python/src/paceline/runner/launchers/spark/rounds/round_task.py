"""One task of a round, in one of Spark's Python workers.

The module works without Spark: the job script passes what it needs of a task.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import EnvironmentLacks, PacelineError, RankFailed, TimedOut
from paceline.base.host.memory import permanent_objects
from paceline.base.host.processes import command_line_of, die_with_parent, process_started_unix_s
from paceline.collectives.host import host_name, wait_until
from paceline.measure.records.documents import read_statuses
from paceline.plan.trials.trial import Placement, RankContext
from paceline.runner.job import failure_words
from paceline.runner.job.context import own_start_unix_s
from paceline.runner.job.job import Job
from paceline.runner.job.rank import host_sidecar, prepare_process
from paceline.runner.job.rank_status import RankEnd, RankStatusFile, log_of, terminated
from paceline.runner.job.run_directory import ONLY_GLOO, check_shared
from paceline.runner.launchers.spark.barrier import executor_pid, task_failed
from paceline.runner.launchers.spark.configuration import EXECUTORS_ADVICE, heartbeat_s, wrong_nodes

if TYPE_CHECKING:
    from paceline.train.rank.round_exchange import Orders, RankReport, Report, State
    from paceline.train.rank.rounds import RoundWorker


# The assignment of ranks to Spark's tasks, without a server: by files that only one can create
#
# Spark decides which process runs which task, and may decide differently in every round. A process
# that already holds a rank's samples should be that rank again. Therefore a task does not take the
# rank of its partition but claims one: a file per round and rank, created by link(2), which fails
# if the file exists, also on NFS, and shows the file with its content. File systems without links
# have only exclusive creation: there the content comes a moment later.

_DONE = "-done"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # link(2), and FUSE
_CONTENT_S = 5.0  # between the creation of a file and its content, without links


class Claims:
    """The claims of a trial, in a folder that all nodes share."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        self._folder = folder
        self._placement = placement

    def node_of(self, host: str) -> int:
        """Return the index of a host among the trial's nodes, in the order of their first calls.

        Raises EnvironmentLacks if there are more hosts than the trial has nodes.
        """
        for index in range(self._placement.nodes):
            name = f"node-{index}"
            if self._make(name, host) or self._read(name) == host:
                return index
        hosts = [self._read(f"node-{index}") for index in range(self._placement.nodes)]
        raise wrong_nodes(self._placement.nodes, [*hosts, host])

    def take(self, number: int, partition: int, node: int, own: int | None) -> int:
        """Return the rank that a task of round `number` has from now on.

        own: the rank whose samples the process holds; it is preferred. Otherwise the task gets one
        of the node's ranks, and after the first round any.
        Raises EnvironmentLacks if Spark places more tasks on a node in the first round than the
        node has ranks, RankFailed if Spark runs a task of the round again.
        """
        again = self.rank_of(number, partition)
        if again is not None:
            raise RankFailed(
                f"rank {again}: Spark runs its task of round {number} a second time, whose steps "
                "are done and recorded; an executor was lost or its results were, look at Spark's "
                "own log",
                again,
            )
        for rank in self._candidates(number, node, own):
            if self._make(_name(number, rank), str(partition)):
                return rank
        raise EnvironmentLacks(
            f"expected at most {self._placement.ranks_per_node} rank(s) on a node, Spark placed "
            f"more on one; {EXECUTORS_ADVICE}"
        )

    def rank_of(self, number: int, partition: int) -> int | None:
        """Return the rank that a task of round `number` has claimed; None if it has none."""
        for rank in range(self._placement.ranks):
            if self._read(_name(number, rank)) == str(partition):
                return rank
        return None

    def finish(self, number: int, rank: int) -> None:
        """Record that a rank has done its part of a round."""
        self._make(_name(number, rank) + _DONE, "")

    def done(self, number: int) -> set[int]:
        """Return the ranks that have done their part of a round."""
        ranks = range(self._placement.ranks)
        return {r for r in ranks if (self._folder / (_name(number, r) + _DONE)).exists()}

    def forget(self, number: int) -> None:
        """Remove the claims of a round that has ended."""
        for rank in range(self._placement.ranks):
            for ending in ("", _DONE):
                (self._folder / (_name(number, rank) + ending)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all claims."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _candidates(self, number: int, node: int, own: int | None) -> Iterator[int]:
        on_node = self._placement.ranks_per_node
        mine = range(node * on_node, (node + 1) * on_node)
        if own is not None:
            yield own
        yield from mine
        if number > 0:
            yield from (r for r in range(self._placement.ranks) if r not in mine)

    def _make(self, name: str, content: str) -> bool:
        """Create a file with that content; False if the name exists already."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(content)
            self._publish(Path(temporary), name)
        except FileExistsError:
            return False
        finally:
            Path(temporary).unlink()
        return True

    def _publish(self, file: Path, name: str) -> None:
        """Give the content a name. Raises FileExistsError if there is one."""
        try:
            os.link(file, self._folder / name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with (self._folder / name).open("x") as new:
                new.write(file.read_text())

    def _read(self, name: str) -> str:
        file = self._folder / name
        try:
            wait_until(lambda: file.stat().st_size > 0, _CONTENT_S, poll_s=0.01)
            return file.read_text()
        except FileNotFoundError:
            return ""


def _name(number: int, rank: int) -> str:
    return f"round-{number}-rank-{rank}"


# --- ranks of a trial in rounds that are lost with their executor, or late -----------------------
#
# Spark itself would continue with the remaining executors, where the ranks then share cores. That
# would be a different configuration. And it waits without limit for a task that neither ends nor
# fails; here, finished ranks wait for the last one no longer than an exchange may take.

# Option of CoarseGrainedExecutorBackend under every cluster manager.
_ID_OPTION = "--executor-id"


def own_executor() -> str | None:
    """Return Spark's name of this process's executor; None with a local master."""
    executor = executor_pid()
    words = [] if executor is None else command_line_of(executor)
    return words[words.index(_ID_OPTION) + 1] if _ID_OPTION in words[:-1] else None


@dataclass(frozen=True, slots=True)
class ExecutorPlace:
    """The host of an executor that ran tasks, and the ranks of those tasks."""

    host: str
    ranks: tuple[int, ...]


class Executors:
    """The executors that ran tasks of a trial."""

    def __init__(self, alive: Callable[[], Collection[str]] | None = None) -> None:
        """alive: returns the executors that Spark has; None with a local master."""
        self._alive = alive
        self._seen: dict[str, ExecutorPlace] = {}

    def saw(self, reports: Mapping[int, RankReport]) -> None:
        """Record where the tasks of a round ran; executors without a task keep their ranks."""
        ranks: dict[str, list[int]] = {}
        hosts: dict[str, str] = {}
        for rank, rank_report in sorted(reports.items()):
            if rank_report.executor is not None:
                ranks.setdefault(rank_report.executor, []).append(rank)
                hosts[rank_report.executor] = rank_report.host
        self._seen |= {
            name: ExecutorPlace(hosts[name], tuple(those)) for name, those in ranks.items()
        }

    def place(self, name: str) -> ExecutorPlace | None:
        """Return the place of an executor; None if it has not run a task yet."""
        return self._seen.get(name)

    def lost(self) -> RankFailed | None:
        """Return the error about an executor that Spark has lost; None if it has all of them."""
        if self._alive is None or not self._seen:
            return None
        alive = self._alive()
        for name, place in self._seen.items():
            if name not in alive:
                return lost_executor(name, place, failure_words.EXECUTOR_GONE)
        return None


def lost_executor(name: str, place: ExecutorPlace, why: str) -> RankFailed:
    """Return the error about a lost executor; it names the executor's first rank."""
    text = failure_words.executor_lost(name, place.host, place.ranks, why)
    return RankFailed(text, place.ranks[0])


_POLL_S = 0.25


class Stragglers:
    """Ends a round in which some ranks are too late."""

    def __init__(
        self, job: Job, claims: Claims, executors: Executors, cancel: Callable[[], object]
    ) -> None:
        """cancel: ends the current round, which then fails; called from another thread."""
        self.end: RankEnd | None = None  # of the rank that was too late, if one was
        self._job = job
        self._claims = claims
        self._executors = executors
        self._cancel = cancel

    @contextmanager
    def limited(self, number: int) -> Iterator[None]:
        """Enforce the limit while round `number` runs."""
        over = threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(number, over), name="stragglers", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _starting(self, ranks: set[int]) -> bool:
        """Return whether one of the ranks has not taken a step yet, as in the first round."""
        files = [self._job.files.rank(rank).steps for rank in ranks]
        return not all(file.exists() and file.stat().st_size for file in files)

    def _watch(self, number: int, over: threading.Event) -> None:
        ranks = set(range(self._job.trial.placement.ranks))
        limits = self._job.trial.limits
        # Spark notices a lost executor at most two heartbeats after the limit of a collective.
        sending_s = limits.collective_s + 2 * heartbeat_s(self._job.trial)
        all_done, since_s = False, None  # when the first rank was done, later when the last was
        until_s = 0.0  # until then a rank may still be starting
        while not over.wait(_POLL_S):
            late = ranks - self._claims.done(number)
            if late == ranks:
                continue
            now_s = time.monotonic()
            if since_s is None or (not late and not all_done):
                all_done, since_s = not late, now_s
                until_s = now_s + limits.rendezvous_s if number == 0 else now_s
            if now_s < until_s and self._starting(late):
                since_s = now_s
            if now_s - since_s > (limits.collective_s if late else sending_s):
                error = self._too_late(number, late) if late else self._unsent(number, ranks)
                self.end = RankEnd.of(error, min(late or ranks))
                self._cancel()
                return

    def _too_late(self, number: int, late: set[int]) -> PacelineError:
        limit_s = self._job.trial.limits.collective_s
        return TimedOut(failure_words.round_too_late(number, self._listed(late), limit_s))

    def _unsent(self, number: int, ranks: set[int]) -> PacelineError:
        limit_s = self._job.trial.limits.collective_s
        return self._executors.lost() or TimedOut(
            failure_words.round_not_received(number, self._listed(ranks), limit_s)
        )

    def _listed(self, ranks: set[int]) -> str:
        hosts = {s.rank: s.host for s in read_statuses(self._job.files)}
        return ", ".join(f"rank {r} ({hosts.get(r, 'not seen yet')})" for r in sorted(ranks))


@dataclass
class _Kept:
    """The state that this process keeps between tasks."""

    worker: RoundWorker
    sidecar: ExitStack  # of this host, if this process has started it


# By the trial's folder. Spark reuses its Python workers for tasks of the same application.
_kept: dict[str, _Kept] = {}


def run_round_task(
    job: Job, partition: int, orders: Orders, state: Callable[[], State | None]
) -> Report:
    """Claim a rank and do its part of the round, or end the rank if the orders say so.

    state: the averaged state, None in the first round.
    Raises BarrierTaskFailed for the driver, after the rank's status has been written. A task that
    cannot claim a rank writes none.
    """
    began_unix_s = time.time()
    die_with_parent(os.getppid())
    host = host_name()
    kept = _kept.get(str(job.files.root))
    try:
        check_shared(job, host, f"tasks take their ranks there{ONLY_GLOO}")
        context = _claimed(job, partition, orders, host, None if kept is None else kept.worker.rank)
    except PacelineError as error:  # there is no rank yet whose status could be written
        raise task_failed(job, RankEnd.of(error, partition, host)) from error
    status = RankStatusFile(job, context)
    with log_of(job, context), terminated(status):
        try:
            report = _run(job, context, orders, state, status)
        except Exception as error:
            if not isinstance(error, PacelineError):
                traceback.print_exc()
            raise task_failed(job, status.failed(error)) from error
    rank_report = report.ranks[context.rank]
    times = (began_unix_s, time.time())
    report.ranks[context.rank] = dataclasses.replace(
        rank_report, task_unix_s=times, executor=own_executor()
    )
    Claims(job.files.claims, job.trial.placement).finish(orders.number, context.rank)
    return report


def _claimed(job: Job, partition: int, orders: Orders, host: str, own: int | None) -> RankContext:
    place = job.trial.placement
    claims = Claims(job.files.claims, place)
    node = claims.node_of(host)
    rank = claims.take(orders.number, partition, node, own)
    return RankContext(
        rank=rank,
        world_size=place.ranks,
        local_rank=rank % place.ranks_per_node,
        ranks_on_node=place.ranks_per_node,
        node_index=node,
        host=host,
        process_started_unix_s=own_start_unix_s(),
    )


def _run(
    job: Job,
    context: RankContext,
    orders: Orders,
    state: Callable[[], State | None],
    status: RankStatusFile,
) -> Report:
    status.write("running")
    kept = _kept.get(str(job.files.root))
    if kept is None:
        status.log("starts" if orders.number == 0 else f"continues here with round {orders.number}")
        kept = _open(job, context, orders)
    if orders.finish:
        report = kept.worker.finish(context.rank, orders, state)
        kept.sidecar.close()
        status.write("done", started_unix_s=orders.carries[context.rank].process_started_unix_s)
        status.log("is done")
        return report
    report = kept.worker.run(context.rank, orders, state)
    # Spark may end this process before the rank's next task; its executor stands for the rank.
    executor = executor_pid()
    if executor is not None:
        status.write("running", pid=executor, started_unix_s=process_started_unix_s(executor))
    return report


def _open(job: Job, context: RankContext, orders: Orders) -> _Kept:
    prepare_process(job, context)
    with permanent_objects():
        from paceline.train.rank.rounds import RoundWorker  # noqa: PLC0415  (torch)

    executor = executor_pid()
    sidecar = ExitStack()
    sidecar.enter_context(host_sidecar(job, context, () if executor is None else (executor,)))
    worker = RoundWorker(job.trial, context, job.files)
    if orders.number == 0:
        worker.begin()
    else:
        worker.resume()
    kept = _kept[str(job.files.root)] = _Kept(worker, sidecar)
    return kept
