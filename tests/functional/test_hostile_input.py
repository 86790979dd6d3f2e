"""Files of others, specs, environments and options that no careful user gives.

Each reader of a damaged file takes it or raises one Paceline error; formats with a checksum notice
every change. Each command ends with a documented exit code and one message, without a stack trace;
it leaves nothing behind, changes nothing of the user's, and shows the same text in every locale.
`-m soak` runs all cases of tests/support/hostile.py, and writes a line for each into
hostile_input.jsonl of pytest's --basetemp.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from tests.functional.cli_runs import SMALL, Cli, cli_in, small, trial
from tests.support.environment import kept_environment
from tests.support.hostile import (
    DATA_DAMAGE,
    RUN,
    RUN_DAMAGE,
    SPEC_DAMAGE,
    damaged,
    hostile_run,
    hostile_spec,
    permissions_of_a_user,
)
from tests.unit.train.data.conftest import make_dataset

from paceline.analysis.trial.reading import load_run, read_hosts, read_rank_samples
from paceline.base.errors import ExitCode, PacelineError
from paceline.base.host.machine import usable_cores
from paceline.cli.streams import IN_PLAIN_WORDS
from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import CommunicationRow, StepRow
from paceline.measure.records.tables import rows
from paceline.measure.telemetry.request import SidecarRequest, read_request
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.sample_order import SampleOrder
from paceline.runner.job.job import read_trial
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.dataset import open_dataset
from paceline.train.data.row_groups import ParquetSource
from paceline.train.training.state import Elements, RankState
from paceline.train.training.state_files import Position, StateFiles, write_state

pytestmark = pytest.mark.functional

EXAMPLES = 100
LONGEST_MESSAGE = 20_000


@dataclass(frozen=True)
class Subject:
    """A file, and a call that reads it; exact: any change of the file must be an error."""

    file: Path
    read: Callable[[], object]
    exact: bool = False


def spec(folder: Path) -> Subject:
    source = Path(__file__).parents[2] / "python/src/paceline/plan/experiments/quickstart.toml"
    file = shutil.copy(source, folder / "spec.toml")
    return Subject(Path(file), lambda: load_spec(str(file)))


def planned_trial(folder: Path, run: Path) -> Subject:
    [(_, files)] = RunFiles(run).trials()
    file = Path(shutil.copy(files.trial, folder / "trial.json"))
    return Subject(file, lambda: read_trial(file))


def request(folder: Path) -> Subject:
    asked = SidecarRequest(run="r", trace=folder / "trace.jsonl", pids=(1, 2), facts={})
    file = folder / "request.json"
    file.write_bytes(asked.model_dump_json().encode())
    return Subject(file, lambda: read_request(io.BytesIO(file.read_bytes())))


def dataset_part(folder: Path, name: str) -> Subject:
    made = make_dataset(folder / "set", (3, 3)).path
    order = SampleOrder(row_group_rows=(3, 3), seed=0, global_batch=6, epochs=1)

    def read() -> None:
        source = ParquetSource(open_dataset(made), "image", "label", image_size=16)
        with open_feed(source, order, FeedOptions(0, 1), mode="memory") as feed:
            list(feed)

    return Subject(next(made.glob(name)), read, exact=name.endswith(".parquet"))


def checkpoint(folder: Path) -> Subject:
    """A checkpoint whose checksum is right, because anybody can compute it."""
    root = CheckpointFolder(folder / "checkpoints")
    values = torch.arange(12.0)
    state = RankState(
        tensors=[Elements(name="w", shape=(3, 4), strides=(4, 1), start=0, values=values)],
        values={"schedule": 1},
    )
    position = Position(steps=40, task_sha256="0" * 64, replicas=1)
    root.write(40, 0, 1, lambda file: list(write_state(file, state, position)))
    [found] = root.complete()

    def read() -> None:
        files = StateFiles(found)
        for name in files.names(""):
            files.tensor(name)
            files.value(name)

    return Subject(found.part(0), read)


MAKERS: dict[str, Callable[[Path], Subject]] = {
    "spec": spec,
    "request": request,
    "manifest": partial(dataset_part, name="*.json"),
    "parquet": partial(dataset_part, name="*.parquet"),
    "checkpoint": checkpoint,
}


def check(subject: Subject, examples: range) -> None:
    """Damage the file in many ways; put it back at the end."""
    content = subject.file.read_bytes()
    subject.read()  # the undamaged file is read without an error
    for number in examples:
        changed = damaged(content, random.Random(number))
        subject.file.write_bytes(changed)
        try:
            subject.read()
        except PacelineError as error:
            assert 0 < len(str(error)) < LONGEST_MESSAGE, number  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"example {number} of {subject.file.name}") from error
        else:
            assert changed == content or not subject.exact, f"example {number} is not noticed"
    subject.file.write_bytes(content)


@pytest.mark.parametrize("name", MAKERS)
def test_damaged_file_gives_a_message(name: str, tmp_path: Path) -> None:
    check(MAKERS[name](tmp_path), range(EXAMPLES))


def test_damaged_run_directory_gives_a_message(small_run: Path, tmp_path: Path) -> None:
    copy = RunFiles(Path(shutil.copytree(small_run, tmp_path / "run")))
    [(_, files)] = copy.trials()

    def read() -> None:
        load_run(copy)
        read_hosts(files)
        for _, host in files.hosts():
            read_rank_samples(host)
        for _, rank in files.ranks():
            rows(rank.steps, StepRow)
            rows(rank.communication, CommunicationRow)

    names = ("*.json", "*.jsonl", "*.parquet")
    found = [file for name in names for file in sorted(copy.root.rglob(name))]
    for place, file in enumerate(found):
        check(Subject(file, read), range(place, EXAMPLES, len(found)))


def test_damaged_trial_gives_a_message(small_run: Path, tmp_path: Path) -> None:
    check(planned_trial(tmp_path, small_run), range(EXAMPLES))


# --- every command, on hostile run directories and specs ------------------------------------------

LIMIT_S = 30.0
SEEDS = 2  # of each kind of damage, in the whole form
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ENDED = signal.SIGUSR1  # a command that takes too long ends as a user would end it
# Files that a command may write into a run directory.
_WRITES = re.compile(r"report\.html|\.lock|comparison\.json|export(/.*)?|monitor(/.*)?|targets")

Words = tuple[str, ...]
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
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with every kind of file, of two configurations and two repeats."""
    source = Path(__file__).parent / "recorded_runs/0.3.0/tiny"
    run = Path(shutil.copytree(source, tmp_path_factory.mktemp("whole") / RUN))
    keep = sorted(run.glob("trials/*"))
    chosen = [path for path in keep if ".sequential." in path.name or ".processes." in path.name]
    for path in keep:
        if path not in chosen or path.name.endswith(".r2"):
            shutil.rmtree(path)
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    manifest["trials"] = sorted(path.name for path in run.glob("trials/*"))
    (run / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return run


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


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that gets one line for each case."""
    return tmp_path_factory.getbasetemp() / "hostile_input.jsonl"


def record(
    results: Path,
    subject: str,
    kind: str,
    seed: int,
    codes: Sequence[int],
    seconds: Sequence[float],
    faults: Sequence[str],
) -> None:
    """Add a case with the exit codes and times of its commands, and what they did wrong."""
    row = {"subject": subject, "kind": kind, "seed": seed, "codes": codes, "seconds": seconds,
           "faults": faults}  # fmt: skip
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


# --- every command, in other locales and environments ---------------------------------------------

# Runs commands one after the other in a process, whose start takes longest: each writes into a file
# of its own, if standard output is open.
_PROGRAM = """
import json, os, sys
words, folder, is_open = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "open"
from paceline.cli import main
for number, each in enumerate(words):
    if is_open:
        os.dup2(os.open(f"{folder}/{number}.out", os.O_WRONLY | os.O_CREAT, 0o666), 1)
    try:
        code = main(each)
    except SystemExit as ended:
        code = ended.code
    with open(f"{folder}/codes", "a") as file:
        file.write(f"{code}\\n")
"""
_NO_LOCALE = {"LC_ALL": None, "LANG": None, "LC_CTYPE": None, "PYTHONUTF8": None}
_JOB = {
    "SLURM_JOB_ID": "1", "SLURM_NTASKS": "x", "SLURM_PROCID": "7", "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "-1", "PMIX_RANK": "1", "RANK": "9", "WORLD_SIZE": "many",
    "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "0", "LOCAL_RANK": "", "JAVA_HOME": "/nowhere",
}  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """An environment of a command.

    variables: None removes one. before, after: of the command, in sh; $D is a folder of the case.
    encoding: of the output. shows_all: the text is that of a usual environment.
    """

    name: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    shows_all: bool = True
    without_name: bool = False  # as a user id without an entry in /etc/passwd


def _encoded(name: str, encoding: str, **variables: str | None) -> Surroundings:
    return Surroundings(name, {**_NO_LOCALE, **variables}, encoding=encoding)


SURROUNDINGS = (
    _encoded("LC_ALL=C", "utf-8", LC_ALL="C"),
    _encoded("LC_ALL=POSIX", "utf-8", LC_ALL="POSIX"),
    _encoded("C without UTF-8 mode", "ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    _encoded("no locale", "utf-8"),
    _encoded("LC_ALL=xx_XX.UTF-8", "utf-8", LC_ALL="xx_XX.UTF-8"),
    _encoded("ISO-8859-1", "iso-8859-1", LC_ALL="C.UTF-8", PYTHONIOENCODING="iso-8859-1"),
    _encoded("PYTHONIOENCODING=ascii", "ascii", LC_ALL="C.UTF-8", PYTHONIOENCODING="ascii"),
    _encoded("ascii:strict", "ascii", LC_ALL="C.UTF-8", PYTHONIOENCODING="ascii:strict"),
    _encoded("cp1252", "cp1252", LC_ALL="C.UTF-8", PYTHONIOENCODING="cp1252"),
    _encoded("utf-16", "utf-16", LC_ALL="C.UTF-8", PYTHONIOENCODING="utf-16"),
    _encoded("koi8-r", "koi8-r", LC_ALL="C.UTF-8", PYTHONIOENCODING="koi8-r"),
    Surroundings("no HOME", {"HOME": None, "PACELINE_CACHE": None}),
    Surroundings("HOME does not exist", {"HOME": "/nowhere", "PACELINE_CACHE": None}),
    Surroundings("uid without a name", {"HOME": None, "PACELINE_CACHE": None}, without_name=True),
    Surroundings("TMPDIR with a space", before='mkdir "$D/a b"; export TMPDIR="$D/a b";'),
    Surroundings(
        "TMPDIR not writable",
        before='mkdir -m 555 "$D/t"; export TMPDIR="$D/t";',
        without_name=True,  # no root, to whom permissions do not apply
    ),
    Surroundings("TMPDIR does not exist", {"TMPDIR": "/nowhere"}),
    Surroundings("TMPDIR is a file", {"TMPDIR": "/etc/hostname"}),
    Surroundings("closed stdout", after=">&-", shows_all=False),
    Surroundings("closed stderr", after="2>&-"),
    Surroundings("closed stdin", after="<&-"),
    Surroundings("all closed", after="<&- >&- 2>&-", shows_all=False),
    Surroundings("TERM=dumb", {"TERM": "dumb"}),
    Surroundings("no TERM", {"TERM": None}),
    Surroundings("COLUMNS=1", {"COLUMNS": "1"}, shows_all=False),
    Surroundings("COLUMNS=0", {"COLUMNS": "0"}, shows_all=False),
    Surroundings("COLUMNS is a word", {"COLUMNS": "wide"}, shows_all=False),
    Surroundings("LINES=0", {"LINES": "0"}),
    Surroundings("few open files", before="ulimit -n 64;"),
    Surroundings("umask 077", before="umask 077;"),
    # Python then removes the docstrings, with the first lines of each help.
    Surroundings("PYTHONOPTIMIZE=2", {"PYTHONOPTIMIZE": "2"}, shows_all=False),
    Surroundings("PYTHONWARNINGS=error", {"PYTHONWARNINGS": "error"}),
    Surroundings("no PATH", {"PATH": "/nowhere"}),
    Surroundings("variables of jobs", _JOB),
    Surroundings("odd time zone", {"TZ": "no/where"}),
    Surroundings("state folder is a file", {"XDG_STATE_HOME": "/etc/hostname"}),
    Surroundings("cache is a file", {"PACELINE_CACHE": "/etc/hostname"}),
)  # fmt: skip
QUICK = (
    "C without UTF-8 mode", "ISO-8859-1", "ascii:strict", "no HOME", "uid without a name",
    "TMPDIR not writable", "closed stderr", "all closed", "COLUMNS=1", "few open files",
    "PYTHONWARNINGS=error", "variables of jobs",
)  # fmt: skip
# Quick, and in the usual environment without facts of the moment.
SHOWING_COMMANDS: tuple[Words, ...] = (
    ("compare", "GOOD"),
    ("list", "strategies"),
    ("compare", "nowhere"),
    ("explain", "GOOD"),
    ("profile", "GOOD"),
    ("predict", "GOOD"),
    ("compare", "GOOD", "--json"),
    ("compare", "GOOD", "--markdown"),
    ("report", "GOOD", "-o", "OUT/report.html"),
    ("export", "GOOD", "--to", "csv", "-o", "OUT/csv"),
    ("export", "GOOD", "--to", "perfetto", "-o", "OUT/perfetto"),
    ("watch", "GOOD", "--once"),
    ("stacks", "GOOD"),
    ("monitor", "GOOD"),
    ("--help",),
    ("run", "--help"),
    ("list", "transports", "--json"),
    ("show", "quickstart"),
    ("init", "OUT/made.toml"),
    ("data", "inspect", "OUT/nowhere"),
    ("run", "nowhere.toml"),
    ("tune", "local", "nowhere.toml"),
    ("run", "--resume", "GOOD", "--dry-run"),
    ("render", "slurm", "SPEC", "-o", "OUT/slurm", "--cores", "2"),
    ("verify", "nowhere.py"),
    ("sidecar", "-o", "OUT/trace.jsonl", "--limit", "0.3", "--interval", "0.1"),
)
_FEW = SHOWING_COMMANDS[:3]
_WORD = re.compile(r"[\w.%+]*[A-Za-z0-9][\w.%+]*")


@dataclass(frozen=True)
class Shown:
    """Exit code of each command, what it wrote, and all that was written to standard error."""

    codes: list[int]
    texts: list[str]
    said: str


def shown_in(around: Surroundings, commands: Sequence[Words], whole: Path, folder: Path) -> Shown:
    """Run commands in an environment."""
    case = folder / re.sub(r"\W", "-", around.name)
    out, case_cwd = case / "out", case / "cwd"
    for place in (case, out, case_cwd):
        place.mkdir()
        place.chmod(0o777)
    (out / "hostile.toml").write_text(SMALL, "utf-8")
    names = {"GOOD": str(whole), "SPEC": str(out / "hostile.toml")}
    words = [[names.get(w, w.replace("OUT", str(out))) for w in each] for each in commands]
    usual = {"LC_ALL": "C.UTF-8", "PACELINE_CACHE": str(folder / "cache"), "COLUMNS": "200",
             "NO_COLOR": "1", "D": str(case)}  # fmt: skip
    changed = {**kept_environment(), **usual, **around.variables}
    environment = {name: value for name, value in changed.items() if value is not None}
    is_open = "closed" if ">&-" in around.after.replace("2>&-", "") else "open"
    program = [sys.executable, "-c", _PROGRAM, json.dumps(words), str(case), is_open]
    as_user = _NAMELESS if around.without_name else ()
    ended = subprocess.run(
        ["/bin/sh", "-c", f'{around.before} exec "$@" {around.after}', "sh",
         *as_user, *program],
        env=environment, cwd=case_cwd,
        capture_output=True, check=False, timeout=LIMIT_S * len(commands),
    )  # fmt: skip
    codes = case / "codes"
    texts = [case / f"{number}.out" for number in range(len(commands))]
    return Shown(
        [int(line) for line in codes.read_text().split()],
        [
            path.read_bytes().decode(around.encoding, "replace") if path.exists() else ""
            for path in texts
        ],
        ended.stderr.decode(around.encoding, "replace"),
    )


# A user namespace: the user of this process under an id without a name, without root's rights.
_NAMELESS = ("/usr/bin/unshare", "--user", "--map-user=48123", "--map-group=48123")


@cache
def can_be_nameless() -> bool:
    """Return whether this machine allows user namespaces."""
    with contextlib.suppress(OSError):
        return subprocess.run([*_NAMELESS, "true"], check=False, timeout=60).returncode == 0
    return False


def words_of(text: str) -> list[str]:
    """Return the words of a text, with plain forms of characters that an encoding may lack."""
    plain = text.encode("ascii", IN_PLAIN_WORDS).decode()
    return _WORD.findall(re.sub(r"[|+\-]{2,}|\\u2\w{3}", " ", plain))


def environment_faults(
    around: Surroundings, commands: Sequence[Words], whole: Path, folder: Path, usual: Shown
) -> tuple[list[int], list[str]]:
    """Return exit codes, and what commands do otherwise in an environment than in the usual one."""
    if around.without_name and not can_be_nameless():
        return [], []
    found = shown_in(around, commands, whole, folder)
    faults = []
    if "Traceback" in found.said:
        faults.append(f"{around.name}: {found.said[-1500:]}")
    # a command that needs a folder of the user says so where there is none
    expected_codes = [
        found_code if around.without_name and found_code == ExitCode.ENVIRONMENT else code
        for found_code, code in zip(found.codes, usual.codes, strict=True)
    ]
    if found.codes != expected_codes:
        faults.append(
            f"{around.name}: exit codes {found.codes}, expected {usual.codes}: {found.said}"
        )
    case = re.sub(r"\W", "-", around.name)
    for words, text, expected, code, usual_code in zip(
        commands, found.texts, usual.texts, found.codes, usual.codes, strict=True
    ):
        if code != usual_code:
            continue
        ours, theirs = (words_of(t.replace(case, "usual")) for t in (text, expected))
        if around.shows_all and ours != theirs:
            pair = next((p for p in zip(ours, theirs, strict=False) if p[0] != p[1]), "length")
            faults.append(f"{around.name}: {' '.join(words)} shows another text: {pair}")
    return found.codes, faults


@pytest.fixture(scope="session")
def readable_run(whole_run: Path) -> Iterator[Path]:
    """Return the run directory where every account can read it."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(whole_run, Path(folder, RUN)))


@pytest.fixture(scope="session")
def readable_folder() -> Iterator[Path]:
    """Return a folder that every account can reach."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("name", QUICK)
def test_commands_show_the_same_in_every_environment(
    name: str, readable_run: Path, readable_folder: Path, usual: Shown
) -> None:
    """Three commands in a third of the environments; -m soak runs all in all."""
    around = next(each for each in SURROUNDINGS if each.name == name)
    _, faults = environment_faults(around, _FEW, readable_run, readable_folder, usual)
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="session")
def usual(readable_run: Path, readable_folder: Path) -> Shown:
    """Return what a few commands show in the usual environment."""
    return shown_in(Surroundings("usual"), _FEW, readable_run, readable_folder)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_command_shows_the_same_in_every_environment(
    readable_run: Path, readable_folder: Path, results: Path
) -> None:
    folder = readable_folder / "whole"
    folder.mkdir(mode=0o755)
    usual = shown_in(Surroundings("usual"), SHOWING_COMMANDS, readable_run, folder)
    assert 1 not in usual.codes
    faults = []
    for around in SURROUNDINGS:
        codes, found = environment_faults(around, SHOWING_COMMANDS, readable_run, folder, usual)
        record(results, "environment", around.name, 0, codes, [], found)
        faults += found
    assert not faults, "\n".join(faults)


# --- mistakes of a user ---------------------------------------------------------------------------


def complaint(result, code):
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def test_missing_data_set_says_how_to_make_one(paceline, tmp_path):
    spec = tmp_path / "missing.toml"
    spec.write_text(small("nowhere"))
    assert "paceline data ingest" in complaint(paceline.main("run", spec), 3)


def test_missing_mpirun_is_found_before_anything_runs(paceline, tmp_path):
    spec = tmp_path / "mpi.toml"
    spec.write_text(SMALL + trial("mpi", "mpi") + '[mpi]\nmpirun = "/no/mpirun"\n')
    out = tmp_path / "run"
    assert "/no/mpirun" in complaint(paceline.main("run", spec, "--out", out), 3)
    assert not (out / "trials").exists()


def test_more_ranks_than_cores_are_left_out_with_both_numbers(paceline, tmp_path, tiny_dataset):
    spec = tmp_path / "many.toml"
    spec.write_text(
        small(tiny_dataset, global_batch=4096)
        + trial("mpi", "mpi").replace("= 2", "= 4096").replace("oversubscribe = true", "")
    )
    planned = paceline.main("plan", spec, "--json")
    assert planned.returncode == 0, planned.stderr
    message = json.dumps(json.loads(planned.stdout)["left_out"])
    assert "4096" in message
    assert re.search(rf"\b{usable_cores()}\b", message), message


def test_run_directory_in_use_is_not_overwritten(paceline, tmp_path):
    spec = tmp_path / "small.toml"
    spec.write_text(SMALL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    assert "--out" in complaint(paceline.main("run", spec, "--out", tmp_path / "run"), 2)
    assert (tmp_path / "run" / "mine.txt").read_text() == "precious"
