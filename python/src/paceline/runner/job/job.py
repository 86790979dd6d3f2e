"""The job that a job script's command line describes, and the rendezvous of its ranks.

The job is a trial, and the place of its records. The trial is one of a spec, or it was planned
before and is in a file. For the rendezvous rank 0 binds a socket to one address and then publishes
the address.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from paceline.base.errors import DataError, EnvironmentLacks, TimedOut, UsageError
from paceline.collectives.host import LOOPBACK, listening_socket
from paceline.collectives.signatures import new_secret
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.plan.trials.planning import matching, no_match, plan_trials, repeated
from paceline.plan.trials.trial import StoreAddress, Trial, trial_name
from paceline.runner.job.context import RemotePlace, launching_pid
from paceline.train.data.remote_folder import remote_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial and the place of its records."""

    trial: Trial
    files: TrialFiles
    run: RunFiles | None  # set where this job itself keeps the run directory
    place: RemotePlace | None = None  # for nodes that do not see the run directory

    @property
    def supervised(self) -> bool:
        """Return whether `paceline run` started this job: it then keeps manifest and outcome."""
        return self.run is None


class JobArguments(argparse.Namespace):
    """The arguments of a job script."""

    spec: str | None
    trial: Path | None
    only: str | None
    settings: list[str]
    repeat: int | None
    out: str | None


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting, so that one of many ranks can report it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see --help")


def parse_arguments(prog: str, words: Sequence[str] | None = None) -> JobArguments:
    """Parse the arguments of the job script `prog`; words: sys.argv without the program.

    Raises UsageError.
    """
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Train one trial as one rank, or as all of them.",
        epilog="exit codes: 0 done, 2 wrong usage, 3 environment lacks something, 4 bad data, "
        "5 a rank failed, 6 timed out",
    )
    add = parser.add_argument
    add("spec", nargs="?", metavar="SPEC", help="TOML file, or the name of a shipped experiment")
    add("--only", metavar="PATTERN", help="the configuration to train, as a shell pattern")
    add("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the spec; may be repeated")  # fmt: skip
    add("--trial", type=Path, metavar="TRIAL_JSON", help="a planned trial in place of SPEC")
    add("--repeat", type=int, metavar="N", help="number of this repeat, from 0")
    add("--out", metavar="RUN_DIR", help="the job keeps its records there")
    return parser.parse_args(words, namespace=JobArguments())


def parse_job(launcher: str, prog: str, words: Sequence[str] | None = None) -> Job:
    """Return the job of this process's command line; see `job_of`."""
    return job_of(parse_arguments(prog, words), launcher)


def job_of(arguments: JobArguments, launcher: str) -> Job:
    """Return the job of `launcher` that the arguments describe.

    Raises UsageError with every fault of the spec, and if not exactly one trial is described.
    """
    if (arguments.spec is None) == (arguments.trial is None):
        raise UsageError("expected a spec or --trial TRIAL_JSON, and not both; see --help")
    if arguments.repeat is not None and arguments.repeat < 0:
        raise UsageError(f"--repeat: expected 0 or more, got {arguments.repeat}")
    if arguments.trial is not None:
        return _planned_job(arguments, arguments.trial.resolve(), launcher)
    if arguments.out is None:
        raise UsageError("expected --out RUN_DIR for the records of the trial; see --help")
    return _kept_job(arguments, arguments.out, _trial_of_spec(arguments, launcher))


