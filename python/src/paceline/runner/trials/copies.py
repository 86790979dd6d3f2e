"""A copy of the run directory at a remote place, made when the command ends."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, PacelineError, PacelineWarning
from paceline.base.host.messages import say
from paceline.collectives.host import wait_until
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import RemotePlace
from paceline.runner.job.run_directory import needs_run_directory
from paceline.train.data.remote_folder import make_new, remote_folder, url_below


@contextmanager
def copied_at_end(files: RunFiles, url: str | None) -> Iterator[None]:
    """Copy the run directory at the end of the block, also if trials have failed.

    url: a new remote place, written into the run directory; None: that of an earlier command, if
    there is one. A signal ends the block without a copy. Raises UsageError or EnvironmentLacks
    before the block if the place cannot be used, EnvironmentLacks after a good block if the copy
    fails.
    """
    if url is not None:
        make_new(url)
        say(f"the run is written to {files.root}, and copied to {url} at the end")
        write_json(files.copy, {"url": url})
    elif files.copy.exists():
        url = str(read_json(files.copy)["url"])
    else:
        yield
        return
    try:
        yield
    except PacelineError:
        try:
            _copy(files, url)
        except EnvironmentLacks as error:  # the command ends with the failure of the trial
            say(str(error))
        raise
    except BaseException:
        _has_begun(files)
        raise
    _copy(files, url)


def _copy(files: RunFiles, url: str) -> None:
    if not _has_begun(files):
        return
    try:
        remote_folder(url).replace(files.root)
    except EnvironmentLacks as error:
        raise EnvironmentLacks(
            f"{error}\nthe run is in {files.root}; copy it again with: paceline run --resume "
            f"{shlex.quote(str(files.root))}"
        ) from error
    say(f"the run is in {files.root} and in {url}")


def _has_begun(files: RunFiles) -> bool:
    """Return whether there is more than the place; remove a run directory that has no more."""
    if any(path != files.copy for path in files.root.iterdir()):
        return True
    files.copy.unlink()
    files.root.rmdir()
    return False


# Nodes that do not see the run directory: what they need, and what they send (job.unshared)

_DELIVERY_S = 120.0  # after the end of the launcher, when most of it is done
# Slurm and Kubernetes end a job 30 s after SIGTERM by default; before, its ranks have to end.
_AFTER_SIGNAL_S = 15.0
_COPY_AFTER_SIGNAL_S = 10.0
_POLL_S = 1.0


def published(trial: Trial, files: TrialFiles) -> RemotePlace | None:
    """Put what other nodes need to the run's remote place, before an attempt at a trial.

    None if the run has no such place, if the trial runs on this host only, or if all nodes have to
    see the run directory. A place that cannot be used is a warning: they may see it.
    """
    run = RunFiles(files.root.absolute().parents[1])
    if not (run.copy.exists() and _leaves_this_host(trial)) or needs_run_directory(trial):
        return None
    attempt = f"{trial.id}-{secrets.token_hex(4)}"
    place = RemotePlace(url=str(read_json(run.copy)["url"]), attempt=attempt)
    try:
        _upload(files.root, place.trial)
        if trial.is_replayed:
            _upload_missing(run.replay, place.replay)
    except EnvironmentLacks as error:
        text = f"{error}\nonly nodes that see {files.root} can take part in {trial.id}"
        warnings.warn(text, PacelineWarning, stacklevel=2)
        return None
    return place


def _leaves_this_host(trial: Trial) -> bool:
    launcher = LAUNCHERS.get(trial.launcher)
    executors = launcher.executor_program(trial.launcher_options)
    return trial.placement.nodes > 1 or executors is not None


def _upload(folder: Path, url: str) -> None:
    remote = remote_folder(url)
    remote.make()
    remote.add(folder)


def _upload_missing(replay: Path, url: str) -> None:
    """Upload the states that are not there yet; a state does not change any more."""
    for training in sorted(replay.glob("*")):
        place = url_below(url, training.name)
        there = remote_folder(place).names()
        for state in sorted(training.iterdir()):
            if state.name not in there:
                _upload(state, url_below(place, state.name))


def collect(place: RemotePlace, files: TrialFiles) -> str | None:
    """Copy the records that nodes have sent, or still send, into the trial's directory.

    Return a message about the nodes whose records are missing.
    """
    return _collect(place, files, _DELIVERY_S, math.inf)


def collect_after_signal(place: RemotePlace, files: TrialFiles) -> None:
    """Copy the records that nodes have sent, or send soon, and say so."""
    say(
        f"fetching the records of other nodes from {place.url}, for at most "
        f"{_AFTER_SIGNAL_S + _COPY_AFTER_SIGNAL_S:g} s; another signal ends this at once"
    )
    missing = _collect(place, files, _AFTER_SIGNAL_S, _COPY_AFTER_SIGNAL_S)
    say(
        f"what other nodes have sent is in {files.root}"
        if missing is None
        else f"{missing}; what comes later stays there"
    )


def _collect(place: RemotePlace, files: TrialFiles, limit_s: float, copy_s: float) -> str | None:
    """limit_s: until the nodes have sent their records. copy_s: further time for the copies."""
    until_s = time.monotonic() + limit_s + copy_s
    try:
        hosts = remote_folder(place.hosts, until_s).names()
        missing = set(hosts)

        def all_sent() -> bool:
            names = {host: remote_folder(place.host(host), until_s).names() for host in missing}
            missing.difference_update(host for host in names if "done" in names[host])
            return not missing

        wait_until(all_sent, limit_s, _POLL_S)
        for host in sorted(hosts - missing):
            _fetch(place.host(host, "files"), files.root, until_s)
    except EnvironmentLacks as error:
        return f"the records of other nodes cannot be fetched: {error}"
    if not missing:
        return None
    return (
        f"host {', '.join(sorted(missing))} has sent no records within {limit_s:g} s of the "
        f"end: it was killed, or does not reach {place.url} any more"
    )


def _fetch(url: str, folder: Path, until_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder) as temporary:
        fetched = Path(temporary, "files")
        remote_folder(url, until_s).fetch(fetched)
        shutil.copytree(fetched, folder, dirs_exist_ok=True, copy_function=os.replace)
