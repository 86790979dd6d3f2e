"""Known bugs of parallel training and their corrected twins under `paceline verify`.

    python verify_bugs.py --out results/raw/verify_bugs.json [--seeds 5] [--only BUG ...]

Every bug of parallel_bugs.py is verified with two ranks for each seed, and so is its twin. A bug
that passes is missed; a twin that does not pass is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import write_results
from parallel_bugs import BUGS

SCRIPT = Path(__file__).with_name("parallel_bugs.py").resolve()
STEPS = 4
_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="BUG")
    options = parser.parse_args()
    found = [
        result(bug, seed, fixed=fixed)
        for bug in options.only or BUGS
        for seed in range(1, options.seeds + 1)
        for fixed in (False, True)
    ]
    wrong = [each for each in found if not each["fixed"]]
    twins = [each for each in found if each["fixed"]]
    summary = {
        "bugs": len(wrong),
        "found": sum(each["passed"] is False for each in wrong),
        "twins": len(twins),
        "twins_passed": sum(each["passed"] is True for each in twins),
    }
    print(summary)
    write_results(options.out, "verify_bugs", {**summary, "raw": found})


def result(bug: str, seed: int, *, fixed: bool) -> dict[str, Any]:
    """Verify one bug or its twin with one seed."""
    words = [sys.executable, "-m", "paceline.cli", "verify", "--json", "-q", "--steps", STEPS]
    script = [SCRIPT, "--bug", bug, "--seed", seed, *(["--fixed"] if fixed else [])]
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        ended = subprocess.run(
            [str(word) for word in (*words, "--out", f"{folder}/run", *script)],
            capture_output=True,
            check=False,
            text=True,
            timeout=_LIMIT_S,
        )
    [layout] = json.loads(ended.stdout)["layouts"]
    finding = layout["finding"]
    print(bug, "fixed" if fixed else "wrong", seed, finding["passed"], finding["reason"])
    return {"bug": bug, "seed": seed, "fixed": fixed, "exit_code": ended.returncode, **finding}


if __name__ == "__main__":
    main()
