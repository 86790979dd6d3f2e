"""Data sets on S3: copied once per node, verified, and clear messages where that fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.s3 import BUCKET, CREDENTIALS, S3Server, s3_server
from tests.support.thread_ranks import ThreadNode

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.collectives.node.memory import SoloNode
from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.data import location as location_module
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.dataset import inspect_dataset, node_folder, open_dataset
from paceline.train.data.register import register
from paceline.train.data.row_groups import ParquetSource

ROWS = 40
RANKS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    lists = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    table = pa.table(
        {"x": pa.array(lists.tolist(), pa.list_(pa.float32())), "y": list(range(ROWS))}
    )
    for number in range(2):
        part = table.slice(20 * number, 20)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=5)
    return folder


@pytest.fixture
def url(server: S3Server, files: Path, request: pytest.FixtureRequest) -> str:
    """A registered data set in a folder of its own."""
    made = server.upload(files, request.node.name.translate({91: 45, 93: 45}))
    register(made)
    server.read_bytes.clear()
    return made


def bytes_of_files(server: S3Server) -> int:
    return sum(n for path, n in server.read_bytes.items() if path.endswith(".parquet"))


def read_all(url: str, cache: str | None = None) -> list[int]:
    """The ids of one epoch, streamed by ranks that run at the same time."""
    node = ThreadNode(RANKS)

    def run(rank: int) -> list[int]:
        dataset = open_dataset(url)
        order = SampleOrder(dataset.row_group_rows, seed=1, global_batch=6, epochs=1)
        with ExitStack() as opened:
            copies = opened.enter_context(node_folder(dataset.location, node.of(rank), cache))
            source = ParquetSource(dataset.with_copies(copies), "x", "y", image_size=32)
            feed = open_feed(source, order, FeedOptions(rank, RANKS), mode="stream")
            ids: list[int] = []
            for batch in opened.enter_context(feed):
                assert np.array_equal(batch.targets, batch.sample_ids)
                ids += batch.sample_ids.tolist()
            node.line.wait(30)
        return ids

    with ThreadPoolExecutor(RANKS) as pool:
        return [i for ids in pool.map(run, range(RANKS)) for i in ids]


def test_each_file_is_read_once_per_node(server, url, files, tmp_path) -> None:
    assert sorted(read_all(url)) == list(range(ROWS))
    assert bytes_of_files(server) == sum(p.stat().st_size for p in files.glob("*.parquet"))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_keeps_the_files_for_later_runs(server, url, tmp_path) -> None:
    cache = tmp_path / "cache"
    read_all(url, str(cache))
    once = bytes_of_files(server)
    assert sorted(read_all(url, str(cache))) == list(range(ROWS))
    assert bytes_of_files(server) == once
    kept = sorted(cache.glob("*.parquet"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[1].read_bytes())  # a damaged copy is replaced
    assert sorted(read_all(url, str(cache))) == list(range(ROWS))
    assert once < bytes_of_files(server) < 2 * once


def test_a_changed_object_is_detected(server: S3Server, url: str, files: Path) -> None:
    place = location_module.location_of(url)
    data = bytearray((files / "part-1.parquet").read_bytes())
    data[30] ^= 1
    place.write("part-1.parquet", bytes(data))
    dataset = open_dataset(url)
    with node_folder(dataset.location, SoloNode(), None) as copies:
        source = ParquetSource(dataset.with_copies(copies), "x", "y", image_size=32)
        with pytest.raises(DataError, match=r"part-1\.parquet: expected sha256 .* data register"):
            list(source.read(range(8), with_inputs=True))
        assert copies is not None
        assert [path.name for path in copies.glob("*.partial")] == []
    with pytest.raises(DataError, match=r"part-1\.parquet: expected sha256"):
        inspect_dataset(url)


def test_the_folder_of_a_killed_process_is_removed(url: str, tmp_path: Path) -> None:
    abandoned = tmp_path / "paceline-data-old"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    with node_folder(open_dataset(url).location, SoloNode(), None):
        assert not abandoned.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_of_a_read_only_bucket_is_kept_in_another_place(
    server, files, tmp_path
) -> None:
    url = server.upload(files, "read-only")
    register(url, manifest_dir=tmp_path / "mine")
    assert open_dataset(tmp_path / "mine").location.name == url
    assert inspect_dataset(tmp_path / "mine")["checksums"] == "verified"


def test_missing_and_wrong_credentials_are_reported(url, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    with pytest.raises(EnvironmentLacks, match=r"access was denied.*AWS_ACCESS_KEY_ID"):
        open_dataset(url)
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(EnvironmentLacks, match=r"access was denied.*AWS_ACCESS_KEY_ID"):
        open_dataset(url)


def test_a_wrong_bucket_or_folder_is_reported(server: S3Server, url: str) -> None:
    with pytest.raises(EnvironmentLacks, match="there is no bucket elsewhere"):
        open_dataset(server.url("set", "elsewhere"))
    with pytest.raises(EnvironmentLacks, match="no such data set"):
        open_dataset(server.url("nothing"))


def test_a_server_that_is_down_or_silent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location_module, "_ANSWER_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        place = f"?endpoint_override=127.0.0.1:{silent.getsockname()[1]}&scheme=http"
        with pytest.raises(EnvironmentLacks, match=r"cannot be reached .*check the network"):
            open_dataset(f"s3://{BUCKET}/set{place}")  # nobody listens
        silent.listen(8)
        with pytest.raises(EnvironmentLacks, match=r"cannot be reached .*check the network"):
            open_dataset(f"s3://{BUCKET}/set{place}")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("s3://key:secret@bucket/set", UsageError, "must not contain a secret"),
        ("s3:///set", UsageError, "expected s3://BUCKET/PATH, got no bucket"),
        ("s3://bucket/set?colour=red", UsageError, "expected options of the file system"),
        ("hdfs://host:9000/set", EnvironmentLacks, "Hadoop's libraries"),
        ("ftp://host/set", UsageError, "s3://, gs://, hdfs://, got ftp://"),
    ],
)
def test_a_url_that_cannot_work_is_refused(name, error, message, monkeypatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(error, match=message) as caught:
        open_dataset(name)
    assert "secret@" not in str(caught.value)


def test_the_endpoint_of_the_aws_tools_is_used(server, url, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    assert open_dataset(url.partition("?")[0]).samples == ROWS
