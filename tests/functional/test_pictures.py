"""The dashboards, redrawn from a fabricated run that has everything: no panel stays empty."""

from __future__ import annotations

import shutil

import pytest
from monitoring.pictures.__main__ import BOARDS, main
from monitoring.pictures.board import read_board
from monitoring.pictures.browser import NAMES as BROWSERS
from monitoring.pictures.browser import photograph
from monitoring.pictures.page import Page
from tests.functional.monitored import needs_prometheus
from tests.unit.monitor.recorded import make_recorded_run

from paceline.errors import ExitCode

LAST = "tiny.mpi.mpi.processes.n2r1t1.fp32.r0"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    run = make_recorded_run(folder / "recorded")
    arguments = [str(run.root), "--pages", str(folder / "pages"), "--trial", LAST]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["pictures", *arguments])
        # its handler of SIGTERM is for a process of its own
        patched.setattr("signal.signal", lambda *_: None)
        patched.setattr("tempfile.tempdir", str(folder))
        assert main() == ExitCode.OK
    return folder


@needs_prometheus
@pytest.mark.parametrize("name", ["run", "compare", "cluster"])
def test_every_panel_is_drawn_with_data(folder, name) -> None:
    pages = [path.read_text("utf-8") for path in sorted((folder / "pages").glob(f"{name}-*.html"))]
    panels = [p for row in read_board(BOARDS / f"{name}.json").rows for p in row.panels]
    assert sum(page.count("<section ") for page in pages) == len(panels)
    assert not any('class="none"' in page for page in pages)
    curves = sum(panel.kind in ("timeseries", "stat") for panel in panels)
    assert sum(page.count('data-plot="') for page in pages) == curves


@needs_prometheus
def test_failed_rank_and_trial_start_are_marked(folder) -> None:
    head = (folder / "pages" / "run-1.html").read_text("utf-8")
    assert "Trial start (1)" in head
    assert "Failure (1)" in head


@needs_prometheus
def test_nothing_but_the_pages_is_left(folder) -> None:
    assert {path.name for path in folder.iterdir()} == {"recorded", "pages"}
    assert not (folder / "recorded" / "monitor").exists()


def test_run_directory_that_is_none_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["pictures", str(tmp_path), "--pages", str(tmp_path / "out")])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main() in (ExitCode.ENVIRONMENT, ExitCode.DATA)
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium is installed")
def test_page_becomes_a_picture_of_its_size(tmp_path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    out = tmp_path / "page.png"
    photograph(browser, Page("<body>words</body>", 320, 200), out)
    data = out.read_bytes()
    assert data.startswith(PNG)
    # width and height stand at the beginning of the first chunk, IHDR
    assert [int.from_bytes(data[n : n + 4], "big") for n in (16, 20)] == [320, 200]
