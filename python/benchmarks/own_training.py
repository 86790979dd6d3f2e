"""Follow the tutorial on an own training, and run its 18 configurations: is each one equivalent?

    python own_training.py --out results/raw/own_training.json

The files of docs/tutorials/own-training.md are saved in a temporary folder, and its commands run
there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import documented_parser, write_results
from paceline.analysis.compare.run import compare_run
from paceline.measure.records.layout import RunFiles

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/own-training.md"
FILE = re.compile(r"Save this as `([^`]+)`.*?\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = "runs/everything"
LIMIT_S = 1800.0


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-tutorial-") as scratch:
        folder = Path(scratch)
        follow(TUTORIAL.read_text("utf-8"), folder)
        comparison = compare_run(RunFiles(folder / RUN))
    write_results(options.out, "own_training", comparison.to_json())


def follow(text: str, folder: Path) -> None:
    """Save the files of the tutorial in a folder, and run its commands there."""
    for name, content in FILE.findall(text):
        (folder / name).write_text(content, "utf-8")
    commands = [*COMMANDS.findall(text), f"paceline run everything.toml --out {RUN}"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", "\n".join(commands)],
        cwd=folder, env={**os.environ, "PATH": programs}, check=True, timeout=LIMIT_S,
        stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip


if __name__ == "__main__":
    main()
