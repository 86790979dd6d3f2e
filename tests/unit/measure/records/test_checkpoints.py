"""Files of checkpoints: complete or not, damaged or not, and no more than two."""

import os
import signal
from pathlib import Path

import pytest

from paceline.base.errors import DataError
from paceline.measure.records.documents import CheckpointFolder


def write(folder, steps, ranks=2, only=None):
    for rank in range(ranks) if only is None else only:
        folder.write(steps, rank, ranks, lambda file, r=rank: file.write(b"part %d" % r))


def names(folder):
    return sorted(path.name for path in folder.root.iterdir())


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def test_checkpoint_is_complete_when_every_rank_has_written_its_part(folder):
    write(folder, 5, only=[1])
    assert folder.complete() == []
    write(folder, 5, only=[0])
    (found,) = folder.complete()
    assert (found.steps, found.ranks) == (5, 2)
    assert found.part(1).read_bytes() == b"part 1"


def test_checksum_is_that_of_sha256sum(folder):
    write(folder, 5, ranks=1)
    text = (folder.root / "step-000000005" / "rank-0-of-1.sha256").read_text()
    # printf 'part 0' | sha256sum
    digest = "36b6f0204a800e7b687febe46ef87ebf43b5dc22f5f9741d78342964f9e656e0"
    assert text == f"{digest}  rank-0-of-1.safetensors\n"


def test_writing_returns_the_size_of_the_part(folder):
    size = folder.write(5, 0, 1, lambda file: [file.write(b"part"), file.write(b" 0")])
    assert size == (folder.root / "step-000000005" / "rank-0-of-1.safetensors").stat().st_size == 6


def test_part_is_on_disk_before_it_has_its_name(folder, monkeypatch):
    synced = []
    fsync = os.fsync

    def recorded(descriptor):
        named = sorted(path.name for path in folder.root.rglob("rank-*"))
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, named))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    write(folder, 5, ranks=1)
    part, checksum = "rank-0-of-1.safetensors", "rank-0-of-1.sha256"
    (first, second, *folders) = synced
    assert part in first[0]
    assert first[1] == []
    assert checksum in second[0]
    assert second[1] == [part]
    assert [name for name, _ in folders] == ["step-000000005", "checkpoints"]


def test_two_complete_checkpoints_are_kept_and_unfinished_older_ones_are_not(folder):
    for steps in (1, 2, 4):
        write(folder, steps)
    write(folder, 3, only=[0])
    write(folder, 5, only=[0])  # unfinished, but newer
    folder.prune()
    assert names(folder) == ["step-000000002", "step-000000003", "step-000000004", "step-000000005"]
    write(folder, 5, only=[1])
    folder.prune()
    assert names(folder) == ["step-000000004", "step-000000005"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: part.write_bytes(b"part 2"),
        lambda part: part.unlink(),
        lambda part: part.write_bytes(b""),
        lambda part: part.with_suffix(".sha256").write_bytes(b"\xff\xfe"),
        lambda part: part.with_suffix(".sha256").write_text("0" * 64 + "  other\n"),
    ],
)
def test_damaged_newest_checkpoint_is_reported_and_the_one_before_is_taken(folder, damage):
    write(folder, 1)
    write(folder, 2)
    damage(folder.complete()[0].part(1))
    said = []
    assert folder.newest(said.append).steps == 1
    assert len(said) == 1
    assert "rank-1-of-2" in said[0]
    assert "the checkpoint before it" in said[0]
    assert names(folder) == ["step-000000001"]


def test_check_names_the_damaged_file(folder):
    write(folder, 1)
    (found,) = folder.complete()
    found.part(0).write_bytes(b"other")
    with pytest.raises(DataError, match="rank-0-of-2"):
        found.check()


def test_failed_write_leaves_no_temporary_file_and_no_part(folder):
    def fail(file):
        file.write(b"a")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        folder.write(3, 0, 1, fail)
    assert folder.complete() == []
    assert list((folder.root / "step-000000003").iterdir()) == []


def test_clean_removes_what_killed_writers_left(folder):
    write(folder, 1)
    write(folder, 2, only=[0])
    write(folder, 3)
    kept = folder.complete()[1]
    (kept.folder / ".rank-0-of-2.safetensors.part").write_bytes(b"half")
    (folder.root / ".deleted-step-000000000").mkdir()
    folder.clean(kept)
    assert names(folder) == ["step-000000001"]
    assert len(list(kept.folder.iterdir())) == 4


def test_names_of_strangers_are_ignored(folder):
    write(folder, 1)
    for name in ("step-1", "step-000000002", "step-abc", "other"):
        (folder.root / name).mkdir()
    (folder.root / "step-000000002" / "rank-7-of-1.sha256").write_text("")
    assert [c.steps for c in folder.complete()] == [1]


def test_writer_killed_at_any_moment_leaves_a_checkpoint_that_can_be_loaded(folder):
    """A child writes checkpoints, and is killed after a varying number of bytes."""
    write(folder, 0, ranks=1)
    for kill_after in range(0, 60, 7):
        child = os.fork()
        if child == 0:  # pragma: no cover
            seen = 0

            def content(file, limit=kill_after):
                nonlocal seen
                for _ in range(8):
                    file.write(b"x" * 4)
                    seen += 4
                    if seen > limit:
                        os.kill(os.getpid(), signal.SIGKILL)

            for steps in range(1, 100):
                folder.write(steps, 0, 1, content)
                folder.prune()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found = folder.newest(pytest.fail)
        assert found is not None
        folder.clean(found)
        assert not list(folder.root.rglob("*.part"))
