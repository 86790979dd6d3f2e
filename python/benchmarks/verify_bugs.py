"""Bugs of parallel training, their right twins and odd right scripts under `paceline verify`.

    python verify_bugs.py --out FILE.json [--only KIND[:CASE] ...] [--held-out] [--update]
        [--quick]

The scripts are in the folder pairs. What is true of each case is declared in pairs/cases.toml; each
is verified with two ranks, as it is. A bug is found if it gets the declared statement or a heavier
one, and an exit code that is not 0; its cause is right if the first finding has the declared words.
A false alarm is a ✗ or a suspicion of a script that is right.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import write_results

PAIRS = Path(__file__).parent.resolve() / "pairs"
ODD, RESUME = "odd", "resume"  # beginning of the kinds of scripts without a bug, a kind
_RESUME_WITH = ("--resume-with=--resume", "--stop-after=8")
_EQUAL, _NOT_SHOWN, _WRONG = 1, 4, 5  # statements
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script with one bug, or its right twin, and what is true of it.

    expected: statement. cause: regular expression of the first finding.
    """

    kind: str
    bug: str
    fixed: bool
    expected: int
    cause: str
    options: tuple[str, ...]
    held_out: bool

    @property
    def key(self) -> tuple[str, str, bool]:
        """Kind, bug and twin, as in the results."""
        return self.kind.replace("_", " "), self.bug, self.fixed

    @property
    def words(self) -> list[str]:
        """Return the command line, without the program and the folder of the run."""
        options = _RESUME_WITH if self.kind == RESUME else ()
        script = [str(PAIRS / f"{self.kind}.py"), "--bug", self.bug]
        fixed = ["--fixed"] if self.fixed and not self.kind.startswith(ODD) else []
        return [*options, *self.options, *script, *fixed]


