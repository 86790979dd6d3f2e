"""Every command in other locales and environments: it ends alike, and shows the same text.

`-m soak` runs all commands in all environments, and adds to the results of test_hostile_input.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from tests.functional.cli_runs import SMALL
from tests.support.environment import kept_environment
from tests.support.hostile import LIMIT_S, RUN, Words, record

from paceline.base.errors import ExitCode
from paceline.cli.streams import IN_PLAIN_WORDS

pytestmark = pytest.mark.functional

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
