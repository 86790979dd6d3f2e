"""Every command on run directories, data sets and specs that no careful user gives.

Each ends with a documented exit code and one message, without a stack trace; it leaves nothing
behind, and changes nothing of the user's. `-m soak` runs all cases of tests/support/hostile.py, and
writes a line for each into hostile_input.jsonl of pytest's --basetemp.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from tests.functional.cli_runs import Cli, cli_in
from tests.support.hostile import (
    DATA_DAMAGE,
    LIMIT_S,
    LONGEST_MESSAGE,
    RUN,
    RUN_DAMAGE,
    SPEC_DAMAGE,
    Words,
    hostile_run,
    hostile_spec,
    permissions_of_a_user,
    record,
)
from tests.unit.train.data.conftest import make_dataset

from paceline.base.errors import ExitCode

pytestmark = pytest.mark.functional

SEEDS = 2  # of each kind of damage, in the whole form
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ENDED = signal.SIGUSR1  # a command that takes too long ends as a user would end it
# Files that a command may write into a run directory.
_WRITES = re.compile(r"report\.html|\.lock|comparison\.json|export(/.*)?|monitor(/.*)?|targets")

# RUN, GOOD and SPEC stand for a hostile run directory, an undamaged one, and a hostile spec.
RUN_COMMANDS: tuple[Words, ...] = (
    ("compare", "RUN"),
    ("compare", "RUN", "--json"),
    ("compare", "RUN", "--markdown", "--sort", "memory"),
    ("compare", "RUN", "GOOD", "--fail-slower", "3%"),
    ("compare", "GOOD", "RUN", "--json"),
    ("compare", "RUN", "--save-reference", "reference.json"),
    ("explain", "RUN"),
    ("explain", "RUN", "GOOD", "--json"),
    ("report", "RUN"),
    ("profile", "RUN"),
    ("profile", "RUN", "--json"),
    ("predict", "RUN"),
    ("predict", "RUN", "--json"),
    ("export", "RUN", "--to", "csv"),
    ("export", "RUN", "--to", "parquet"),
    ("export", "RUN", "--to", "openmetrics"),
    ("export", "RUN", "--to", "perfetto"),
    ("export", "RUN", "--to", "onnx"),
    ("watch", "RUN", "--once"),
    ("stacks", "RUN"),
    ("monitor", "RUN"),
    ("run", "--resume", "RUN", "--dry-run"),
    ("run", "--resume", "RUN", "--dry-run", "--trust-run"),
    ("tune", "local", "--resume", "RUN"),
)
SPEC_COMMANDS: tuple[Words, ...] = (
    ("plan", "SPEC"),
    ("plan", "SPEC", "--json", "--commands"),
    ("run", "SPEC", "--dry-run"),
    ("render", "slurm", "SPEC", "-o", "slurm"),
    ("render", "kubernetes", "SPEC", "-o", "kubernetes"),
)

DATA_COMMANDS: tuple[Words, ...] = (
    ("data", "inspect", "DATA"),
    ("data", "inspect", "DATA", "--json"),
    ("data", "register", "DATA", "--manifest-dir", "registered"),
)


@dataclass(frozen=True)
class Ended:
    """The end of a command. faults: broken promises, in words."""

    words: Words
    code: int
    seconds: float
    faults: tuple[str, ...]


def contents(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what would change if a file below a folder were written, by its path."""
    found = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            status = path.lstat()
            is_folder = stat.S_ISDIR(status.st_mode)
            changes = () if is_folder else (status.st_ino, status.st_size, status.st_mtime_ns)
            found[str(path.relative_to(folder))] = (status.st_mode, *changes)
    return found


