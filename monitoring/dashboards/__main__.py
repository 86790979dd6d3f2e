"""`python -m monitoring.dashboards`: write the JSON of the dashboards.

With --check, only report whether the files are up to date (exit status 1: no).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monitoring.dashboards.cluster import CLUSTER
from monitoring.dashboards.compare import COMPARE
from monitoring.dashboards.run import RUN

FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def documents() -> dict[str, str]:
    """Return the text of every dashboard, by file name."""
    return {f"{page.title.lower()}.json": page.to_json() for page in (RUN, COMPARE, CLUSTER)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m monitoring.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    stale = [
        name
        for name, text in documents().items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text("utf-8") != text
    ]
    if check:
        for name in stale:
            print(f"{FOLDER / name}: not up to date: run python -m monitoring.dashboards")
        return 1 if stale else 0
    for name, text in documents().items():
        (FOLDER / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