def declared() -> Iterator[Case]:
    """Yield each bug, followed by its twin, and each odd script."""
    tables = tomllib.loads((PAIRS / "cases.toml").read_text("utf-8"))
    for kind, cases in tables.items():
        for bug, case in cases.items():
            for fixed in (True,) if kind.startswith(ODD) else (False, True):
                yield Case(
                    kind=kind,
                    bug=bug,
                    fixed=fixed,
                    expected=case["right"] if fixed else case.get("wrong", _WRONG),
                    cause="" if fixed else case["cause"],
                    options=tuple(case.get("options", ())),
                    held_out=case.get("held_out", False),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--only", nargs="+", metavar="KIND[:CASE]")
    parser.add_argument("--held-out", action="store_true", help="only these")
    parser.add_argument(
        "--update",
        action="store_true",
        help="verify only what FILE.json has no result of, or --only",
    )
    parser.add_argument("--quick", action="store_true", help="ranks are forks, without torchrun")
    options = parser.parse_args()
    results: dict[tuple[str, str, bool], dict[str, Any]] = {}
    if options.update and options.out.exists():
        raw = json.loads(options.out.read_text("utf-8"))["raw"]
        results = {(each["kind"], each["bug"], each["fixed"]): each for each in raw}
    cases = list(declared())
    with forked() if options.quick else nullcontext(verified) as verify:
        for case in sorted(cases, key=lambda case: not case.held_out):
            names = {case.kind, f"{case.kind}:{case.bug}"}
            is_chosen = names & set(options.only) if options.only else case.key not in results
            if is_chosen and (case.held_out or not options.held_out):
                results[case.key] = judged(case, verify(case))
                print(_line(results[case.key]), flush=True)
                write(options.out, [results[each.key] for each in cases if each.key in results])


def write(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write the results, and the numbers of all cases, of known and of held-out ones."""
    parts = {
        "all": found,
        "known": [each for each in found if not each["held_out"]],
        "held_out": [each for each in found if each["held_out"]],
    }
    summary = {name: summary_of(part) for name, part in parts.items()}
    write_results(path, "verify_bugs", {**summary, "raw": found})


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a command. code: None if it was stopped."""

    code: int | None
    output: str
    log: str
    seconds: float


def verified(case: Case) -> Ended:
    """Verify a case with two ranks under torchrun, in a folder of its own."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        command = [sys.executable, "-m", "paceline.cli", "verify", "--json", "-q"]
        try:
            ended = subprocess.run(
                [*command, "--out", f"{folder}/run", *case.words],
                capture_output=True,
                check=False,
                cwd=folder,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Ended(None, "", f"stopped after {_LIMIT_S:g} s", _LIMIT_S)
    seconds = round(time.monotonic() - begin, 1)
    return Ended(ended.returncode, ended.stdout, ended.stderr, seconds)


@contextmanager
def forked() -> Iterator[Callable[[Case], Ended]]:
    """Yield the same as `verified`, with ranks that are forks of a process, as tests start them."""
    sys.path.append(str(PAIRS.parents[2]))
    from tests.functional.cli_runs import cli_in  # noqa: PLC0415
    from tests.support.forking import fork_server  # noqa: PLC0415

    def late(*_: object) -> None:
        raise TimeoutError

    def verified_by_forks(case: Case) -> Ended:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="verify-") as folder:
            cli = cli_in(Path(cache), Path(folder), forks)
            signal.alarm(int(_LIMIT_S))
            try:
                options = ("--json", "-q", "--launcher", "local", "--out", f"{folder}/run")
                ended = cli.main("verify", *options, *case.words)
            except TimeoutError:
                return Ended(None, "", f"stopped after {_LIMIT_S:g} s", _LIMIT_S)
            finally:
                signal.alarm(0)
        seconds = round(time.monotonic() - begin, 1)
        return Ended(ended.returncode, ended.stdout, ended.stderr, seconds)

    signal.signal(signal.SIGALRM, late)
    with fork_server() as forks, tempfile.TemporaryDirectory(prefix="cache-") as cache:
        yield verified_by_forks


def judged(case: Case, ended: Ended) -> dict[str, Any]:
    """Compare what a verification shows with what is declared."""
    shown = _shown(ended.output, ended.log)
    is_declared = shown["statement"] == case.expected
    found: dict[str, Any] = dict.fromkeys(("found", "cause_right", "as_declared", "false_alarm"))
    if case.fixed:
        found["as_declared"] = is_declared
        found["false_alarm"] = shown["statement"] == _WRONG or shown["is_suspicious"]
    else:
        is_heavy = (shown["statement"] or 0) >= case.expected
        found["found"] = is_heavy and ended.code not in {0, None}
        found["cause_right"] = found["found"] and bool(
            re.search(case.cause, shown["cause"], re.IGNORECASE)
        )
    return {
        **dict(zip(("kind", "bug", "fixed"), case.key, strict=True)),
        "held_out": case.held_out,
        "expected": case.expected,
        **shown,
        **found,
        "exit_code": ended.code,
        "seconds": ended.seconds,
    }


def _refusal(log: str) -> str:
    """Return why a command has verified nothing, without the places of its files."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("logs:")]
    return " ".join(lines).replace(f"{PAIRS}/", "").rpartition("Error: ")[2][:300]


def _shown(output: str, log: str) -> dict[str, Any]:
    """Return the statement, the first finding and all others, from the command's JSON."""
    if not output.strip():
        return {
            "statement": None, "cause": _refusal(log), "others": [], "step": None,
            "tensor": None, "is_suspicious": False,
        }  # fmt: skip
    document = json.loads(output)
    if "layouts" not in document:  # of --resume-with
        finding = document["finding"]
        statement = {True: _EQUAL, None: _NOT_SHOWN, False: _WRONG}[finding["passed"]]
        first, *others = finding["reasons"]
        return {
            "statement": statement, "cause": first, "others": others, "step": finding["step"],
            "tensor": finding["tensor"], "is_suspicious": False,
        }  # fmt: skip
    [layout] = document["layouts"]
    findings = layout["shown"]["findings"]
    first = findings[0] if findings else {}
    return {
        "statement": layout["shown"]["statement"],
        "cause": first.get("reason", ""),
        "others": [each["reason"] for each in findings[1:]],
        "step": first.get("step"),
        "tensor": first.get("tensor"),
        "is_suspicious": any(each["level"] == "suspicion" for each in findings),
    }


def summary_of(found: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count bugs, twins and odd scripts by what was found."""
    every = list(found)
    bugs = [each for each in every if not each["fixed"]]
    twins = [each for each in every if each["fixed"] and not each["kind"].startswith(ODD)]
    odd = [each for each in every if each["kind"].startswith(ODD)]
    return {
        "bugs": len(bugs),
        "found": sum(each["found"] for each in bugs),
        "causes_right": sum(each["cause_right"] for each in bugs),
        "twins": len(twins),
        "twins_as_declared": sum(each["as_declared"] for each in twins),
        "twins_false_alarms": sum(each["false_alarm"] for each in twins),
        "odd": len(odd),
        "odd_as_declared": sum(each["as_declared"] for each in odd),
        "odd_false_alarms": sum(each["false_alarm"] for each in odd),
    }


def _line(found: Mapping[str, Any]) -> str:
    mark = "ok" if found["as_declared"] or found["cause_right"] else "--"
    name = f"{found['kind']}:{found['bug']}{' fixed' if found['fixed'] else ''}"
    statements = f"{found['statement']} of {found['expected']}"
    return f"{mark} {name:40} {statements} {found['seconds']:5.1f} s  {found['cause']}"


if __name__ == "__main__":
    main()
