"""A copy of the run directory at a remote place, made when the command ends."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, PacelineError
from paceline.host.messages import say
from paceline.records.files import read_json, write_json
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from paceline.data.remote_folder import RemoteFolder


@contextmanager
def copied_at_end(files: RunFiles, url: str | None) -> Iterator[None]:
    """Copy the run directory at the end of the block, also if trials have failed.

    url: a new remote place; None: that of an earlier command, if there is one. A signal ends the
    block without a copy. Raises UsageError or EnvironmentLacks before the block if the place cannot
    be used, EnvironmentLacks after a good block if the copy fails.
    """
    if url is not None:
        _remote_folder(url).make()
        say(f"the run is written to {files.root}, and copied to {url} at the end")
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
        _keep_place(files, url)
        raise
    _copy(files, url)


def _remote_folder(url: str) -> RemoteFolder:
    # Only a copy needs pyarrow, which an installation without extras lacks.
    from paceline.data.remote_folder import remote_folder  # noqa: PLC0415

    return remote_folder(url)


def _copy(files: RunFiles, url: str) -> None:
    if not _keep_place(files, url):
        return
    try:
        _remote_folder(url).replace(files.root)
    except EnvironmentLacks as error:
        raise EnvironmentLacks(
            f"{error}\nthe run is in {files.root}; copy it again with: paceline run --resume "
            f"{shlex.quote(str(files.root))}"
        ) from error
    say(f"the run is in {files.root} and in {url}")


def _keep_place(files: RunFiles, url: str) -> bool:
    """Write the place into the run directory, for `--resume`; return whether there is one."""
    if not files.root.is_dir():  # nothing has begun
        return False
    write_json(files.copy, {"url": url})
    return True
