"""Names of data sets: paths and URLs. Light to import, so that planning can use it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.errors import UsageError

REMOTE_SCHEMES = ("s3", "gs", "hdfs")
_URL_RESERVED = "#?;"


def is_remote(name: str) -> bool:
    """Return whether the name is a URL of a remote place."""
    return name.partition("://")[0] in REMOTE_SCHEMES and "://" in name


def local_path(path: str | Path) -> Path:
    """Return the local folder that a path or file:// URL names.

    Raises UsageError for another scheme, and for characters that Petastorm would cut off because
    it reads paths as URLs.
    """
    text = str(path)
    parts = urlsplit(text)
    if "://" in text and parts.scheme == "file":
        text = unquote(parts.path)
    elif "://" in text:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password
        raise UsageError(
            f"{place}: expected a folder that every node sees, or a URL that begins with file://, "
            f"{', '.join(f'{scheme}://' for scheme in REMOTE_SCHEMES)}, got {parts.scheme}://; "
            "copy the data set to such a place first"
        )
    if any(character in text for character in _URL_RESERVED):
        raise UsageError(
            f"{text}: the path of a data set must not contain any of {' '.join(_URL_RESERVED)} "
            "(Petastorm reads paths as URLs); choose another folder"
        )
    return Path(text).absolute()


def absolute_name(name: str | Path) -> str:
    """Return a URL unchanged, and a path as an absolute path."""
    return str(name) if "://" in str(name) else str(Path(name).resolve())
