"""Working folders of `paceline verify --resume-with`."""

from __future__ import annotations

from paceline.runner.trials import verify_resume


def test_folders_are_copies_without_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_resume, "_LARGE", 100)
    monkeypatch.setattr(verify_resume, "_MANY", 3)
    source = tmp_path / "source"
    run = source / "runs/one"
    for folder in (run, source / "images", source / ".git", source / "lib/__pycache__"):
        folder.mkdir(parents=True)
    for number in range(4):
        (source / f"images/{number}").touch()
    (source / "large.bin").write_bytes(bytes(200))
    (source / "ckpt.pt").write_text("old")
    (source / "lib/module.py").write_text("x = 1")
    with verify_resume._folders(run, source) as (first, second):
        for folder in (first, second):
            names = sorted(each.name for each in folder.iterdir())
            assert names == [".git", "ckpt.pt", "images", "large.bin", "lib"]
            assert {n for n in names if (folder / n).is_symlink()} == {
                ".git", "images", "large.bin",
            }  # fmt: skip
            assert [each.name for each in (folder / "lib").iterdir()] == ["module.py"]
        (first / "ckpt.pt").write_text("new")
        assert (second / "ckpt.pt").read_text() == (source / "ckpt.pt").read_text() == "old"
    assert not (run / "work").exists()