@contextlib.contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """Ask the main thread to end after a time, also while it waits for a pipe."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.signal(_ENDED, lambda *_: None)  # where it comes a moment too late
    timer = threading.Timer(limit_s, signal.pthread_kill, (main_thread, _ENDED))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def own_temporary(cli: Cli) -> Iterator[None]:
    """Let this process, too, use the folder for temporary files of the environment."""
    with mock.patch.object(tempfile, "tempdir", cli.environment["TMPDIR"]):
        yield


def called(cli: Cli, words: Words, places: dict[str, Path]) -> Ended:
    """Run a command in this process; return what it did wrong."""
    before = contents(cli.cwd)
    children = psutil.Process().children(recursive=True)
    began_s = time.monotonic()
    faults: list[str] = []
    try:
        with ended_after(LIMIT_S), permissions_of_a_user(), own_temporary(cli):
            result = cli.main(*(places.get(word, word) for word in words))
        code, said = result.returncode, result.stdout + result.stderr
    except BaseException as error:  # noqa: BLE001  (a user would see its stack trace)
        code, said = 1, ""
        last = traceback.extract_tb(error.__traceback__)[-1]
        faults.append(
            f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}"[:300]
        )
    seconds = time.monotonic() - began_s
    if not faults and code not in set(ExitCode) - {ExitCode.INTERNAL}:
        faults.append(f"exit code {code}")
    if odd := _CONTROLS.search(said):
        faults.append(f"prints {odd[0]!r}")
    if code and not faults and not said.strip():
        faults.append("no message")
    if len(said) > LONGEST_MESSAGE and code:
        faults.append(f"a message of {len(said)} characters")
    if "--json" in words and code == 0 and words[0] != "list":
        json.loads(result.stdout)
    faults += changes(before, contents(cli.cwd), places)
    left = [child for child in psutil.Process().children(recursive=True) if child not in children]
    faults += [f"leaves process {child.pid}" for child in left]
    return Ended(words, code, seconds, tuple(faults))


def changes(before: dict[str, Any], after: dict[str, Any], places: dict[str, Path]) -> list[str]:
    """Return what was lost, changed or left behind below the folder of a case."""
    faults = []
    for path in sorted({*before, *after}):
        if before.get(path) == after.get(path):
            continue
        inside = path.removeprefix(f"{RUN}/")
        if path.split("/")[0] in MADE_HERE or (inside != path and _WRITES.fullmatch(inside)):
            continue
        how = "changed" if path in before and path in after else "made" if path in after else "lost"
        faults.append(f"{how}: {path!r}")
    return faults


_OF_TORCH = "torchinductor"  # its cache of compiled code, for all programs of the user
MADE_HERE = ("slurm", "kubernetes", "reference.json", "registered")


def cases(kinds: Iterable[str], seeds: int) -> list[tuple[str, int]]:
    return [(kind, seed) for kind in kinds for seed in range(seeds)]


@pytest.fixture(scope="session")
def undamaged(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return what the cases of each subject are copies of."""
    dataset = make_dataset(tmp_path_factory.mktemp("data") / "set", (3, 3)).path
    return {"run directory": whole_run, "spec": whole_run, "data set": Path(dataset)}


@dataclass(frozen=True)
class Commands:
    """All commands of a kind of case, and the folders in which they run."""

    subject: str
    kinds: Sequence[str]
    commands: Sequence[Words]
    make: Callable[[Path, Path, str, int], Path]  # undamaged one, new folder, kind and seed


SUBJECTS = {
    "run directory": Commands("RUN", tuple(RUN_DAMAGE), RUN_COMMANDS, hostile_run),
    "data set": Commands("DATA", tuple(DATA_DAMAGE), DATA_COMMANDS, hostile_run),
    "spec": Commands(
        "SPEC",
        SPEC_DAMAGE,
        SPEC_COMMANDS,
        lambda _, place, kind, seed: hostile_spec(place, kind, seed),
    ),
}


def run_case(
    subject: Commands, kind: str, seed: int, commands: Sequence[Words], whole: Path, folder: Path
) -> list[Ended]:
    """Run commands on a hostile run directory or spec; return how each ended."""
    place, temporary = folder / f"{kind}-{seed}".replace("/", " "), folder / "tmp"
    place.mkdir()
    temporary.mkdir(exist_ok=True)
    cli = cli_in(folder / "cache", place)
    cli.environment.update({"TMPDIR": str(temporary), "PATH": "/nowhere"})  # no Prometheus
    places = {"GOOD": whole, subject.subject: subject.make(whole, place, kind, seed)}
    before = contents(whole)
    found = [called(cli, words, places) for words in commands]
    assert contents(whole) == before
    left = [path.name for path in temporary.iterdir() if not path.name.startswith(_OF_TORCH)]
    if left:
        found.append(Ended(("all",), 0, 0.0, (f"leaves {left}",)))
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_kind_of_hostile_input_is_answered(
    name: str, undamaged: dict[str, Path], tmp_path: Path
) -> None:
    """Three commands for each kind, other ones for each; -m soak runs all."""
    subject, faults = SUBJECTS[name], []
    for number, kind in enumerate(subject.kinds):
        count = len(subject.commands)
        commands = [subject.commands[(3 * number + n) % count] for n in range(3)]
        ended = run_case(subject, kind, 0, commands, undamaged[name], tmp_path)
        faults += [f"{kind}: {' '.join(e.words)}: {fault}" for e in ended for fault in e.faults]
    assert not faults, "\n".join(faults)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_command_answers_every_hostile_input(
    name: str, undamaged: dict[str, Path], tmp_path: Path, results: Path
) -> None:
    subject, faults = SUBJECTS[name], []
    for kind, seed in cases(subject.kinds, SEEDS):
        ended = run_case(subject, kind, seed, subject.commands, undamaged[name], tmp_path)
        times, wrong = [e.seconds for e in ended], [f for e in ended for f in e.faults]
        record(results, name, kind, seed, [e.code for e in ended], times, wrong)
        faults += [f"{kind} {seed}: {' '.join(e.words)}: {f}" for e in ended for f in e.faults]
        shutil.rmtree(tmp_path / f"{kind}-{seed}".replace("/", " "))
    assert not faults, "\n".join(faults)
