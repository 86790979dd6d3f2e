"""Causes seeded one at a time: does `paceline explain` name the right one first, with its share?

    python seeded_causes.py --out results/raw/seeded_causes.json [--rounds 2] [--limit-s 1050]

Each case trains the same task with and without one disturbance, interleaved: a CPU quota, a process
that copies memory on another core, a process on the same core, a slow reader, a cold page cache, a
slow link between two hosts, a slow rank, too many threads, a thread that holds Python's lock. The
difference between the two is the disturbance, so its true share is 1. The undisturbed trials of
each case are also compared with one another: no cause may be named. Needs root for control groups,
the disk and the two hosts (`paceline lab`); cases that are not possible are skipped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import write_results
from control_groups import Skipped
from paceline.analysis.explain.difference import part_noise
from paceline.analysis.explain.explanation import ExplainedTrials, Explanation, explain
from paceline.analysis.trial.reading import load_run
from paceline.analysis.trial_analysis import analyse_trial
from paceline.records.files import jsonable
from paceline.records.layout import RunFiles
from seeded_cases import CASES, LIMIT_S, Case, Plan

ALLOWED_SHARE_ERROR = 0.15


def main() -> None:
    options = arguments()
    until = time.monotonic() + options.limit_s
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = synthesised(Path(folder))
        for number in range(options.rounds):
            plan = Plan(options=options, data=data, strength=number / max(1, options.rounds - 1))
            for case in CASES:
                if case.name in (options.only or [case.name]):
                    if time.monotonic() > until:
                        found.append({"case": case.name, "skipped": "--limit-s was reached"})
                        continue
                    place = Path(folder, f"{number}-{case.name.replace(' ', '-')}")
                    place.mkdir()
                    found.append({"round": number, **one_case(case, plan, place)})
                    print(summary(found[-1]), file=sys.stderr)
    write_results(options.out, "seeded_causes", conclude(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--rounds", type=int, default=2, help="strengths of each disturbance")
    parser.add_argument("--repeats", type=int, default=3, help="disturbed trials of a case")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=1050, help="start no case after this time")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--folder", type=Path, help="on the disk for the cold page cache")
    return parser.parse_args()


def synthesised(folder: Path) -> Path:
    images, dataset = folder / "images", folder / "data"
    for words in (
        ["synth", images, "--preset", "tiny", "--images", 256],
        ["ingest", images, dataset],
    ):
        subprocess.run(
            [sys.executable, "-m", "paceline.cli", "data", *map(str, words)],
            check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S,
        )  # fmt: skip
    return dataset


def one_case(case: Case, plan: Plan, place: Path) -> dict[str, Any]:
    """Run a case: twice as many clean trials as disturbed ones, interleaved."""
    repeats = plan.options.repeats
    try:
        for repeat in range(repeats):
            case.run(plan, "clean", place / "clean", repeat)
            case.run(plan, "seeded", place / "seeded", repeat)
            case.run(plan, "clean", place / "again", repeat)
    except (Skipped, PermissionError, FileNotFoundError) as reason:
        return {"case": case.name, "skipped": str(reason)}
    records = {name: load_run(RunFiles(place / name)) for name in ("clean", "seeded", "again")}
    sides = {name: ExplainedTrials(name, found) for name, found in records.items()}
    analyses = {
        name: [analyse_trial(record, None) for record in found] for name, found in records.items()
    }
    noise = part_noise(analyses)
    seeded = explain(sides["clean"], sides["seeded"], noise)
    equal = explain(sides["clean"], sides["again"], noise)
    first = seeded.causes[0] if seeded.causes else None
    is_right = first is not None and seeded.slower == "seeded" and first.name in case.expected
    return {
        "case": case.name,
        "expected": sorted(case.expected),
        "named": [cause.name for cause in seeded.causes],
        "is_right": is_right,
        "share": None if first is None else first.share,
        "slowdown": seeded.difference.slower_s / seeded.difference.faster_s,
        "sum_error": sum_error(seeded),
        "named_without_disturbance": [cause.name for cause in equal.causes],
        "explanation": jsonable(seeded.to_json()),
        "equal": jsonable(equal.to_json()),
    }


def sum_error(found: Explanation) -> float:
    """Return the remainder as a share of the difference."""
    remainder = found.difference.part("remainder").difference_s.mean
    return abs(remainder / found.difference.difference_s.mean)


def conclude(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [each for each in found if "skipped" not in each]
    errors = [abs(each["share"] - 1) for each in done if each["is_right"]]
    return {
        "cases": len(done),
        "right_cause_first": sum(each["is_right"] for each in done),
        "share_within_15_percent": sum(error <= ALLOWED_SHARE_ERROR for error in errors),
        "largest_share_error": max(errors, default=None),
        "equal_pairs": len(done),
        "equal_pairs_without_cause": sum(not e["named_without_disturbance"] for e in done),
        "largest_sum_error": max((each["sum_error"] for each in done), default=None),
        "raw": list(found),
    }


def summary(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"{found['case']}: skipped: {found['skipped']}"
    share = "-" if found["share"] is None else f"{found['share']:.2f}"
    return (
        f"{found['case']}: {'right' if found['is_right'] else 'WRONG'}, named {found['named']}, "
        f"share {share}, {found['slowdown']:.2f} times as slow, without disturbance "
        f"{found['named_without_disturbance'] or 'nothing'}"
    )


if __name__ == "__main__":
    main()
