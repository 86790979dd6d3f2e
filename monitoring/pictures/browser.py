"""Pictures of pages, by a Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.host.processes import guarded

if TYPE_CHECKING:
    from monitoring.pictures.page import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
_LIMIT_S = 120.0
# nothing is asked of the network; the page is a file with all that it needs
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=8000",
)


def find_browser() -> str:
    """Its path. Raises EnvironmentLacks where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise EnvironmentLacks(
            f"a browser that draws pages: none of {', '.join(NAMES)} is on PATH (Debian: apt-get "
            "install chromium); with --pages FOLDER alone the pages are written, to be looked at"
        )
    return found


def photograph(browser: str, page: Page, out: Path) -> None:
    """Write `page` as a PNG.

    Raises EnvironmentLacks where the browser fails, TimedOut.
    """
    with TemporaryDirectory(prefix="paceline-pictures-") as name:
        folder = Path(name)
        document, picture = folder / "page.html", folder / "page.png"
        document.write_text(page.html, "utf-8")
        argv = [
            browser,
            *_OPTIONS,
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={page.width_px},{page.height_px}",
            f"--screenshot={picture}",
            document.as_uri(),
        ]
        try:
            done = subprocess.run(
                guarded(argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TimedOut(f"{browser} took more than {_LIMIT_S:.0f} s for {out.name}") from error
        if not picture.exists():
            said = done.stderr.decode("utf-8", "replace").strip()[-500:]
            raise EnvironmentLacks(f"{browser} made no picture, exit {done.returncode}: {said}")
        shutil.copyfile(picture, out)
