"""HDFS over HTTP against a small server, and the limits of both ways. Real HDFS: tests/cluster."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pyarrow import fs

from paceline.data import hdfs
from paceline.data.location import location_of
from paceline.errors import EnvironmentLacks, UsageError

CONTENT = b"0123456789"
# Answers of a NameNode, by path, in the form of its documentation (WebHDFS.html, Hadoop 3.3.4).
STATUS = {"pathSuffix": "", "type": "FILE", "length": len(CONTENT), "modificationTime": 0}
FAULTS = {
    "/cancelled": (403, "SecurityException", "InvalidToken: token 7 can't be found in cache"),
    "/denied": (403, "AccessControlException", "Permission denied: user=guest, access=EXECUTE"),
    "/standby": (403, "StandbyException", "Operation category READ is not supported in standby"),
}

# Answers of its authentication filter and of its web server are pages.
PAGES = {"/secured": 401, "/broken": 500}


class NameNode(BaseHTTPRequestHandler):
    users: list[str]
    silent: threading.Event

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/webhdfs/v1")
        self.users.append(query.get("user.name") or query.get("delegation", ""))
        if path.startswith("/silent"):
            self.silent.wait(20)
            return
        page = next((found for start, found in PAGES.items() if path.startswith(start)), None)
        if page is not None:
            self._send(page, b"<html></html>")
            return
        fault = next((found for start, found in FAULTS.items() if path.startswith(start)), None)
        if fault is not None:
            self._answer(
                fault[0], {"RemoteException": {"exception": fault[1], "message": fault[2]}}
            )
        elif query["op"] == "LISTSTATUS":
            statuses = [{**STATUS, "pathSuffix": "part.parquet"}]
            self._answer(200, {"FileStatuses": {"FileStatus": statuses}})
        elif query["op"] == "GETFILESTATUS":
            kind = "FILE" if path.endswith(".parquet") else "DIRECTORY"
            self._answer(200, {"FileStatus": {**STATUS, "type": kind}})
        else:
            start = int(query["offset"])
            self._send(200, CONTENT[start : start + int(query["length"])])

    def _answer(self, code: int, document: object) -> None:
        self._send(code, json.dumps(document).encode())

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    NameNode.users, NameNode.silent = [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), NameNode) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"webhdfs://127.0.0.1:{server.server_port}"
        NameNode.silent.set()
        server.shutdown()
        thread.join(10)


def test_files_are_read_as_the_hadoop_user(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "ingrid")
    place = location_of(f"{url}/data")
    assert place.sizes() == {"part.parquet": len(CONTENT)}
    assert place.read("part.parquet") == CONTENT
    with place.open("part.parquet") as stream:
        stream.seek(4)
        assert stream.read(3) == b"456"
    assert set(NameNode.users) == {"ingrid"}


def test_user_of_the_url_comes_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "ingrid")
    assert location_of(url.replace("127", "olaf@127") + "/data").sizes()
    assert set(NameNode.users) == {"olaf"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("denied", "access was denied; expected .* HADOOP_USER_NAME"),
        ("cancelled", "access was denied .* token is no longer valid"),
        ("secured", r"access was denied; expected .* \?kerberos=true"),
        ("standby", "in standby"),
    ],
)
def test_fault_is_explained(url: str, path: str, message: str) -> None:
    with pytest.raises(EnvironmentLacks, match=message):
        location_of(f"{url}/{path}").sizes()


def test_delegation_token_replaces_the_user(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = b"\2id\2pw\x15HDFS_DELEGATION_TOKEN\x0e127.0.0.1:8020"
    file = tmp_path / "tokens"
    file.write_bytes(b"HDTS\0\1\4name" + token + b"\0")
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(file))
    in_url = base64.urlsafe_b64encode(token).rstrip(b"=").decode()
    assert location_of(f"{url}/data?kerberos=true").sizes()
    assert set(NameNode.users) == {in_url}
    with pytest.raises(EnvironmentLacks, match=r"500 .*delegation=\(hidden\)") as broken:
        location_of(f"{url}/broken?kerberos=true").sizes()
    assert in_url not in str(broken.value)


def test_silent_server_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "_HTTP_LIMITS_S", (5.0, 0.2))
    with pytest.raises(EnvironmentLacks, match=r"cannot be reached .*timed out"):
        location_of(f"{url}/silent").sizes()


def test_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="got: token; the options are kerberos, use_https"):
        location_of("webhdfs://127.0.0.1/data?token=1")


def test_connection_of_libhdfs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(hdfs, "_CONNECT_S", 0.1)
    hanging = type("Hanging", (), {"from_uri": staticmethod(lambda _uri: ended.wait(20))})
    monkeypatch.setattr(fs, "HadoopFileSystem", hanging)
    with pytest.raises(EnvironmentLacks, match=r"cannot be reached \(no connection within 0.1 s\)"):
        location_of("hdfs://127.0.0.1:9820/data")
    ended.set()


def test_missing_library_names_the_way_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_uri(_uri: str) -> None:
        raise OSError("Unable to load libhdfs: cannot open shared object file")

    monkeypatch.setattr(
        fs, "HadoopFileSystem", type("Missing", (), {"from_uri": staticmethod(from_uri)})
    )
    with pytest.raises(EnvironmentLacks, match=r"Hadoop's libraries.*webhdfs://NAMENODE:9870/data"):
        location_of("hdfs://127.0.0.1:9820/data")
