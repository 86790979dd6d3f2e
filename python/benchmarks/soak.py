"""Repeat a soak test, and keep what it recorded.

    python soak.py random_kills --out results/raw/random_kills.json [--count 100]
    python soak.py many_trials --out results/raw/many_trials.json [--trials 200]
    python soak.py hostile_input --out results/raw/hostile_input.json
    python soak.py fuzz --out results/raw/fuzz.json [--count 670] [--minutes 120]

checkpoint_kills always makes 200 kills, hostile_input all cases of tests/support/hostile.py. 670
are the episodes of the fuzz for each number of ranks, about 20,000 steps.
A repetition that fails ends this program without results.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import documented_parser, write_results
from paceline.measure.records.files import read_json, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 4 * 3600.0


def random_kills(folder: Path) -> dict[str, Any]:
    return {"kills": list(read_jsonl(folder / "random_kills.jsonl"))}


def shared_backend_kills(folder: Path) -> dict[str, Any]:
    rows = list(read_jsonl(folder / "shared_backend_kills.jsonl"))
    noticed_s = [seconds for row in rows for seconds in row["noticed_s"]]
    return {
        "kills": len(rows),
        "longest_s": max(noticed_s),
        "median_s": statistics.median(noticed_s),
        "raw": rows,
    }


def hostile_input(folder: Path) -> dict[str, Any]:
    """Return a row for each kind of hostile input, and one for each subject."""
    rows = list(read_jsonl(folder / "hostile_input.jsonl"))
    kinds = [_summary(rows, subject=s, kind=k) for s, k in dict.fromkeys(map(_kind, rows))]
    subjects = [_summary(rows, subject=name) for name in dict.fromkeys(r["subject"] for r in rows)]
    return {"subjects": subjects, "kinds": kinds}


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["subject"], row["kind"]


def _summary(rows: list[dict[str, Any]], **which: str) -> dict[str, Any]:
    """Return how many cases and commands there were, and how the commands ended."""
    own = [row for row in rows if which.items() <= row.items()]
    codes = Counter(code for row in own for code in row["codes"])
    return {
        **which,
        "kinds": len({row["kind"] for row in own}),
        "cases": len({(row["kind"], row["seed"]) for row in own}),
        "commands": codes.total(),
        "exit_codes": {str(code): codes[code] for code in sorted(codes)},
        "longest_s": max((each for row in own for each in row["seconds"]), default=None),
        "faults": sum(len(row["faults"]) for row in own),
    }


def only_file(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of the only file with this name below a folder."""
    [file] = folder.rglob(name)
    return read_json(file)


# By the name of a test: what it left in pytest's temporary folder.
RECORDED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "random_kills": random_kills,
    "shared_backend_kills": shared_backend_kills,
    "checkpoint_kills": lambda folder: only_file(folder, "kills.json"),
    "hostile_input": hostile_input,
    "fuzz": lambda folder: only_file(folder, "fuzz.json"),
    "many_trials": lambda folder: only_file(folder, "many_trials.json"),
}

FILES = {"hostile_input": "functional/test_hostile_*.py"}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("test", choices=RECORDED)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100, help="repetitions under each launcher")
    parser.add_argument("--trials", type=int, default=200, help="of many_trials")
    parser.add_argument("--minutes", type=float, default=120.0, help="of fuzz, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as scratch:
        folder = Path(scratch, "pytest")
        command = [
            sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "soak",
            "-c", ROOT / "python/pyproject.toml", "--rootdir", ROOT, "--basetemp", folder,
            "--soak-count", options.count, "--soak-trials", options.trials,
            "--soak-minutes", options.minutes,
            *(ROOT / "tests").glob(FILES.get(options.test, f"*/test_{options.test}.py")),
        ]  # fmt: skip
        subprocess.run(
            [str(word) for word in command],
            cwd=ROOT, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip
        write_results(options.out, options.test, RECORDED[options.test](folder))


if __name__ == "__main__":
    main()
