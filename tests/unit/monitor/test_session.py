"""A session's beginning and end, with programs that only behave like Prometheus."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.unit.monitor.recorded import SEQUENTIAL, make_recorded_run

from paceline.errors import EnvironmentLacks, UsageError
from paceline.monitor import children as children_module
from paceline.monitor.prometheus import Address
from paceline.monitor.session import MonitorSettings, monitor
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from pathlib import Path

READY = """
import http.server, signal, sys
{first}
[listen] = [a.split("=")[1] for a in sys.argv if a.startswith("--web.listen-address=")]
host, port = listen.rsplit(":", 1)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""
SETTINGS = MonitorSettings(listen=Address("127.0.0.1", 0), grafana_listen=None, backfill=False)


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def run(tmp_path, monkeypatch):
    program(tmp_path / "bin", "promtool", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return make_recorded_run(tmp_path / "run", (SEQUENTIAL,))


def interrupt_when(said: list[str], word: str, how: signal.Signals) -> threading.Thread:
    """Signal this process once the session has said `word`."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not any(word in text for text in said):
            time.sleep(0.05)
        os.kill(os.getpid(), how)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_session_and_its_program_and_handlers_are_as_before(
    run, tmp_path, how
) -> None:
    program(tmp_path / "bin", "prometheus", READY.format(first=""))
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    known = set(children())
    said: list[str] = []
    thread = interrupt_when(said, "stop with", how)
    monitor(run, SETTINGS, said.append)
    thread.join(timeout=30)
    assert set(children()) <= known
    assert {n: signal.getsignal(n) for n in before} == before


def test_program_that_ignores_the_request_to_end_is_killed(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(children_module, "_END_S", 0.5)
    deaf = READY.format(first="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    program(tmp_path / "bin", "prometheus", deaf)
    known = set(children())
    said: list[str] = []
    thread = interrupt_when(said, "stop with", signal.SIGTERM)
    monitor(run, SETTINGS, said.append)
    thread.join(timeout=30)
    assert set(children()) <= known


def test_program_that_does_not_start_is_quoted(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "import sys\nsys.exit('bad storage')")
    with pytest.raises(EnvironmentLacks, match=r"(?s)exit status 1.*bad storage"):
        monitor(run, SETTINGS, lambda _text: None)


def test_what_an_earlier_session_left_is_cleared(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "import sys\nsys.exit(1)")
    old = run.monitor / "data" / "block"
    old.mkdir(parents=True)
    with pytest.raises(EnvironmentLacks):
        monitor(run, SETTINGS, lambda _text: None)
    assert not old.exists()
    assert (run.monitor / "rules" / "alerts.yml").exists()


def test_folder_that_is_no_run_is_refused_and_left_alone(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"manifest\.json or trials/"):
        monitor(RunFiles(tmp_path), SETTINGS, lambda _text: None)
    assert list(tmp_path.iterdir()) == []


def test_missing_prometheus_is_told_before_anything_is_written(run) -> None:
    with pytest.raises(EnvironmentLacks, match="prometheus: not found"):
        monitor(run, SETTINGS, lambda _text: None)
    assert not run.monitor.exists()


def test_monitor_folder_that_cannot_be_made_is_told(run, tmp_path) -> None:
    program(tmp_path / "bin", "prometheus", "")
    run.monitor.write_text("a file in its place")
    with pytest.raises(EnvironmentLacks, match="a folder that can be written"):
        monitor(run, SETTINGS, lambda _text: None)
