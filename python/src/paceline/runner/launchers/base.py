"""The command side of a launcher: trial -> command, the checks before it, and its log."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import RankStatus
from paceline.plan.spec.extensions import LAUNCHERS, load_object
from paceline.plan.spec.secret_values import without_secrets
from paceline.plan.trials.trial import Trial, task_facts


@dataclass(frozen=True, slots=True)
class TemporaryFolders:
    """Folders on this host that exist until the end of the trial."""

    disk: Path
    memory: Path  # in shared memory if there is some


def shared_memory_of_mpi(folders: TemporaryFolders) -> dict[str, str]:
    """Return the variables that put Open MPI's shared memory into the folders of the trial.

    A rank may import mpi4py for purposes of its own. Without mpirun nothing removes its segment,
    not even MPI_Finalize.
    """
    names = ("sm", "vader")  # of Open MPI 5 and 4
    return {f"OMPI_MCA_btl_{name}_backing_directory": str(folders.memory) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments, and the variables to set on top of our own environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # Returns the variables by which the program puts its temporary files into these folders.
    temporary: Callable[[TemporaryFolders], Mapping[str, str]] = lambda _folders: {}
    # Returns the arguments by which the program exports these variables to ranks on other hosts.
    exports: Callable[[Iterable[str]], Iterable[str]] = lambda _names: ()

    def with_variables(self, variables: Mapping[str, str]) -> Command:
        """Return the command with further variables, which the job side finds in every rank."""
        program, *arguments = self.argv
        return dataclasses.replace(
            self,
            argv=(program, *self.exports(variables), *arguments),
            environment={**self.environment, **variables},
        )

    def shell_line(self) -> str:
        """Return a line that can be pasted into a shell; secrets of a site's JVMs are left out."""
        settings = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join(settings + [_quoted(word) for word in self.argv])


def _quoted(word: str) -> str:
    return shlex.quote(without_secrets(word))


class Launcher(Protocol):
    """Starts the ranks of a trial: the implementation that a LauncherDescriptor names."""

    def preflight(self, trial: Trial) -> None:
        """Raise EnvironmentLacks if the trial cannot run here; return within 5 seconds."""
        ...

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        """Return the command that runs the trial's job side with `--trial` and `files.trial`.

        The command ends when the last rank has ended. If ranks on other hosts do not inherit its
        environment, `Command.exports` is set. Raises EnvironmentLacks if the launcher is not
        installed.
        """
        ...

    def failed_rank(self, log_text: str) -> int | None:
        """Return the rank that the launcher's own log names as the first to fail.

        It is asked only if neither a rank nor the job side has written why the trial failed.
        """
        ...


def launcher_for(name: str) -> Launcher:
    """Return the launcher of that name. Raises UsageError for an unknown name."""
    launcher: Launcher = load_object(LAUNCHERS.get(name).implementation)()
    return launcher


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (what is made there has a random name)

# Memory of a rank with torch, and copies of the weights in it (weights, gradients, states of the
# optimiser, messages).
_RANK_MIB, _COPIES_IN_RANK = 1024, 8
_MIB = 2**20


def rank_memory_mib(trial: Trial) -> int:
    """Return the memory to ask a scheduler for, for each rank: the limit of the spec, else an
    estimate from the model."""
    if trial.limits.rank_memory_mib is not None:
        return trial.limits.rank_memory_mib
    copies = _COPIES_IN_RANK * trial.placement.replicas_per_rank
    is_script = trial.training.script is not None
    parameter_bytes = 0 if is_script else task_facts(trial.training).parameter_bytes
    return _RANK_MIB + math.ceil(copies * parameter_bytes / _MIB)


def first_named(patterns: Iterable[re.Pattern[str]], log_text: str) -> int | None:
    """Return the rank in the first group of the first pattern that the log contains."""
    found = (pattern.search(log_text) for pattern in patterns)
    return next((int(match.group(1)) for match in found if match), None)


# The signal that ended a rank, as mpirun and torchrun's agent say it.
_SIGNALS = (
    re.compile(
        r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+(?P<pid>\d+)\s+on\s+node\s+\S+\s+"
        r"exited\s+on\s+signal\s+(?P<signal>\d+)"
    ),
    re.compile(
        r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)"
    ),
)


