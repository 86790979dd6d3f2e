"""Measure every raw file of the results pages with this version: hours, in as many parts as needed.

    python run_all.py --work FOLDER [--raw ../../docs/results/raw] [--only quickstart allreduce]
        [--minutes 90] [--plan] [--beside-load]

run_all.toml lists the measurements. One whose raw file is of this version is left out, so the same
command goes on after an interruption; runs of experiments in FOLDER are completed, not repeated.
With --minutes, none is started that would probably not end in this time. Nothing else may run on
the machine; if something does, --beside-load measures no trial again for that. Measurements with
lab hosts need root; many_ranks and crossover need SimGrid (apt install python3-simgrid).
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import paceline
from common import write_results
from finished_run import document
from paceline.base.version import __version__
from paceline.measure.records.files import read_json
from paceline.train.data.catalogue import ensure_dataset

HERE = Path(__file__).resolve().parent
RAW = HERE.parents[1] / "docs/results/raw"
LIMIT_FACTOR = 4  # of the estimate, after which a measurement is ended
IMAGES = {"alexnet": 6003, "small": 600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A raw file, and how it is made: by an experiment with options, or by commands.

    An experiment with `runs` runs once for each entry, with its further options, and the raw file
    has `runs` with the same names.
    """

    file: str
    minutes: float
    experiment: str | None = None
    options: tuple[str, ...] = ()
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    show: tuple[str, ...] = ()  # parts of finished_run.py
    search: str | None = None  # of `paceline tune`, in place of a run
    lab: str | None = None  # the options of `paceline lab up`, if the experiment runs on lab hosts
    own_hosts: bool = False  # `paceline lab run` makes the hosts; such a run is not resumed
    commands: tuple[str, ...] = ()


def main() -> None:
    options = arguments()
    until_s = time.monotonic() + 60 * options.minutes
    failed = []
    for declared in measurements():
        each = beside_load(declared) if options.beside_load else declared
        out = options.raw / f"{each.file}.json"
        if (options.only and each.file not in options.only) or is_of_this_version(out):
            continue
        fits = time.monotonic() + 60 * each.minutes <= until_s
        print(f"{each.file}: about {each.minutes:g} min{'' if fits else ', no time'}", flush=True)
        if fits and not options.plan and not measured(each, out, options.raw, options.work):
            failed.append(each.file)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the logs are in {options.work}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=folder, required=True, metavar="FOLDER")
    parser.add_argument("--raw", type=folder, default=RAW, metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", metavar="FILE", choices=[e.file for e in measurements()]
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--plan", action="store_true", help="show what is left; measure nothing")
    parser.add_argument("--beside-load", action="store_true", help="measure no trial again")
    return parser.parse_args()


def folder(text: str) -> Path:
    """Return an absolute path: the commands run in the folder of this program."""
    return Path(text).resolve()


def measurements() -> list[Measurement]:
    found = tomllib.loads((HERE / "run_all.toml").read_text("utf-8"))["measurements"]
    return [Measurement(**each) for each in found]


def beside_load(each: Measurement) -> Measurement:
    """Return an experiment that measures each trial once, also beside other work."""
    if each.experiment is None or each.search is not None:
        return each
    return replace(each, options=(*each.options, "--set", "measure_again=false"))


def is_of_this_version(out: Path) -> bool:
    return out.is_file() and read_json(out).get("versions", {}).get("paceline") == __version__


def measured(each: Measurement, out: Path, raw: Path, work: Path) -> bool:
    """Make a raw file; return whether that was possible."""
    work.mkdir(parents=True, exist_ok=True)
    limit_s = 60 * LIMIT_FACTOR * each.minutes
    with (work / f"{each.file}.log").open("a") as log:
        try:
            if each.experiment is not None:
                measure_experiment(each, out, work, Commands(log, limit_s))
            else:
                places = {"out": out, "raw": raw, "work": work}
                places |= {name: dataset(name, work) for name in IMAGES if uses(each, name)}
                for command in each.commands:
                    words = [word.format(**places) for word in shlex.split(command)]
                    Commands(log, limit_s).run(continued(words))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{each.file}: {error}", file=sys.stderr)
            return False
    return True


def continued(words: list[str]) -> list[str]:
    """Return the command that completes the run of `paceline run`, if an earlier call began it."""
    run_dir = words[-1]  # the value of --out
    has_begun = words[0] == "paceline" and Path(run_dir).exists()
    verb = ["tune", words[2]] if words[1] == "tune" else ["run"]
    return ["paceline", *verb, "--resume", run_dir] if has_begun else words


def uses(each: Measurement, name: str) -> bool:
    return any(f"{{{name}}}" in command for command in each.commands)


@dataclass(frozen=True, slots=True)
class Commands:
    """Runs commands with a limit; their output goes to a log."""

    log: TextIO
    limit_s: float

    def run(self, words: Sequence[str], stdout: TextIO | None = None) -> None:
        """Raise CalledProcessError or TimeoutExpired."""
        program = {"python": [sys.executable], "paceline": [sys.executable, "-m", "paceline.cli"]}
        subprocess.run(
            [*program[words[0]], *words[1:]], cwd=HERE, timeout=self.limit_s, check=True,
            stdin=subprocess.DEVNULL, stdout=stdout or self.log, stderr=self.log,
        )  # fmt: skip


def measure_experiment(each: Measurement, out: Path, work: Path, commands: Commands) -> None:
    """Run an experiment, or go on with it, and write its comparison."""
    found, shown = {}, []
    for name, options in (each.runs or {"": ()}).items():
        run_dir = work / (f"{each.file}_{name}" if name else each.file)
        command, line = experiment_command(each, [*each.options, *options], run_dir)
        commands.run(command)
        found[name] = document(paceline.load(run_dir), each.show)
        shown.append(line)
    several = {"runs": [{"run": name, **run} for name, run in found.items()]}
    results = several if each.runs else found[""]
    write_results(out, each.file, {**results, "command": "; ".join(shown)})


def experiment_command(
    each: Measurement, options: Sequence[str], run_dir: Path
) -> tuple[list[str], str]:
    """Return the command of a run, and how it is shown."""
    verb = ["run"] if each.search is None else ["tune", each.search]
    words = ["paceline", *verb, str(each.experiment), *options, "--out", str(run_dir)]
    command = continued(words)
    shown = shlex.join(words[:-2])
    if each.own_hosts:
        command = ["paceline", "lab", *words[1:]]
        shown = shlex.join(["paceline", "lab", *words[1:-2]])
    if each.lab is not None:
        inside = shlex.join([sys.executable, "-m", "paceline.cli", *command[1:]])
        command = ["paceline", "lab", "up", *each.lab.split(), "--exec", inside]
        shown = shlex.join(["paceline", "lab", "up", *each.lab.split(), "--exec", shown])
    return command, shown


def dataset(name: str, work: Path) -> Path:
    """Return a data set of AlexNet's images, made once."""
    return ensure_dataset("simple-big", images=IMAGES[name], seed=1, cache_dir=work / "data")


if __name__ == "__main__":
    main()
