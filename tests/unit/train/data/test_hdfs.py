"""Errors and the limit of libhdfs, which the tests do not have."""

from __future__ import annotations

import threading

import pytest
from pyarrow import fs

from paceline.base.errors import EnvironmentLacks
from paceline.train.data import location
from paceline.train.data.location import location_of


def test_connection_of_libhdfs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(location, "_HDFS_CONNECT_S", 0.1)
    hanging = type("Hanging", (), {"from_uri": staticmethod(lambda _uri: ended.wait(20))})
    monkeypatch.setattr(fs, "HadoopFileSystem", hanging)
    with pytest.raises(EnvironmentLacks, match=r"cannot be reached \(no connection within 0.1 s\)"):
        location_of("hdfs://127.0.0.1:9820/data")
    ended.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("Unable to load libhdfs: cannot open shared object file",
         "Hadoop's libraries .* CLASSPATH .* `hadoop fs -get hdfs://127.0.0.1:9820/data FOLDER`"),
        ("[Errno 13] Calling GetPathInfo failed. Detail: [errno 13] Permission denied",
         "access was denied; .* Kerberos ticket .* HADOOP_USER_NAME"),
    ],
)  # fmt: skip
def test_error_of_libhdfs_says_what_to_do(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_uri(_uri: str) -> None:
        raise OSError(error)

    failing = type("Failing", (), {"from_uri": staticmethod(from_uri)})
    monkeypatch.setattr(fs, "HadoopFileSystem", failing)
    with pytest.raises(EnvironmentLacks, match=message):
        location_of("hdfs://127.0.0.1:9820/data")
