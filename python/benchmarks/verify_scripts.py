"""Scripts of others under `paceline verify`, against what is true of them.

    python verify_scripts.py FOLDER --out public_scripts.json [--only NAME ...]

FOLDER has one folder for each script: its files, and setup.json, which was written before the first
run. That has the words after `paceline verify`, the highest statement that is true of the script,
and a pattern for its cause. Rows of earlier runs stay in the file, except those of --only, and each
row keeps what its first run has stated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import documented_parser, write_results
from paceline.base.host.programs import repository_state

_LIMIT_S = 300.0
_NOT_SHOWN = 4
_DATA_PARALLEL = 2  # the lowest statement that allows a ✓
# of this machine and of the copy of a script
_PLACE = re.compile(r" \(host \S+, pid \d+\)|" + re.escape(tempfile.gettempdir()) + r"/verify-\w+/")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    options = parser.parse_args()
    verify_scripts(options.folder, options.only, options.out)


def verify_scripts(folder: Path, only: list[str] | None, out: Path) -> None:
    """Verify the scripts of a folder one after the other; write the file after each."""
    rows = {row["id"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    git = repository_state(Path(__file__).parent) or {"commit": ""}
    for setup in sorted(folder.glob("*/setup.json")):
        if only and setup.parent.name not in only:
            continue
        row = verified_script(setup.parent)
        row["first"] = rows.get(row["id"], {}).get("first", row["stated"])
        row["paceline"] = git["commit"][:7]
        print(json.dumps(row), flush=True)
        rows[row["id"]] = row
        every = [rows[name] for name in sorted(rows)]
        summary = {
            "scripts": len(every),
            "right": sum(each["is_right"] for each in every),
            "right_causes": sum(each["has_right_cause"] for each in every),
            "shown": sum(each["stated"] <= _DATA_PARALLEL for each in every),
        }
        write_results(out, "public_scripts", {**summary, "rows": every})


def verified_script(folder: Path) -> dict[str, Any]:
    """Verify one script in a copy of its folder, and compare with what is true of it."""
    setup = json.loads((folder / "setup.json").read_text())
    with tempfile.TemporaryDirectory(prefix="verify-") as work:
        copy = shutil.copytree(folder, Path(work) / "script")
        command = [sys.executable, "-m", "paceline.cli", "verify", "--json", "-q"]
        started_s = time.monotonic()
        try:
            ended = subprocess.run(
                [*command, "--out", f"{work}/run", *setup["words"]],
                cwd=copy,
                env={**os.environ, **setup["environment"]},
                capture_output=True,
                check=False,
                text=True,
                timeout=_LIMIT_S,
            )
            code, text, message = ended.returncode, ended.stdout, ended.stderr
        except subprocess.TimeoutExpired:
            code, text, message = None, "", f"not ended after {_LIMIT_S:g} s"
    seconds = time.monotonic() - started_s
    text, message = (_PLACE.sub("", each) for each in (text, message))
    if text:
        [layout] = json.loads(text)["layouts"]
        stated, findings = layout["shown"]["statement"], layout["shown"]["findings"]
        found = [each["reason"] for each in findings]
    else:
        stated, found = _NOT_SHOWN, [" ".join(message.split())]
    return {
        "id": folder.name,
        **{key: setup[key] for key in ("repository", "commit", "script", "changes")},
        "true": setup["true"],
        "why": setup["why"],
        "stated": stated,
        "is_right": code is not None and stated == setup["true"],
        "has_right_cause": any(re.search(setup["cause"], each) for each in ["", *found]),
        "is_refused": not text,
        "exit_code": code,
        "seconds": seconds,
        "findings": found,
    }


if __name__ == "__main__":
    main()
