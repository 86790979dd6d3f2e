"""`python -m monitoring.pictures RUN_DIR --out FOLDER`: the dashboards' panels, drawn from a run.

Prometheus, promtool and Chromium are looked for on PATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from monitoring.pictures.board import read_board
from monitoring.pictures.browser import find_browser, photograph
from monitoring.pictures.moments import windows
from monitoring.pictures.page import pages
from monitoring.pictures.source import imported

from paceline.errors import ExitCode, PacelineError
from paceline.records.layout import RunFiles

BOARDS = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m monitoring.pictures", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to put the pictures")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="where to put the pages")
    parser.add_argument("--trial", metavar="ID", help="for Run (default: the one with most ranks)")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.pages is None:
        parser.error("expected --out FOLDER, --pages FOLDER or both")
    # an end by SIGTERM, too, ends Prometheus and removes what it stored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        draw(RunFiles(arguments.run.resolve()), arguments.out, arguments.pages, arguments.trial)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return 0


def draw(run: RunFiles, out: Path | None, pages_out: Path | None, trial_id: str | None) -> None:
    """Write `NAME-NUMBER.png` and `.html` for each dashboard. Raises PacelineError, OSError."""
    browser = None if out is None else find_browser()
    for folder in filter(None, (out, pages_out)):
        folder.mkdir(parents=True, exist_ok=True)
    with imported(run) as source:
        for name, window in windows(run, source.runs()[0], trial_id).items():
            board = read_board(BOARDS / f"{name}.json")
            for number, page in enumerate(pages(source, board, window), start=1):
                stem = f"{name}-{number}"
                if pages_out is not None:
                    (pages_out / f"{stem}.html").write_text(page.html, "utf-8")
                if browser is not None and out is not None:
                    photograph(browser, page, out / f"dashboard-{stem}.png")
                    print(f"{out / f'dashboard-{stem}.png'}")


if __name__ == "__main__":
    sys.exit(main())