def signal_of(rank: int, status: RankStatus | None, log_text: str) -> int | None:
    """Return the signal that ended a rank, if its launcher's log says it. status: of the rank."""
    for pattern in _SIGNALS:
        for found in pattern.finditer(log_text):
            if int(found["rank"]) == rank if status is None else int(found["pid"]) == status.pid:
                return int(found["signal"])
    return None


# --- messages of Open MPI about failed ranks, and about lost ranks and hosts ---------------------
#
# Its ranks may run under several launchers, so the messages may be in every launcher's log. Their
# texts are in help-mpi-errors.txt of Open MPI 5 and help-errmgr-base.txt of PRRTE 3.

_OWN_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)")
_FAILURES = (
    re.compile(r"prterun noticed that process rank (\d+)"),
    _OWN_ABORT,
    re.compile(r"exited due to process rank (\d+)"),
    re.compile(r"Process name: \[[^\]]*,(\d+)\]"),
)
# Open MPI ends a rank at once when the connection to a rank of another host is closed. Later ranks
# that say the same are only counted, but mpirun may name one of them as the one that ended the job.
_LOST_PEER = re.compile(r"An error occurred .*Socket closed\n.*reported by process \[\d+,(\d+)\]")
_ABORTED = re.compile(r"exited due to process rank (\d+) [^\n]* calling\s+\"abort\"")
# mpirun itself then ends with status 0. The second message appears if the remote shell of the
# daemon ends first.
_LOST_DAEMON = re.compile(
    r"(?s)Remote daemon:\s+\[\S+\] on node (?P<lost>\S+)"
    r"|A daemon failed to report back.*?Remote host:\s+(?P<left>\S+)"
)
# A message of mpirun or of a rank, and those that give no reason.
_MESSAGE = re.compile(r"(?ms)^-{60,}\n(.+?)\n-{60,}$")
_NO_REASON = re.compile(
    r"^WARNING|(prterun|mpirun) (noticed|has exited|detected)|Primary job +terminated"
    r"|MPI_ABORT was invoked|A process has executed an operation involving a call"
)
# Without a list of hosts, mpirun has those of a scheduler, else this one.
_FEW_HOSTS = re.compile(r"more processes than the ppr|already filled|not enough slots")
_MORE_HOSTS = (
    "; name hosts with enough slots in [mpi] hostfile, or let `paceline lab run SPEC` make hosts"
)


@dataclass(frozen=True, slots=True)
class LostHost:
    """A host that mpirun has lost."""

    name: str
    ranks: tuple[int, ...]  # that ran there; none if mpirun has another name for it


def failed_rank(log_text: str) -> int | None:
    """Return the rank that mpirun's output names as the first to fail."""
    return first_named(_FAILURES, log_text)


def said_by_mpi(log_text: str) -> str | None:
    """Return the first message of Open MPI that gives a reason; None without one.

    Such messages are between rules. Those that follow the first say what it has caused. One about
    too few hosts is followed by what to do.
    """
    for found in _MESSAGE.finditer(log_text):
        text = " ".join(found.group(1).split())
        if not _NO_REASON.search(text):
            return text.partition(":")[0] + _MORE_HOSTS if _FEW_HOSTS.search(text) else text
    return None


def ranks_without_peer(log_text: str) -> tuple[int, ...]:
    """Return the known ranks that ended because they lost a rank of another host, in order."""
    first = _LOST_PEER.search(log_text)
    if first is None:
        return ()
    aborted = None if _OWN_ABORT.search(log_text) else _ABORTED.search(log_text)
    return tuple(int(found.group(1)) for found in (first, aborted) if found)


def lost_host(log_text: str, statuses: Sequence[RankStatus]) -> LostHost | None:
    """Return the host whose daemon mpirun has lost; None if it lost none."""
    found = _LOST_DAEMON.search(log_text)
    if found is None:
        return None
    name = found["lost"] or found["left"]
    ranks = (s.rank for s in statuses if _short(s.host) == _short(name))
    return LostHost(name, tuple(ranks))


def _short(host: str) -> str:
    return host.partition(".")[0]
