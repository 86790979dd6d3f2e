"""Places of data sets: folders that every node sees, and object stores and HDFS through pyarrow.

Every operation on an object store ends within about a minute: there are limits for connections,
answers and retries. Those of a connected hdfs:// are Hadoop's own (dfs.client.*); it is read by
Hadoop's native library.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pyarrow import fs

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.plan.spec.secret_values import holds_secret
from paceline.plan.spec.values import REMOTE_SCHEMES, is_remote, local_path

_HIDDEN = re.compile(r"(^|/)[._]")
_BLOCK_BYTES = 8 * 2**20
_CONNECT_S = 5.0
_ANSWER_S = 20.0
_ATTEMPTS = 2
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or ~/.aws/credentials) on every host; for "
    "a public bucket, add ?anonymous=true to the URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS on every host; for a public bucket, add ?anonymous=true "
    "to the URL",
    "hdfs": "a Kerberos ticket (kinit) or HADOOP_USER_NAME on every host",
}
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE", "HTTP response code 403",
           "UNAUTHENTICATED", "PERMISSION_DENIED", "OAuth2", "Permission denied")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Location:
    """A folder with files, local or remote."""

    name: str  # as a user writes it
    filesystem: fs.FileSystem
    root: str  # path within the file system
    until_s: float = math.inf  # see remote_folder

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below the folder, by relative path.

        Names that begin with `.` or `_` are left out, as Parquet readers do. Raises
        EnvironmentLacks if the folder does not exist or cannot be read.
        """
        with self._explained():
            infos = self.filesystem.get_file_info(
                fs.FileSelector(self.root, recursive=True, allow_not_found=True)
            )
            if not infos:
                self._require_folder()
        found = {}
        for info in infos:
            path = info.path[len(self.root) :].lstrip("/")
            if info.is_file and not _HIDDEN.search(path):
                found[path] = info.size
        return dict(sorted(found.items()))

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if there is none. Raises EnvironmentLacks."""
        with self._explained():
            place = f"{self.root}/{path}"
            if self.filesystem.get_file_info(place).type != fs.FileType.File:
                self._require_folder()
                return None
            with self.filesystem.open_input_stream(place) as stream:
                return bytes(stream.read())

    def write(self, path: str, content: bytes) -> None:
        """Write a small file. Raises EnvironmentLacks if that is not possible."""
        with self._explained(), self.filesystem.open_output_stream(f"{self.root}/{path}") as stream:
            stream.write(content)

    def open(self, path: str) -> Any:
        """Return a file for reading at any position. Raises EnvironmentLacks."""
        with self._explained():
            return self.filesystem.open_input_file(f"{self.root}/{path}")

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file in blocks. Raises EnvironmentLacks."""
        with self._explained(), self.filesystem.open_input_stream(f"{self.root}/{path}") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def sha256(self, path: str) -> str:
        """Return the checksum of a file. Raises EnvironmentLacks."""
        digest = hashlib.sha256()
        for block in self.blocks(path):
            digest.update(block)
        return digest.hexdigest()

    def make(self) -> None:
        """Make the folder and its parents; see RemoteFolder."""
        with self._explained():
            self.filesystem.create_dir(self.root, recursive=True)

    def add(self, folder: Path) -> None:
        """Copy the content of a local folder into this one; see RemoteFolder."""
        with self._explained():
            fs.copy_files(
                str(folder), self.root,
                source_filesystem=fs.LocalFileSystem(), destination_filesystem=self.filesystem,
                # With threads, copies to S3 wait for uploads that the same few threads execute.
                use_threads=False,
            )  # fmt: skip

    def replace(self, folder: Path) -> None:
        """Replace the content of the folder by that of a local one; see RemoteFolder."""
        with self._explained():
            self.filesystem.delete_dir_contents(self.root)
        self.add(folder)

    def names(self) -> set[str]:
        """Return the names of what is in the folder; see RemoteFolder."""
        with self._explained():
            inside = fs.FileSelector(self.root, allow_not_found=True)
            return {info.base_name for info in self.filesystem.get_file_info(inside)}

    def fetch(self, folder: Path) -> None:
        """Copy the content into a new local folder; see RemoteFolder."""
        folder.mkdir(parents=True)
        with self._explained():
            inside = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
            for info in self.filesystem.get_file_info(inside):
                path = info.path[len(self.root) :].lstrip("/")
                if info.is_file:
                    self._copy(path, folder / path)
                else:
                    folder.joinpath(path).mkdir(parents=True, exist_ok=True)

    def _copy(self, path: str, copy: Path) -> None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("wb") as file:
            for block in self.blocks(path):
                if time.monotonic() > self.until_s:
                    raise EnvironmentLacks(f"{self.name}: {path} could not be copied in time")
                file.write(block)

    def _require_folder(self) -> None:
        """Raise EnvironmentLacks if the folder or its bucket does not exist."""
        if self.filesystem.get_file_info(self.root).type == fs.FileType.Directory:
            return
        bucket = self.root.split("/", 1)[0]
        if bucket and self.filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
            raise EnvironmentLacks(
                f"{self.name}: there is no bucket {bucket}; expected one that exists: correct the "
                "URL, or its region and endpoint"
            )
        raise EnvironmentLacks(
            f"{self.name}: there is no such data set; correct the path, or make one with "
            "`paceline data ingest IMAGES_DIR OUT_DATASET`"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace pyarrow's errors by one that says what to do."""
        try:
            yield
        except OSError as error:
            raise _explanation(self.name, error) from error


def made_folder(folder: Path, advice: str = "choose another folder") -> Path:
    """Make a folder and its parents. Raises EnvironmentLacks if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(
            f"{folder}: cannot be created ({error.strerror}); {advice}"
        ) from None
    return folder


def require_new(place: Path) -> None:
    """Raise UsageError unless a place is a new or empty folder."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise not_empty(str(place))


def not_empty(name: str) -> UsageError:
    return UsageError(
        f"{name}: expected a new or empty folder, but it is not empty; remove it or choose another"
    )


def location_of(name: str | Path) -> Location:
    """Return the place that a path or URL names: a folder, file://, s3://, gs:// or hdfs://.

    A URL may have options of pyarrow's file systems: `?endpoint_override=HOST:PORT&scheme=http`,
    `region=`, `anonymous=true`. Opens no connection, except for hdfs://.
    Raises UsageError for another scheme, EnvironmentLacks if HDFS cannot be reached.
    """
    text = str(name)
    if not is_remote(text):
        folder = local_path(text)
        return Location(str(folder), fs.LocalFileSystem(), str(folder))
    parts = urlsplit(text)
    if holds_secret(text):
        raise UsageError(
            f"{parts.scheme}://{parts.hostname}: a URL must not contain a secret, because it is "
            f"written to the run directory; set {_CREDENTIALS[parts.scheme]}"
        )
    if parts.scheme != "hdfs" and not parts.netloc:
        raise UsageError(f"{text}: expected {parts.scheme}://BUCKET/PATH, got no bucket")
    try:
        filesystem = _filesystem(parts.scheme, parts.netloc, dict(parse_qsl(parts.query)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{text}: expected options of the file system, got: {error}") from error
    except OSError as error:
        raise _explanation(text, error) from error
    path = unquote(parts.path).strip("/")
    root = f"/{path}" if parts.scheme == "hdfs" else f"{parts.netloc}/{path}".rstrip("/")
    return Location(text, filesystem, root)


def _filesystem(scheme: str, host: str, options: dict[str, str]) -> fs.FileSystem:
    given: dict[str, Any] = {
        **options,
        **({"anonymous": options["anonymous"] == "true"} if "anonymous" in options else {}),
    }
    if scheme == "gs":
        return fs.GcsFileSystem(**given, retry_time_limit=timedelta(seconds=_ANSWER_S))
    if scheme == "hdfs":
        return native_hdfs(host)
    # pyarrow 14 does not read this variable of the AWS tools.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_override" not in given:
        given = {"scheme": urlsplit(endpoint).scheme, **given}
        given["endpoint_override"] = urlsplit(endpoint).netloc
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return fs.S3FileSystem(
        **({"region": region} if region else {}) | given,
        connect_timeout=_CONNECT_S,
        request_timeout=_ANSWER_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


def _explanation(name: str, error: Exception) -> EnvironmentLacks | DataError:
    scheme = name.partition("://")[0]
    text = str(error)
    if scheme not in REMOTE_SCHEMES:
        return EnvironmentLacks(f"{name}: cannot be read or written ({error}); correct it")
    if any(sign in text for sign in _DENIED):
        return EnvironmentLacks(
            f"{name}: access was denied; expected credentials that may use it: set "
            f"{_CREDENTIALS[scheme]}"
        )
    if "NO_SUCH_BUCKET" in text:
        return EnvironmentLacks(
            f"{name}: there is no such bucket; correct the URL, or its region and endpoint"
        )
    if "libhdfs" in text or "libjvm" in text:
        return EnvironmentLacks(
            f"{name}: expected Hadoop's libraries on this host, got: {text}; set JAVA_HOME, "
            "HADOOP_HOME and CLASSPATH (`hadoop classpath --glob`), or copy the data to a folder "
            f"that every host reads: `hadoop fs -get {name} FOLDER`"
        )
    return EnvironmentLacks(
        f"{name}: cannot be reached ({text}); check the network, the endpoint and the region"
    )


_HDFS_CONNECT_S = 60.0


def native_hdfs(host: str) -> fs.FileSystem:
    """Connect through libhdfs. Raises OSError, also if there is no connection after a minute.

    host: of the NameNode, with its RPC port. Hadoop's own limits add up to many minutes.
    """
    ended: list[fs.FileSystem | Exception] = []

    def connect() -> None:
        try:
            ended.append(fs.HadoopFileSystem.from_uri(f"hdfs://{host}"))
        except Exception as error:  # noqa: BLE001  (it is raised again below)
            ended.append(error)

    # A daemon thread, because the call cannot be interrupted.
    thread = threading.Thread(target=connect, name="paceline-hdfs", daemon=True)
    thread.start()
    thread.join(_HDFS_CONNECT_S)
    if not ended:
        raise OSError(f"no connection within {_HDFS_CONNECT_S:g} s")
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]
