"""An S3 server (moto), which only known credentials may use.

`python -m tests.support.s3 ADDRESS PORT` serves until its input ends, as on a host of a lab.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

KEY = "of-the-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}
BUCKET = "samples"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class S3Server:
    """The server's address, and the bytes that clients have read of each object."""

    def __init__(self, address: str, port: int) -> None:
        self.port = port
        self._place = f"{address}:{port}"
        self.read_bytes: Counter[str] = Counter()

    def url(self, path: str, bucket: str = BUCKET) -> str:
        """Return the URL of a folder of a bucket."""
        return f"s3://{bucket}/{path}?endpoint_override={self._place}&scheme=http"

    def upload(self, folder: Path, path: str) -> str:
        """Copy a local folder, and return its URL."""
        store = fs.S3FileSystem(
            access_key=KEY, secret_key=KEY, endpoint_override=self._place,
            scheme="http", region="us-east-1", allow_bucket_creation=True,
        )  # fmt: skip
        store.create_dir(BUCKET)
        fs.copy_files(
            str(folder), f"{BUCKET}/{path}",
            source_filesystem=fs.LocalFileSystem(), destination_filesystem=store,
            # With threads, copies wait for uploads that the same few threads should execute.
            use_threads=False,
        )  # fmt: skip
        return self.url(path)


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Write nothing."""


@contextmanager
def s3_server(address: str = "127.0.0.1", port: int = 0) -> Iterator[S3Server]:
    """Serve S3, by default on a free port of loopback. Requests need the known key."""
    moto = DomainDispatcherApplication(create_backend_app)
    server: S3Server | None = None

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if KEY not in environ.get("HTTP_AUTHORIZATION", ""):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [_DENIED]
        blocks = list(moto(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET" and server is not None:
            server.read_bytes[environ["PATH_INFO"]] += sum(map(len, blocks))
        return blocks

    listening = make_server(address, port, application, True, request_handler=_Quiet)
    server = S3Server(address, listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join(10)
        listening.server_close()


def main() -> None:
    with s3_server(sys.argv[1], int(sys.argv[2])) as server, TemporaryDirectory() as empty:
        server.upload(Path(empty), "other")  # makes the bucket
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
