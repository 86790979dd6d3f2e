"""Delegation tokens in Hadoop's file, which is written here as Hadoop does it. A real file:
tests/cluster/hadoop."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from paceline.data.hadoop_tokens import webhdfs_token
from paceline.errors import EnvironmentLacks


def block(content: bytes) -> bytes:
    """Return bytes after their size: one byte, or the number of its bytes and the size itself."""
    size = len(content)
    if size < 128:
        return bytes([size]) + content
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([256 - 112 - len(digits)]) + digits + content


def token(kind: str, service: str, identifier: bytes = b"owner") -> bytes:
    return b"".join(map(block, (identifier, b"password", kind.encode(), service.encode())))


def environment(folder: Path, *tokens: bytes) -> dict[str, str]:
    """Return an environment with a file of these tokens."""
    file = folder / "tokens"
    named = b"".join(block(b"name") + each for each in tokens)
    file.write_bytes(b"HDTS\0" + bytes([len(tokens)]) + named + b"\0")
    return {"HADOOP_TOKEN_FILE_LOCATION": str(file)}


def in_url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def test_token_of_the_name_node_is_chosen(tmp_path: Path) -> None:
    own = token("HDFS_DELEGATION_TOKEN", "127.0.0.1:8020", identifier=b"long" * 100)
    others = [
        token("YARN_AM_RM_TOKEN", "127.0.0.1:8030"),
        token("HDFS_DELEGATION_TOKEN", "192.0.2.7:8020"),
    ]
    found = environment(tmp_path, *others, own)
    assert webhdfs_token("127.0.0.1", found) == in_url(own)
    assert webhdfs_token("localhost", found) == in_url(own)
    assert webhdfs_token("192.0.2.8", found) is None


def test_only_token_for_hdfs_may_have_no_address(tmp_path: Path) -> None:
    own = token("HDFS_DELEGATION_TOKEN", "ha-hdfs:nameservice")
    found = environment(tmp_path, token("YARN_AM_RM_TOKEN", "127.0.0.1:8030"), own)
    assert webhdfs_token("127.0.0.1", found) == in_url(own)


def test_environment_without_tokens(tmp_path: Path) -> None:
    assert webhdfs_token("127.0.0.1", {}) is None
    assert webhdfs_token("127.0.0.1", environment(tmp_path)) is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"HDTS\1\0", r"begins with b'HDTS\\x01'"),  # protobuf
        (b"HDTS\0\1\x04name\x7f", "ends at byte 12, within a token"),
        (b"HDTS\0\x80", "no size at byte 5"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    found = environment(tmp_path)
    Path(found["HADOOP_TOKEN_FILE_LOCATION"]).write_bytes(content)
    with pytest.raises(EnvironmentLacks, match=why):
        webhdfs_token("127.0.0.1", found)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match=r"/gone .*No such file"):
        webhdfs_token("127.0.0.1", {"HADOOP_TOKEN_FILE_LOCATION": f"{tmp_path}/gone"})
