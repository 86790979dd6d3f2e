"""The copy of a run directory on S3. Real HDFS: tests/cluster/hadoop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.s3 import S3Server

from paceline.base.errors import EnvironmentLacks, RankFailed, UsageError
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.runner.trials.copies import copied_at_end
from paceline.train.data.location import location_of
from paceline.train.data.remote_folder import make_new, remote_folder


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "run")


def write(files: RunFiles, *names: str) -> None:
    for name in names:
        path = files.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, "utf-8")


def run(files: RunFiles, url: str | None, *names: str, ends: BaseException | None = None) -> None:
    """Write files as a run, which is copied; ends: raised by the run."""
    with copied_at_end(files, url):
        write(files, *names)
        if ends is not None:
            raise ends


def remote(url: str) -> dict[str, bytes | None]:
    place = location_of(url)
    return {path: place.read(path) for path in place.sizes()}


def local(files: RunFiles) -> dict[str, bytes | None]:
    paths = (path for path in files.root.rglob("*") if path.is_file())
    return {str(path.relative_to(files.root)): path.read_bytes() for path in paths}


def test_run_with_a_failed_trial_is_copied_and_its_failure_stays(
    files: RunFiles, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = RankFailed("rank 1 was killed")
    with pytest.raises(RankFailed, match="rank 1 was killed"):
        run(files, url, "manifest.json", "trials/a/ranks/0/steps.jsonl", ends=failure)
    assert remote(url) == local(files)
    assert f"the run is in {files.root} and in {url}" in capsys.readouterr().err


def test_continued_run_replaces_its_copy(files: RunFiles, url: str) -> None:
    run(files, url, "manifest.json", "trials/a/steps.jsonl")
    with copied_at_end(files, None):
        (files.root / "trials/a/steps.jsonl").unlink()
        write(files, "trials/a/steps.parquet")
    assert remote(url) == local(files)
    assert "trials/a/steps.parquet" in remote(url)


def test_interrupted_run_is_copied_when_it_has_been_continued(files: RunFiles, url: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(files, url, "manifest.json", ends=KeyboardInterrupt())
    assert remote(url) == {}
    run(files, None)
    assert remote(url) == local(files)


def test_place_with_files_is_refused_before_the_run(
    files: RunFiles, url: str, server: S3Server, tmp_path: Path
) -> None:
    write(files, "other.json")
    server.upload(files.root, f"runs/{tmp_path.name}")
    with pytest.raises(UsageError, match="expected a new or empty folder"):
        run(files, url, ends=AssertionError("the run has begun"))


def test_place_in_hdfs_is_new_until_it_has_files(hdfs_url: str, files: RunFiles) -> None:
    place = remote_folder(hdfs_url)
    assert place.names() == set(), "it does not exist"
    make_new(hdfs_url)
    assert place.names() == set()
    write(files, "manifest.json", "trials/a/outcome.json")
    place.add(files.root)
    assert place.names() == {"manifest.json", "trials"}
    with pytest.raises(UsageError, match="expected a new or empty folder"):
        make_new(hdfs_url)


def test_place_in_hdfs_that_cannot_be_listed_is_not_taken_for_an_empty_one(hdfs_url: str) -> None:
    with pytest.raises(EnvironmentLacks, match="Permission denied: user=guest"):
        make_new(f"{hdfs_url}/private")


@pytest.mark.parametrize("trial_failed", [False, True])
def test_failed_copy_says_how_to_repeat_it(
    trial_failed: bool,
    files: RunFiles,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(files, "manifest.json")
    write_json(files.copy, {"url": url})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    failure = RankFailed("rank 1 was killed") if trial_failed else None
    with pytest.raises(RankFailed if trial_failed else EnvironmentLacks) as caught:
        run(files, None, ends=failure)
    said = capsys.readouterr().err if trial_failed else str(caught.value)
    assert "access was denied" in said
    assert f"paceline run --resume {files.root}" in said


def test_nothing_is_copied_of_a_run_that_did_not_begin(files: RunFiles, url: str) -> None:
    with pytest.raises(UsageError, match="a fault of the spec"):
        run(files, url, ends=UsageError("a fault of the spec"))
    assert remote(url) == {}
