"""The folder in which a sampler and those who want something watched meet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.errors import EnvironmentLacks
from paceline.records.files import write_json
from paceline.telemetry.process_ids import Peer, ProcessId
from paceline.telemetry.runtime import Runtime, SamplerState, put, runtime_of


def made(folder: Path, mode: int = 0o700) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    return folder


def test_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    chosen = tmp_path / "deep" / "down"
    runtime = runtime_of("host-1", {"PACELINE_RUNTIME_DIR": str(chosen)})
    assert runtime.root == chosen / "host-1"
    for folder in (chosen, runtime.root, runtime.watches, runtime.accounts):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_chosen_folder_goes_before_the_sessions_and_that_before_the_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    session = made(tmp_path / "session")
    both = {"PACELINE_RUNTIME_DIR": str(tmp_path / "chosen"), "XDG_RUNTIME_DIR": str(session)}
    assert runtime_of("h", both).root == tmp_path / "chosen" / "h"
    assert runtime_of("h", {"XDG_RUNTIME_DIR": str(session)}).root == session / "paceline" / "h"
    temporary = tmp_path / f"paceline-{os.geteuid()}" / "h"
    assert runtime_of("h", {}).root == temporary
    assert runtime_of("h", {"XDG_RUNTIME_DIR": str(tmp_path / "none")}).root == temporary


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_session_folder_of_another_user_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    session = made(tmp_path / "session")
    os.chown(session, 12345, 12345)
    assert runtime_of("h", {"XDG_RUNTIME_DIR": str(session)}).root.parent.parent == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("inner", [False, True])
def test_folder_of_another_user_is_refused(tmp_path: Path, inner: bool) -> None:
    base = made(tmp_path / "base")
    os.chown(made(base / "h") if inner else base, 12345, 12345)
    with pytest.raises(EnvironmentLacks, match=r"belongs to user 12345; .*PACELINE_RUNTIME_DIR"):
        runtime_of("h", {"PACELINE_RUNTIME_DIR": str(base)})


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    base = made(tmp_path / "base", mode)
    with pytest.raises(EnvironmentLacks, match=f"mode {mode:o}"):
        runtime_of("h", {"PACELINE_RUNTIME_DIR": str(base)})


def test_link_or_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made(tmp_path / "elsewhere"))
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(EnvironmentLacks, match="runtime directory"):
            runtime_of("h", {"PACELINE_RUNTIME_DIR": str(tmp_path / name)})


@pytest.mark.parametrize("host", ["../up", "..", "a/b", "", "."])
def test_host_name_stays_within_the_folder(tmp_path: Path, host: str) -> None:
    base = tmp_path / "base"
    runtime = runtime_of(host or "/", {"PACELINE_RUNTIME_DIR": str(base)})
    assert runtime.root.resolve().parent == base.resolve()


def test_one_alone_has_the_lock(tmp_path: Path) -> None:
    runtime = runtime_of("h", {"PACELINE_RUNTIME_DIR": str(tmp_path / "r")})
    assert not runtime.is_locked()
    lock = runtime.take_lock()
    assert lock is not None
    assert runtime.is_locked()
    assert runtime.take_lock(limit_s=0.05) is None
    os.close(lock)
    assert not runtime.is_locked()


def test_state_of_a_dead_sampler_is_known_but_not_believed(tmp_path: Path) -> None:
    runtime = runtime_of("h", {"PACELINE_RUNTIME_DIR": str(tmp_path / "r")})
    assert runtime.last_state() is None
    itself = ProcessId.of(os.getpid())
    assert itself is not None
    dead = SamplerState(process=ProcessId(itself.pid, itself.start_ticks + 1), port=5)
    put(runtime.sampler, dead)
    assert (runtime.last_state(), runtime.state()) == (dead, None)
    alive = SamplerState(process=itself, watches=["a"])
    put(runtime.sampler, alive)
    assert runtime.state() == alive
    runtime.sampler.write_text("{")
    assert runtime.last_state() is None


def test_document_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    put(path, {"a": 1})
    put(path, ProcessId(1, 2))
    assert json.loads(path.read_text()) == {"pid": 1, "start_ticks": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_process_is_known_by_its_start_too() -> None:
    itself = ProcessId.of(os.getpid())
    assert itself is not None
    assert itself.is_alive()
    assert not ProcessId(itself.pid, itself.start_ticks - 1).is_alive()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_end_of_a_process_is_noticed(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    if not has_pidfd:

        def refuse(_pid: int, _flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the test closes its end
        os._exit(0)
    os.close(read_end)
    try:
        process = ProcessId.of(child)
        assert process is not None
        with Peer(process) as peer:
            assert not peer.wait(0.01)
            os.close(write_end)
            assert peer.wait(20)
    finally:
        os.waitpid(child, 0)
    with Peer(process) as gone:
        assert gone.wait(0)


def test_state_file_of_the_sampler_is_read_as_written(runtime: Runtime) -> None:
    itself = ProcessId.of(os.getpid())
    assert itself is not None
    write_json(
        runtime.sampler,
        {"process": {"pid": itself.pid, "start_ticks": itself.start_ticks}, "watches": ["x@1.0"]},
    )
    assert runtime.state() == SamplerState(process=itself, watches=["x@1.0"])
    runtime.sampler.unlink()
