"""Build the archives for a cluster: `.venv/bin/python python/tools/bundle.py --out dist`.

    paceline-V-py3-none-any.whl     the package
    paceline-V.tar.gz               its sources, from which pip builds the same wheel
    paceline_collectives-V-…whl     back end "paceline" of torch.distributed alone
    paceline-spark-jobs-V.tar.gz    for spark-submit
    paceline-mpi-jobs-V.tar.gz      for mpirun and srun

The last one has the modules of the room `collectives` that the back end imports, as a package of
another name: pip would let two packages write and remove the same files of `paceline`.

An archive contains the folder of the job scripts, with the same name as in the repository. In it
are also paceline.zip, which the scripts import, the wheel, the lock file, the licence and a README
with the commands. PACELINE_JOBS can name the folder into which both archives are unpacked. The same
sources give the same bytes: times, owners, modes and order are fixed.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[1]
ROOT_DIR = PROJECT_DIR.parent
TEMPLATE_DIR = Path(__file__).resolve().parent / "bundle_readmes"
PACKAGE_DIR = PROJECT_DIR / "src" / "paceline"
COLLECTIVES_DIR = PROJECT_DIR / "collectives"
ROOM, ROOM_ALONE = "paceline.collectives", "paceline_collectives"
ROOM_IMPORT = re.compile(rf"^( *from ){re.escape(ROOM)}([.\w]*)(?= import )", re.MULTILINE)
LICENSE_FILE = ROOT_DIR / "LICENSE"
LOCK_FILE = PROJECT_DIR / "requirements.lock"
# The earliest time a zip archive can hold: 1980-01-01 (PKWARE APPNOTE 4.4.6).
EPOCH_S = 315_532_800
BUILD_LIMIT_S = 300.0
LEFT_OUT = ("__pycache__", "*.pyc", ".*", "*.md")
KINDS = ("spark", "mpi")


def build_distributions(out_dir: Path) -> tuple[Path, Path]:
    """Build the source archive and, from it, the wheel into `out_dir`; return wheel and archive.

    The sources are a copy with fixed file modes. So the checkout stays clean, and the result
    depends neither on the umask nor on files of an earlier build. Raises SystemExit if a file of
    the package is missing.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bundle-") as folder:
        copy_dir = Path(folder) / "python"
        shutil.copytree(
            PACKAGE_DIR, copy_dir / "src" / "paceline", ignore=shutil.ignore_patterns(*LEFT_OUT)
        )
        for file in (PROJECT_DIR / "pyproject.toml", PROJECT_DIR / "README.md", LICENSE_FILE):
            shutil.copyfile(file, copy_dir / file.name)
        expected = {f"paceline/{name}" for name in _files_under(copy_dir / "src" / "paceline")}
        _fix_modes(copy_dir)
        built_dir = Path(folder) / "built"
        _run_build(copy_dir, built_dir)
        [wheel] = built_dir.glob("*.whl")
        [sources] = built_dir.glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            missing = sorted(expected - set(archive.namelist()))
        if missing:
            raise SystemExit(
                f"the wheel lacks {', '.join(missing)}: add them to [tool.setuptools.package-data] "
                f"in {PROJECT_DIR / 'pyproject.toml'}"
            )
        out_dir.mkdir(parents=True, exist_ok=True)
        packed = out_dir / sources.name
        packed.write_bytes(_tar_gz(_members(sources)))
        return shutil.copyfile(wheel, out_dir / wheel.name), packed


def build_collectives(out_dir: Path, version: str) -> Path:
    """Build the wheel of the back end alone into `out_dir`; return its path."""
    with tempfile.TemporaryDirectory(prefix="paceline-collectives-") as folder:
        copy_dir = Path(folder) / "project"
        package_dir = copy_dir / "src" / ROOM_ALONE
        for name, source in room_sources(f"{ROOM}.shared_group").items():
            target = package_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source, encoding="utf-8")
        (package_dir / "py.typed").touch()
        (copy_dir / "VERSION").write_text(version, encoding="utf-8")
        for file in (*COLLECTIVES_DIR.iterdir(), LICENSE_FILE):
            shutil.copyfile(file, copy_dir / file.name)
        _fix_modes(copy_dir)
        _run_build(copy_dir, Path(folder) / "built", "--wheel")
        [wheel] = (Path(folder) / "built").glob("*.whl")
        return shutil.copyfile(wheel, out_dir / wheel.name)


