"""Programs that launchers start: which one is in use, its version, and where it was found.

Candidates come in this order: named by the user, configured in the environment, wheels in this
Python's environment, PATH. The launchers list the candidates.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.processes import ended_by_signal

JOBS_VARIABLE = "PACELINE_JOBS"
PACKAGE = Path(__file__).parents[2]  # the folder of `paceline`; in an archive on a cluster
# Modules of packages that only an extra of Paceline's installs.
_EXTRA_OF = {
    "mpi4py": "mpi",
    "py4j": "spark",
    "pyspark": "spark",
    "cv2": "petastorm",
    "petastorm": "petastorm",
    "PIL": "petastorm",
    "pyarrow": "petastorm",
}
VERSION_LIMIT_S = 20.0
# With it, as with -P, no module of the working directory can replace one of the library.
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program in use."""

    path: Path
    version: str
    why: str  # where it was found


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFinding:
    """One result of `paceline doctor`; `why` says where it was found, or how to get it."""

    what: str
    ok: bool = True
    found: str
    why: str


def tool_finding(what: str, find: Callable[[], Tool]) -> MachineFinding:
    """Return the finding about a program; `find` raises EnvironmentLacks if it is missing."""
    try:
        tool = find()
    except EnvironmentLacks as error:
        return MachineFinding(what=what, ok=False, found="missing", why=str(error))
    return MachineFinding(what=what, found=tool.version, why=f"{tool.why}: {tool.path}")


def first_program(
    candidates: Iterable[tuple[str | Path | None, str]], otherwise: str
) -> tuple[Path, str]:
    """Return the first candidate that can be run, with where it was found.

    candidates: path or None, and where it comes from. A candidate that the user named (its place
    begins with "$" or "[") must exist: there is no silent second choice.
    Raises EnvironmentLacks with `otherwise` if there is none.
    """
    for candidate, why in candidates:
        if not candidate:
            continue
        found = shutil.which(candidate)
        if found:
            return Path(found), why
        if why.startswith(("$", "[")):
            raise EnvironmentLacks(
                f"{why}: expected a program at {candidate}, found none that can be run; correct "
                "it, or remove it to use the program that comes with Paceline"
            )
    raise EnvironmentLacks(otherwise)


@cache
def version_of(program: Path, option: str, pattern: str, name: str) -> str:
    """Return the version that a program prints; this process asks each program once.

    Raises EnvironmentLacks if it does not run.
    """
    argv = [str(program), option]
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentLacks(f"{name}: `{' '.join(argv)}` does not run: {error}") from error
    text = answer.stdout + answer.stderr
    found = re.search(pattern, text)
    if answer.returncode != 0 or found is None:
        raise EnvironmentLacks(
            f"{name}: `{' '.join(argv)}` ended with {answer.returncode}: {text.strip()[:300]}"
        )
    return found.group(1)


def how_it_ended(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the status or the signal of a failed program, and the last line that it wrote."""
    if ended.returncode >= 0:
        return f"ended with {ended.returncode}: {_last_line(ended)}"
    return f"{ended_by_signal(-ended.returncode)}; {_last_line(ended)}"


def why_it_failed(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed program wrote, and the signal if one ended it."""
    return how_it_ended(ended) if ended.returncode < 0 else _last_line(ended)


def _last_line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = (ended.stderr or ended.stdout).strip().splitlines()
    # A stack of Java begins each frame with a tab.
    return next((line for line in reversed(lines) if not line.startswith("\t")), "no message")


@cache
def how_to_install(extra: str) -> str:
    """Return the command that installs what an extra brings, in a clone and beside a wheel.

    It names the packages of the extra: no index has Paceline, so its name there could be anybody's.
    """
    try:
        requirements = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:  # in the archive of the job scripts
        return f"pip install './python[{extra}]'"
    parts = (requirement.partition(";") for requirement in requirements)
    needed = [name for name, _, marker in parts if f'extra == "{extra}"' in marker]
    return shlex.join(["pip", "install", *needed])


def missing_extra(error: ImportError) -> EnvironmentLacks | None:
    """Return the error for the user if an import failed for want of an extra; None otherwise."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF:
        return None
    return EnvironmentLacks(
        f"expected the package {module}, not installed; `{how_to_install(_EXTRA_OF[module])}` "
        "brings it"
    )


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def package_folder(package: str) -> Path | None:
    """Return the folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def scripts_folder() -> Path:
    """Return the folder of the programs in this Python's environment."""
    return Path(sysconfig.get_path("scripts"))


def own_module(name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of a module of this package, and its environment.

    For a helper that the supervisor of a trial must not end: it ends every process that carries the
    trial's variables.
    """
    # The caller may have found the package in an archive or through sys.path; so must the helper.
    home = str(PACKAGE.resolve().parent)
    search = dict.fromkeys([home, *(str(Path(entry).absolute()) for entry in sys.path if entry)])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    return [sys.executable, "-P", "-m", name], {**kept, "PYTHONPATH": os.pathsep.join(search)}


def job_script(folder: str, name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a job script such as `mpi-jobs/train.py`.

    It is in $PACELINE_JOBS, the source tree, or the installation; raises EnvironmentLacks if not.
    """
    roots = [
        PACKAGE.resolve().parents[2],
        Path(sysconfig.get_path("data"), "share/paceline"),
    ]
    if environment.get(JOBS_VARIABLE):
        roots.insert(0, Path(environment[JOBS_VARIABLE]).resolve())
    for root in roots:
        if (root / folder / name).is_file():
            return root / folder / name
    raise EnvironmentLacks(
        f"{folder}/{name}: expected it in one of {', '.join(str(r) for r in roots)}, found none; "
        f"unpack the job archives and set {JOBS_VARIABLE} to the directory that holds {folder}/"
    )


_LIMIT_S = 10.0


def repository_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that contains `folder`, and whether files were changed.

    None without git, a repository or a commit, and if git takes too long.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "has_local_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
