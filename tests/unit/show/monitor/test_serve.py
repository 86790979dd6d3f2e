"""A session's beginning and end, with programs that only behave like Prometheus."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import wait_for
from tests.unit.show.monitor.recorded import SEQUENTIAL, make_recorded_run

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.measure.records.layout import RunFiles
from paceline.show.monitor import serve

RUNS = """
import signal, time
{first}
time.sleep(600)
"""


def monitor(run: RunFiles, say) -> None:
    serve.monitor(run, say, listen="127.0.0.1:1", grafana_listen="127.0.0.1:2")


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def run(tmp_path, monkeypatch):
    program(tmp_path / "bin", "promtool", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return make_recorded_run(tmp_path / "run", (SEQUENTIAL,))


def interrupt_when(said: list[str], word: str) -> threading.Thread:
    """Signal this process once the session has said `word`.

    If it never does, the session still gets its signal, and the error of the thread fails the test.
    """

    def wait() -> None:
        try:
            wait_for(lambda: any(word in text for text in said), 30, f"the word {word!r}")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_interrupt_ends_the_session_and_its_program(run, tmp_path, monkeypatch, first) -> None:
    """A program that ignores the request to end is killed."""
    if first:
        monkeypatch.setattr(serve, "_END_S", 0.5)
    program(tmp_path / "bin", "prometheus", RUNS.format(first=first))
    known = set(children())
    said: list[str] = []
    thread = interrupt_when(said, "stop with")
    monitor(run, said.append)
    thread.join(timeout=30)
    assert set(children()) <= known


def test_program_that_does_not_start_is_quoted(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "import sys\nsys.exit('bad storage')")
    with pytest.raises(EnvironmentLacks, match=r"(?s)exit status 1.*bad storage"):
        monitor(run, lambda _text: None)


def test_what_an_earlier_session_left_is_cleared(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "import sys\nsys.exit(1)")
    old = run.monitor / "data" / "block"
    old.mkdir(parents=True)
    with pytest.raises(EnvironmentLacks):
        monitor(run, lambda _text: None)
    assert not old.exists()
    assert (run.monitor / "rules" / "alerts.yml").exists()


def test_folder_that_is_no_run_is_refused_and_left_alone(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"manifest\.json or trials/"):
        monitor(RunFiles(tmp_path), lambda _text: None)
    assert list(tmp_path.iterdir()) == []


def test_missing_prometheus_is_told_before_anything_is_written(run) -> None:
    with pytest.raises(EnvironmentLacks, match="prometheus: not found"):
        monitor(run, lambda _text: None)
    assert not run.monitor.exists()


def test_monitor_folder_that_cannot_be_made_is_told(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "")
    run.monitor.write_text("a file in its place")
    with pytest.raises(EnvironmentLacks, match="a folder that can be written"):
        monitor(run, lambda _text: None)


def test_promtool_that_refuses_is_quoted(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "")
    refuses = "import sys\nprint('no space left', file=sys.stderr)\nsys.exit(1)"
    program(tmp_path / "bin", "promtool", refuses)
    with pytest.raises(EnvironmentLacks, match="no space left"):
        monitor(run, lambda _text: None)
    assert not (run.monitor / "traces.om").exists()


def test_promtool_that_hangs_is_given_up(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(serve, "_IMPORT_LIMIT_S", 0.5)
    program(tmp_path / "bin", "prometheus", "")
    program(tmp_path / "bin", "promtool", "import time\ntime.sleep(60)")
    with pytest.raises(TimedOut, match="did not import"):
        monitor(run, lambda _text: None)


@pytest.mark.parametrize("address", ["9090", "127.0.0.1:", ":9090", "127.0.0.1:99999"])
def test_address_is_checked(run, address) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        serve.monitor(run, lambda _text: None, listen=address, grafana_listen="127.0.0.1:2")