def room_sources(module: str) -> dict[str, str]:
    """Return the files of `collectives` that a module of it imports, with the package's name there.

    By their paths in the package, with all packages that contain them.
    """
    sources: dict[str, str] = {}
    left = [module]
    while left:
        path = PACKAGE_DIR.parent / left.pop().replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        name = file.relative_to(PACKAGE_DIR / "collectives").as_posix()
        if name in sources:
            continue
        text = file.read_text(encoding="utf-8")
        sources[name] = ROOM_IMPORT.sub(rf"\g<1>{ROOM_ALONE}\g<2>", text)
        left += [ROOM + found[2] for found in ROOM_IMPORT.finditer(text)]
        above = file.parent.relative_to(PACKAGE_DIR.parent)
        left.append(".".join(above.parts))
    return sources


def write_job_archive(kind: str, wheel: Path, out_dir: Path) -> Path:
    """Write the archive of the `kind` ("spark" or "mpi") jobs into `out_dir`; return its path."""
    version = wheel.name.split("-")[1]
    folder = f"{kind}-jobs"
    members = {
        **_job_files(kind),
        # A pure wheel is an importable zip, but Spark puts only .zip, .egg and .jar on the path.
        "paceline.zip": wheel.read_bytes(),
        "README.md": _readme(kind, wheel).encode(),
        "LICENSE": LICENSE_FILE.read_bytes(),
        "requirements.lock": LOCK_FILE.read_bytes(),
        wheel.name: wheel.read_bytes(),
    }
    target = out_dir / f"paceline-{folder}-{version}.tar.gz"
    target.write_bytes(_tar_gz({f"{folder}/{name}": content for name, content in members.items()}))
    return target


def _fix_modes(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _run_build(source_dir: Path, built_dir: Path, *options: str) -> None:
    # --no-isolation: setuptools is pinned in the lock, and nothing is fetched
    argv = [sys.executable, "-I", "-m", "build", "--no-isolation"]
    done = subprocess.run(
        [*argv, *options, "--outdir", str(built_dir), str(source_dir)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S)},
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nbuilding the package failed; the reason is above")


def _job_dir(kind: str) -> Path:
    folder = ROOT_DIR / f"{kind}-jobs"
    if not (folder / "train.py").is_file():
        raise SystemExit(f"expected the job script {folder / 'train.py'}, but it does not exist")
    return folder


def _job_files(kind: str) -> dict[str, bytes]:
    folder = _job_dir(kind)
    return {name: (folder / name).read_bytes() for name in _files_under(folder)}


def _readme(kind: str, wheel: Path) -> str:
    template = (TEMPLATE_DIR / f"{kind}.md").read_text(encoding="utf-8")
    return template.replace("{WHEEL}", wheel.name)


def _files_under(folder: Path) -> list[str]:
    """Return the relative names of source files, without caches and hidden files."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (
        file
        for file in files
        if not any(part == "__pycache__" or part.startswith(".") for part in file.parts)
        and file.suffix != ".pyc"
    )
    return sorted(file.as_posix() for file in kept)


def _members(archive: Path) -> dict[str, bytes]:
    """Return the files of a tar archive by name."""
    with tarfile.open(archive) as opened:
        files = ((entry.name, opened.extractfile(entry)) for entry in opened)
        return {name: file.read() for name, file in files if file is not None}


def _tar_gz(members: dict[str, bytes]) -> bytes:
    """Pack `members` (name to content); the same members give the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(members):
            entry = tarfile.TarInfo(name)
            entry.size = len(members[name])
            entry.mtime = EPOCH_S
            entry.mode = 0o755 if members[name].startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(members[name]))
    return packed.getvalue()


def main() -> None:
    """Build the package and the archives of jobs, and print their paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT_DIR / "dist", metavar="DIR")
    out_dir: Path = parser.parse_args().out
    for kind in KINDS:
        _job_dir(kind)  # before the slow part
    wheel, sources = build_distributions(out_dir)
    print(wheel)
    print(sources)
    print(build_collectives(out_dir, wheel.name.split("-")[1]))
    for kind in KINDS:
        print(write_job_archive(kind, wheel, out_dir))


if __name__ == "__main__":
    main()