def _planned_job(arguments: JobArguments, path: Path, launcher: str) -> Job:
    """Return the job of `--trial`. With `--out`, the job keeps its records there itself."""
    others = {
        "--only": arguments.only,
        "--set": arguments.settings or None,
        "--repeat": arguments.repeat if arguments.out is None else None,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UsageError(f"--trial describes the whole trial; leave out {', '.join(given)}")
    place = RemotePlace.from_environment()
    trial = read_trial(path) if place is None or path.exists() else _published(place, path.name)
    if trial.launcher != launcher:
        raise UsageError(
            f'--trial {path}: is for launcher "{trial.launcher}", this is "{launcher}"; its '
            "command.txt has the right command"
        )
    if arguments.out is None:
        return Job(trial=trial, files=TrialFiles(path.parent), run=None, place=place)
    if arguments.repeat is not None:  # the seed is already that of the trial
        name = trial_name(trial.configuration, arguments.repeat)
        trial = trial.model_copy(update={"repeat": arguments.repeat, "id": name})
    return _kept_job(arguments, arguments.out, trial)


def _kept_job(arguments: JobArguments, out: str, trial: Trial) -> Job:
    """Return the job that keeps its records in a folder. Raises UsageError for a URL."""
    if "://" in out:
        changes = [word for setting in arguments.settings for word in ("--set", setting)]
        spec = arguments.spec or "SPEC"
        words = ["paceline", "run", spec, "--only", trial.configuration, *changes, "--out", out]
        raise UsageError(
            f"--out {out}: expected a folder that all nodes see, because after a failure no "
            "process of this job is left to fetch the records of other nodes. Without one, let "
            "Paceline start the ranks, from one node of the cluster or of the scheduler's job: "
            f"{shlex.join(words)}"
        )
    run = RunFiles(Path(out).resolve())
    return Job(trial=trial, files=run.trial(trial.id), run=run)


def _trial_of_spec(arguments: JobArguments, launcher: str) -> Trial:
    """Return the one trial of the spec that the launcher and `--only` select."""
    # Ranks that are given a trial need neither data nor the rules of specs.
    from paceline.plan.spec.loading import load_spec  # noqa: PLC0415
    from paceline.train.data.catalogue import expected_datasets  # noqa: PLC0415

    assert arguments.spec is not None
    experiment = load_spec(arguments.spec, arguments.settings).experiment
    planned = plan_trials(experiment, expected_datasets(experiment), _node_cores())
    trials = {t.configuration: t for t in planned if t.launcher == launcher and t.repeat == 0}
    if not trials:
        raise UsageError(
            f'{arguments.spec}: expected a trial with launcher "{launcher}", found none; its '
            f"trials are for {', '.join(sorted({t.launcher for t in planned}))}"
        )
    pattern = "*" if arguments.only is None else arguments.only
    names = matching(trials, pattern)
    if not names:
        raise no_match("--only", [pattern], trials)
    if len(names) > 1:
        listed = "".join(f"\n  - {name}" for name in names)
        raise UsageError(
            f"--only: expected a pattern of one configuration, {pattern!r} matches:{listed}"
        )
    return repeated(trials[names[0]], arguments.repeat or 0, vary_seed=experiment.vary_seed)


def _node_cores() -> int:
    """Return the cores of this node: those of the launcher, as mpirun may have bound this rank."""
    return len(os.sched_getaffinity(launching_pid()))


def read_trial(path: Path) -> Trial:
    """Read a planned trial, whose task may be in a file beside it.

    Raises UsageError if the file has no trial.
    """
    try:
        return _with_own_file(Trial.model_validate_json(path.read_bytes()), path.parent)
    except OSError as error:
        raise UsageError(f"--trial {path}: expected a readable file: {error}") from error
    except ValidationError as error:
        raise UsageError(
            f"--trial {path}: expected a trial of this version of Paceline: {error}"
        ) from error


def _published(place: RemotePlace, name: str) -> Trial:
    """Return the trial that `paceline run` has put at the run's remote place."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
        folder = Path(temporary, "trial")
        remote_folder(place.trial).fetch(folder)
        return read_trial(folder / name)


def _with_own_file(trial: Trial, folder: Path) -> Trial:
    """Return the trial with the task's file of this folder, if it is there."""
    place, _, name = trial.training.task.rpartition(":")
    own = folder / Path(place).name
    if trial.training.task_sha256 is None or not own.is_file():
        return trial
    training = trial.training.model_copy(update={"task": f"{own.resolve()}:{name}"})
    return trial.model_copy(update={"training": training})


def check_world(trial: Trial, ranks: int, nodes: int = 1) -> None:
    """Raise UsageError if the launcher started other numbers of ranks and nodes than planned."""
    place = trial.placement
    if (ranks, nodes) == (place.ranks, place.nodes):
        return
    raise UsageError(
        f"{trial.id}: expected {place.ranks} ranks on {place.nodes} node(s), the launcher started "
        f"{ranks} on {nodes}; start {place.ranks_per_node} ranks on each of {place.nodes} nodes "
        "(mpirun -n and --map-by, torchrun --nproc-per-node, srun -n with --mpi=pmix), or change "
        "nodes and ranks_per_node of the trial (--set)"
    )


def check_not_alone(
    world_size: int, ranks: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise EnvironmentLacks if a single rank was meant to be one of `ranks`.

    `srun` without `--mpi=pmix`, or an mpirun of another MPI, starts N jobs of one rank each, and
    every one of them would end well (open-mpi/ompi#13523).
    """
    if world_size != 1 or ranks == 1:
        return
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        text = environment.get(variable, "")
        if text.isdigit() and int(text) > 1:
            raise EnvironmentLacks(
                f"world size: expected {text} ranks ({variable}), MPI made a world of 1: "
                f"{text} jobs of one rank each were started. Use srun --mpi=pmix, or the mpirun "
                "of the MPI that mpi4py uses (`paceline doctor` names both)"
            )
        if text:
            return  # set by the launcher; the other variables describe the allocation


_POLL_S = 0.02


def listen_on(interface: str) -> StoreAddress:
    """Listen on a free port of the interface's address only.

    The caller owns `listen_fd`. Raises EnvironmentLacks if the interface has no address.
    """
    with listening_socket(interface) as listener:
        host, port = listener.getsockname()
        descriptor = listener.detach()
        return StoreAddress(host=host, port=port, secret=new_secret(), listen_fd=descriptor)


def close_listener(address: StoreAddress) -> None:
    """Close a socket that is not needed after all."""
    if address.listen_fd is not None:
        with suppress(OSError):
            socket.socket(fileno=address.listen_fd).close()


def exchange_address(job: Job, rank: int, own: StoreAddress | None, start: str) -> StoreAddress:
    """Return rank 0's address. Rank 0 writes it to a file for the other ranks on its host, which
    `forget_address` removes.

    own: the socket of rank 0. start: distinguishes this start of the ranks from earlier ones.
    Raises TimedOut after `limits.rendezvous_s`.
    """
    path = _address_file(job.files)
    if rank == 0:
        assert own is not None
        content = {"start": start, "host": own.host, "port": own.port, "secret": own.secret}
        write_json(path, content, mode=0o600)
        return own
    limit_s = job.trial.limits.rendezvous_s
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            document = read_json(path)
        except DataError:
            document = {}  # rank 0 has not written it yet
        if document.get("start") == start:
            host, port, secret = (document[name] for name in ("host", "port", "secret"))
            return StoreAddress(host=host, port=port, secret=secret)
        time.sleep(_POLL_S)
    raise TimedOut(
        f"rank {rank} waited {limit_s:g} s for rank 0 to write its address to {path}; look at "
        "rank 0's log, or raise limits.rendezvous_s"
    )


def forget_address(files: TrialFiles) -> None:
    """Remove the file of `exchange_address`, which only this user can read, at the trial's end."""
    _address_file(files).unlink(missing_ok=True)


def _address_file(files: TrialFiles) -> Path:
    return files.root / "rendezvous.json"


def check_reachable(interface: str, hosts: Iterable[str]) -> None:
    """Raise EnvironmentLacks if ranks on several hosts would communicate over loopback."""
    names = sorted(set(hosts))
    if len(names) > 1 and interface == LOOPBACK:
        raise EnvironmentLacks(
            f"ranks are on {len(names)} hosts ({', '.join(names)}), which {interface!r} does not "
            "connect; name the interface between them with [network] interface"
        )
