"""Causes seeded alone and two at a time: is the larger one the main cause?

    python seeded_causes.py --out results/raw/seeded_causes.json [--rounds 2] [--limit-s 1050]

Each case trains the same task with and without disturbances, interleaved: a CPU quota, a process
that copies memory on another core, a process on the same core, a slow reader, a cold page cache, a
slow link between two hosts, a slow rank, too many threads, a thread that holds Python's lock. With
one disturbance its true share of the difference is 1. With two, each is also trained alone: its
true share is that of the time that it costs alone. The undisturbed trials of each case are also
compared with one another: no cause may be named. Needs root for control groups, the disk and the
two hosts (`paceline lab`); cases that are not possible are skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import made_dataset, write_results
from control_groups import Skipped
from paceline.analysis.between_runs.speeds import trial_speed
from paceline.analysis.explain.evidence import ExplainedTrials
from paceline.analysis.explain.explanation import Explanation, explain
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial.reading import load_run
from paceline.measure.records.files import jsonable
from paceline.measure.records.layout import RunFiles
from seeded_cases import CASES, LIMIT_S, Case, Plan

ALLOWED_SHARE_ERROR = 0.2  # of the difference


def main() -> None:
    options = arguments()
    until = time.monotonic() + options.limit_s
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = made_dataset(Path(folder), "tiny", 256, LIMIT_S)
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
    parser.add_argument("--reader-s", type=float, default=0.2, help="more time for each batch")
    parser.add_argument("--limit-s", type=float, default=1050, help="start no case after this time")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--folder", type=Path, help="on the disk for the cold page cache")
    return parser.parse_args()


def one_case(case: Case, plan: Plan, place: Path) -> dict[str, Any]:
    """Run a case: twice as many clean trials as disturbed ones, interleaved."""
    names = list(case.expected)
    runs = {"clean": [], "all": names, "again": []}
    if len(names) > 1:
        runs |= {f"only {name}": [name] for name in names}
    try:
        for repeat in range(plan.options.repeats):
            for folder, on in runs.items():
                case.run(plan, frozenset(on), place / folder.replace(" ", "-"), repeat)
    except (Skipped, PermissionError, FileNotFoundError) as reason:
        return {"case": case.name, "skipped": str(reason)}
    records = {name: load_run(RunFiles(place / name.replace(" ", "-"))) for name in runs}
    sides = {name: ExplainedTrials(name, found) for name, found in records.items()}
    rates = RunRates(
        {
            name: {
                record.trial.repeat: speed
                for record in found
                if (speed := trial_speed(record)) is not None
            }
            for name, found in records.items()
        }
    )
    found, equal = (
        explain(sides["clean"], sides[name], rates.log_ratio("clean", name))
        for name in ("all", "again")
    )
    truth = true_shares(case, sides)
    shares = {
        name: sum(cause.share for cause in found.causes if cause.name in expected)
        for name, expected in case.expected.items()
    }
    largest = max(truth, key=lambda name: truth[name])
    main = found.main_cause
    return {
        "case": case.name,
        "expected": {name: sorted(causes) for name, causes in case.expected.items()},
        "named": {cause.name: cause.share for cause in found.causes},
        "is_right": found.slower == "all"
        and main is not None
        and main.name in case.expected[largest],
        "true_shares": truth,
        "shares": shares,
        "largest_share_error": max(abs(shares[name] - truth[name]) for name in truth),
        "slowdown": found.slower_s / found.faster_s,
        "sum_error": sum_error(found),
        "named_without_disturbance": [cause.name for cause in equal.causes],
        "explanation": jsonable(found.to_json()),
        "equal": jsonable(equal.to_json()),
    }


def true_shares(case: Case, sides: dict[str, ExplainedTrials]) -> dict[str, float]:
    """Return the share of each disturbance in what they cost alone."""
    names = list(case.expected)
    if len(names) == 1:
        return {names[0]: 1.0}
    clean_s = mean_step_s(sides["clean"])
    cost_s = {name: mean_step_s(sides[f"only {name}"]) - clean_s for name in names}
    return {name: seconds / sum(cost_s.values()) for name, seconds in cost_s.items()}


def mean_step_s(side: ExplainedTrials) -> float:
    repeats = side.repeats(without_latest=False).values()
    return sum(each.step_s for each in repeats) / len(repeats)


def sum_error(found: Explanation) -> float:
    """Return the remainder as a share of the difference."""
    return abs(found.part("remainder").difference_s.mean / found.difference_s.mean)


def conclude(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [each for each in found if "skipped" not in each]
    errors = [each["largest_share_error"] for each in done]
    return {
        "cases": len(done),
        "right_cause_first": sum(each["is_right"] for each in done),
        "shares_within_20_percent": sum(error <= ALLOWED_SHARE_ERROR for error in errors),
        "largest_share_error": max(errors, default=None),
        "equal_pairs": len(done),
        "equal_pairs_without_cause": sum(not e["named_without_disturbance"] for e in done),
        "largest_sum_error": max((each["sum_error"] for each in done), default=None),
        "raw": list(found),
    }


def summary(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"{found['case']}: skipped: {found['skipped']}"
    shares, truth = found["shares"], found["true_shares"]
    words = [f"{name} {shares[name]:.2f} (true {truth[name]:.2f})" for name in shares]
    return (
        f"{found['case']}: {'right' if found['is_right'] else 'WRONG'}, {', '.join(words)}, named "
        f"{list(found['named'])}, {found['slowdown']:.2f} times as slow, without disturbance "
        f"{found['named_without_disturbance'] or 'nothing'}"
    )


if __name__ == "__main__":
    main()
