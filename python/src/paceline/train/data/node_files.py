"""Files of a remote data set on a node: each is copied once, by one of the node's ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.base.host.locks import exclusive_lock, own_folder
from paceline.collectives.node.memory import NodeShare
from paceline.plan.spec.values import local_path
from paceline.train.data.location import Location, made_folder

if TYPE_CHECKING:
    from paceline.train.data.manifest import DataFile

_COPY_S = 1800.0
_ANSWER_S = 60.0
_PREFIX = "paceline-data-"


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a local file. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetched(location: Location, file: DataFile, folder: Path) -> Path:
    """Return the path of a copy of the file in `folder`; copy it if there is none.

    One process copies and others wait. The copy appears under its checksum, complete or not at
    all. A damaged copy is replaced. Raises DataError if the file differs from the manifest,
    EnvironmentLacks if it cannot be copied.
    """
    kept = folder / f"{file.sha256}.parquet"
    busy = f"{kept}: another process has copied this file for {_COPY_S:.0f} s; end it"
    with exclusive_lock(folder / f".{file.sha256}.lock", _COPY_S, busy):
        if kept.is_file() and sha256_of_file(kept) == file.sha256:
            return kept
        _copy(location, file, kept)
    return kept


@contextmanager
def node_folder(
    location: Location, share: NodeShare, cache: str | None, key: str = "folder"
) -> Iterator[Path | None]:
    """Yield the folder for the node's copies, shared by its ranks; None for a local data set.

    cache: a folder to keep them in; None makes a temporary one, which local rank 0 removes. key:
    under which ranks find it, another one for each data set.
    Raises EnvironmentLacks if the folder cannot be made, TimedOut if local rank 0 does not answer.
    """
    if location.is_local:
        yield None
        return
    if cache is not None:
        yield made_folder(local_path(cache), "choose another folder with `cache`")
        return
    if share.local_rank != 0:
        shared = Path(share.lookup(key, _ANSWER_S))
        # A rank in another container may not see it; its copies are then its own.
        with nullcontext(shared) if shared.is_dir() else _temporary() as folder:
            yield folder
        return
    with _temporary() as folder:
        share.publish(key, str(folder))
        yield folder


@contextmanager
def _temporary() -> Iterator[Path]:
    """Yield a new folder and remove it at the end."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(own_folder(_PREFIX))
        except OSError as error:
            raise EnvironmentLacks(
                f"no folder for copies of a remote data set: {error}; set TMPDIR, or `cache`"
            ) from None
        yield folder


def _copy(location: Location, file: DataFile, kept: Path) -> None:
    partial = kept.with_suffix(".partial")
    name = f"{location.name}, file {file.path}"
    try:
        digest = hashlib.sha256()
        with partial.open("wb") as target:
            for block in location.blocks(file.path):
                digest.update(block)
                target.write(block)
        found = digest.hexdigest()
        if found != file.sha256:
            raise DataError(
                f"{name}: expected sha256 {file.sha256}, found {found}: it was changed or damaged; "
                "register the data set again with `paceline data register`"
            )
        partial.replace(kept)
    except OSError as error:
        raise EnvironmentLacks(
            f"{name}: cannot be copied to {kept.parent} ({error.strerror}); free some space, or "
            "choose another folder with `cache`"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
