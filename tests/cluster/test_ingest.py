"""Ingest through real Spark: nasty folders, bad images, nothing half-written, no orphans."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.commands import run_command

import paceline
from paceline.base.errors import DataError, ExitCode, UsageError
from paceline.base.host.spark import find_java, find_spark, homes
from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.data import ingest as ingest_module
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.dataset import inspect_dataset, open_dataset
from paceline.train.data.images import decode
from paceline.train.data.ingest import ingest
from paceline.train.data.ingest import rows_of as write_rows
from paceline.train.data.ingest_spark import local_session
from paceline.train.data.manifest import DatasetManifest
from paceline.train.data.row_groups import ParquetSource
from paceline.train.data.synth import image_bytes, synthesise

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Petastorm on pyarrow 14
]
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ingested:
    path: Path
    manifest: DatasetManifest
    progress: list[tuple[int, int]]


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with local_session(2) as session:
        yield session


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tiny"
    synthesise(folder, "tiny", 40)
    return folder


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """Good images under odd names, in every odd format."""
    root = tmp_path / "it's 100% ünï images"
    rotated = Image.Exif()
    rotated[0x0112] = 6
    grey = Image.fromarray(np.tile(np.arange(80, dtype=np.uint8), (50, 1)))
    good = {
        "fire/quote \" and ' and %20.jpg": image_bytes("tiny", 0, 0),
        "fire/ü ñ 火.JPEG": image_bytes("tiny", 0, 3),
        "fire/no suffix": image_bytes("tiny", 0, 6),
        "no fire/comma, #hash?.jpg": image_bytes("tiny", 0, 2),
        "no fire/grey.jpg": encoded(grey),
        "no fire/cmyk.jpg": encoded(grey.convert("CMYK")),
        "no fire/sub/rotated.jpg": encoded(grey.convert("RGB"), exif=rotated),
        "no fire/palette.png": encoded(grey.convert("P"), "PNG"),
        "no fire/plain.png": encoded(grey.convert("RGB"), "PNG"),
        "no fire/sixteen.png": encoded(Image.fromarray(np.full((9, 9), 40000, np.uint16)), "PNG"),
    }
    for name, data in good.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / os.fsdecode(b"fire/latin \xe9.jpg")).write_bytes(image_bytes("tiny", 0, 7))
    for junk in ("fire/Thumbs.db", "fire/._x.jpg", "no fire/.DS_Store", ".hidden/a.jpg"):
        (root / junk).parent.mkdir(exist_ok=True)
        (root / junk).write_bytes(b"junk")
    return root


def spoil(root: Path) -> None:
    whole = image_bytes("tiny", 0, 9)
    (root / "fire/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "fire/empty.jpg").write_bytes(b"")
    (root / "no fire/notes").write_text("not a image")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    manifest = open_dataset(folder).manifest
    rows: list[dict[str, Any]] = []
    for group in manifest.row_groups:
        rows += pq.ParquetFile(folder / group.file.path).read().to_pylist()
    return rows


@pytest.fixture(scope="module")
def ingested(spark: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Ingested:
    seen: list[tuple[int, int]] = []
    out = tmp_path_factory.mktemp("out") / "a set"
    manifest = ingest(tiny, out, seed=4, spark=spark, progress=lambda *a: seen.append(a))
    return Ingested(out, manifest, seen)


def test_images_arrive_byte_for_byte_in_even_row_groups(ingested: Ingested, tiny: Path) -> None:
    dataset = open_dataset(ingested.path)
    assert dataset.manifest == ingested.manifest
    assert sorted(dataset.row_group_rows) == [2] * 8 + [3] * 8
    rows = rows_of(ingested.path)
    assert [row["sample_id"] for row in rows] == list(range(40))
    assert len({row["source"] for row in rows}) == 40
    for row in rows:
        data = (tiny / row["source"]).read_bytes()
        assert row["image"] == data
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
        assert dataset.classes[row["label"]] == row["source"].split("/")[0]
    assert dataset.manifest.class_counts == tuple(
        len(list((tiny / name).iterdir())) for name in dataset.classes
    )
    # Parts and metadata, no leftovers of Hadoop.
    assert {file.name[0] for file in ingested.path.iterdir()} == {"p", "_"}
    assert inspect_dataset(ingested.path)["checksums"] == "verified"


def test_progress_grows_to_the_total(ingested: Ingested) -> None:
    assert ingested.progress[-1] == (80, 80)
    assert ingested.progress == sorted(set(ingested.progress))


def test_the_seed_decides_the_content(
    ingested: Ingested, spark: Any, tiny: Path, tmp_path: Path
) -> None:
    again = ingest(tiny, tmp_path / "again", seed=4, spark=spark, row_group_rows=20)
    other = ingest(tiny, tmp_path / "other", seed=5, spark=spark, row_group_rows=20)
    assert [group.rows for group in again.row_groups] == [20, 20]
    assert again.content_sha256 == ingested.manifest.content_sha256 != other.content_sha256


def test_any_petastorm_reader_can_read_it(ingested: Ingested) -> None:
    from petastorm import make_reader

    rows = {row["sample_id"]: row for row in rows_of(ingested.path)}
    with make_reader(f"file://{ingested.path}", reader_pool_type="dummy") as reader:
        read = list(reader)
    assert sorted(int(row.sample_id) for row in read) == list(range(40))
    first = read[0]
    with Image.open(io.BytesIO(rows[int(first.sample_id)]["image"])) as image:
        assert first.image.shape == (image.height, image.width, 3)


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_what_was_ingested_is_fed(ingested: Ingested, mode: Any) -> None:
    dataset = open_dataset(ingested.path)
    order = SampleOrder(dataset.row_group_rows, seed=1, global_batch=16, epochs=1)
    source = ParquetSource(dataset, "image", "label", image_size=32)
    with open_feed(source, order, FeedOptions(0, 1), mode=mode) as feed:
        fed = {
            int(sample_id): int(label)
            for batch in feed
            for sample_id, label in zip(batch.sample_ids, batch.targets, strict=True)
        }
    assert fed == {row["sample_id"]: row["label"] for row in rows_of(ingested.path)}


def test_odd_names_and_formats_become_uniform(spark: Any, nasty: Path, tmp_path: Path) -> None:
    out = tmp_path / "100% dätä set"
    manifest = ingest(nasty, out, spark=spark)
    assert manifest.classes == ("fire", "no fire")
    assert manifest.class_counts == (4, 7)
    assert manifest.image_stats.reencoded == 5
    rows = {row["source"]: row for row in rows_of(out)}
    assert "fire/latin \\xe9.jpg" in rows
    assert rows["no fire/plain.png"]["image"].startswith(b"\x89PNG")
    with Image.open(io.BytesIO(rows["no fire/sub/rotated.jpg"]["image"])) as image:
        assert image.size == (50, 80)
    for row in rows.values():
        assert decode(row["image"], 8).shape == (8, 8, 3)


def test_every_bad_image_is_named_and_nothing_is_left(
    spark: Any, nasty: Path, tmp_path: Path
) -> None:
    spoil(nasty)
    with pytest.raises(DataError, match="3 of 14 images cannot be used") as caught:
        ingest(nasty, tmp_path / "out", spark=spark)
    for name in ("fire/cut.jpg: damaged", "fire/empty.jpg: the file is empty", "no fire/notes"):
        assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == [nasty]


def test_bad_images_are_skipped_and_listed_when_asked(
    spark: Any, nasty: Path, tmp_path: Path
) -> None:
    spoil(nasty)
    manifest = ingest(nasty, tmp_path / "out", on_bad_image="skip", spark=spark)
    assert manifest.samples == 11
    assert [image.path for image in manifest.skipped] == [
        "fire/cut.jpg", "fire/empty.jpg", "no fire/notes",
    ]  # fmt: skip
    assert open_dataset(tmp_path / "out").manifest.skipped == manifest.skipped


def test_a_class_of_bad_images_only_is_refused_even_when_skipping(
    spark: Any, tmp_path: Path
) -> None:
    for name, data in {"a/1.jpg": image_bytes("tiny", 0, 0), "b/1.jpg": b"no"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(DataError, match="no good image is left in class 'b'"):
        ingest(tmp_path / "in", tmp_path / "out", on_bad_image="skip", spark=spark)
    assert not (tmp_path / "out").exists()


def test_a_failing_write_leaves_nothing(
    spark: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_row_groups = ingest_module.plan_row_groups

    def changed(*arguments: Any) -> Any:
        image = next((tiny / "fire").iterdir())
        original = image.read_bytes()
        stack.callback(image.write_bytes, original)
        image.write_bytes(original + b"\0")
        return plan_row_groups(*arguments)

    monkeypatch.setattr(ingest_module, "plan_row_groups", changed)
    with ExitStack() as stack, pytest.raises(DataError, match="was changed while") as caught:
        ingest(tiny, tmp_path / "out", spark=spark)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_rows_lost_by_the_writer_are_noticed(
    spark: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ingest_module, "rows_of", lambda root, group: list(write_rows(root, group))[1:]
    )
    with pytest.raises(DataError, match="read back 24 of 40 samples"):
        ingest(tiny, tmp_path / "out", spark=spark)
    assert list(tmp_path.iterdir()) == []


def test_a_url_names_the_same_folder(spark: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "by url"
    ingest(tiny, f"file://{out}", spark=spark)
    assert inspect_dataset(out)["samples"] == 40
    with pytest.raises(UsageError, match="not empty"):
        ingest(tiny, out, spark=spark)
    assert [file.name for file in tmp_path.iterdir()] == ["by url"]


def test_without_a_session_one_is_started_loopback_only_and_ended(
    tiny: Path, tmp_path: Path
) -> None:
    """In a process of its own, which has no session yet."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tiny, tmp_path / "out"]
    done = run_command(command, 120, env=os.environ | {"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    listening, left, interrupt = done.stdout.splitlines()
    assert set(listening.split()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert listening
    assert left == "0 children"
    assert interrupt == "handler of SIGINT unchanged: True"


SCRIPT = """\
import signal, sys
from pathlib import Path
import psutil
from paceline.train.data.ingest import ingest

interrupt = signal.getsignal(signal.SIGINT)
me = psutil.Process()
found = set()

def look(done, total):
    for process in [me, *me.children(recursive=True)]:
        try:
            connections = process.net_connections("inet")
        except psutil.Error:
            continue  # a Spark worker that has just ended
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.ip)

ingest(Path(sys.argv[1]), sys.argv[2], progress=look)
print(*sorted(found))
print(len(me.children(recursive=True)), "children")
print("handler of SIGINT unchanged:", signal.getsignal(signal.SIGINT) is interrupt)
"""


@pytest.mark.parametrize("to", ["process", "group", "JVM first"])
def test_a_signal_ends_it_with_one_line_and_nothing_is_left(
    tiny: Path, tmp_path: Path, to: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED)
    ended = run_command([sys.executable, script, to, tiny, tmp_path / "out"], 120)
    assert ended.returncode == ExitCode.TERMINATED
    assert ended.stderr.splitlines()[1:] == ["paceline: ended by SIGTERM"]
    assert list(tmp_path.iterdir()) == [script]


SIGNALLED = """\
import os, signal, sys
from pyspark import SparkContext
from paceline.cli import data, main

ingest = data.ingest

def signalled(*places, progress, **options):
    def report(done, total):
        if sys.argv[1] == "JVM first":
            os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)
        if sys.argv[1] == "group":
            os.killpg(0, signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    return ingest(*places, progress=report, **options)

data.ingest = signalled
os.setsid()
sys.exit(main(["data", "ingest", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job script beside an archive of the package, as a cluster gets it."""
    folder = tmp_path_factory.mktemp("bundle")
    script = folder / "ingest.py"
    script.write_bytes((REPOSITORY / "spark-jobs" / "ingest.py").read_bytes())
    source = Path(paceline.__file__).parent
    with zipfile.ZipFile(folder / "paceline.zip", "w") as archive:
        for file in source.rglob("*.py"):
            archive.write(file, Path("paceline") / file.relative_to(source))
    return script


def spark_submit(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).parent / "spark-submit", "--master", "local[2]",
        "--conf", "spark.driver.bindAddress=127.0.0.1",
        "--conf", "spark.driver.host=127.0.0.1",
        "--conf", "spark.ui.enabled=false",
        script, *arguments,
    ]  # fmt: skip
    variables = {**homes(find_java(), find_spark()), "PYSPARK_PYTHON": sys.executable}
    return run_command(command, 180, env=os.environ | variables)


def test_spark_submit_exits_4_for_a_bad_folder(bundle: Path, tmp_path: Path) -> None:
    """tests/cluster/test_bundle.py ingests a good one by the job of the archives."""
    done = spark_submit(bundle, tmp_path, tmp_path / "out")
    assert done.returncode == 4, done.stderr
    printed = done.stdout + done.stderr  # spark-submit merges the two of a Python script
    assert "paceline: " in printed
    assert "Traceback" not in printed
