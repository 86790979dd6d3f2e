"""A copy of the run directory at a remote place, made when the command ends."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.base.errors import EnvironmentLacks, PacelineError
from paceline.base.host.messages import say
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import RunFiles
from paceline.train.data.remote_folder import make_new, remote_folder


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
