"""The example extensions: installed as packages of their own, found, run, certified equivalent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.support.commands import run_command

from paceline.collectives.host import wait_until

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300
ENDED_S = 10
MARK = "EXAMPLES_OF_TEST"  # a variable that all processes of these tests inherit


class Environment:
    """A virtual environment that sees the packages of this one, and has its own beside them."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._python = folder / "venv/bin/python"
        self._variables = {
            **os.environ, "PACELINE_CACHE": str(cache), "NO_COLOR": "1", MARK: str(folder),
        }  # fmt: skip
        self._run(
            [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
        ).check_returncode()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site_packages = folder / "venv/lib" / version / "site-packages"
        # addsitedir also reads the .pth file of Paceline's editable installation
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site_packages / "main.pth").write_text(line)

    def pip_install(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        pip = [sys.executable, "-m", "pip", "--python", self._python, "--disable-pip-version-check"]
        return self._run([*map(str, pip), "install", "--quiet", *map(str, arguments)])

    def install_example(self, name: str) -> None:
        """Install a copy, because a build writes into the source folder."""
        copy = shutil.copytree(EXAMPLES / name, self.folder / name)
        self.pip_install("--no-deps", "--no-build-isolation", copy).check_returncode()

    def paceline(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._run([self._python, "-m", "paceline.cli", *arguments])

    def _run(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        return run_command(argv, LIMIT_S, env=self._variables, cwd=self.folder)

    def processes(self) -> list[str]:
        """Return the names of the living processes that were started here."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process.name())
        return found

    def rows(self, example: Path) -> list[dict]:
        """Run the spec of an example, with the data set of all tests and small images.

        Returns the rows of the comparison.
        """
        spec, run_dir = self.folder / example.name, self.folder / "runs" / example.stem
        spec.write_text(
            example.read_text()
            .replace("schema = 2", "schema = 2\nseed = 3\nmeasure_again = false")
            .replace("[training]", "[training]\nepochs = 3\nglobal_batch = 16\nimage_size = 64")
            .replace('name = "tiny"', 'name = "tiny"\nsamples = 48')
        )
        finished = self.paceline("run", spec, "--out", run_dir)
        assert finished.returncode == 0, finished.stderr
        return json.loads((run_dir / "comparison.json").read_text())["rows"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory, cache):
    made = Environment(tmp_path_factory.mktemp("examples"), cache)
    made.install_example("small-strategy")
    return made


@pytest.fixture(scope="module")
def with_ray(environment):
    pinned = tomllib.loads((EXAMPLES / "ray-launcher/pyproject.toml").read_text())["project"]
    (ray,) = [each for each in pinned["dependencies"] if each.startswith("ray==")]
    installed = environment.pip_install(ray)
    assert installed.returncode == 0, installed.stderr
    environment.install_example("ray-launcher")
    return environment


def test_strategy_of_another_package_is_equivalent(environment):
    rows = environment.rows(EXAMPLES / "small-strategy/accumulate.toml")
    found = {row["local_strategy"]: row["equivalent"] for row in rows}
    assert found == {"sequential": True, "accumulate": True}


@pytest.mark.parametrize(
    ("given", "fault", "message"),
    [
        ("pieces = 4", "pieces = 1", "pieces: input should be greater than or equal to 2, got 1"),
        ("pieces = 4", "nodes = 2", 'nodes: "accumulate" runs on one node, got 2; use nodes = 1'),
        ("pieces = 4", "piece = 4", 'piece: no such key. Did you mean "pieces"?'),
        ('"accumulate"\npieces', '"acumulate"\npieces', 'Did you mean "accumulate"?'),
    ],
)
def test_faults_of_another_package_are_reported(environment, given, fault, message):
    spec = (EXAMPLES / "small-strategy/accumulate.toml").read_text()
    wrong = environment.folder / "wrong.toml"
    wrong.write_text(spec.replace(given, fault))
    refused = environment.paceline("plan", wrong)
    assert refused.returncode == 2
    assert message in " ".join(refused.stderr.split())


@pytest.mark.needs("ray")
def test_ranks_as_actors_of_ray_are_equivalent(with_ray):
    rows = with_ray.rows(EXAMPLES / "ray-launcher/ray.toml")
    found = {(r["launcher"], r["transport"]): (r["ranks"], r["equivalent"]) for r in rows}
    assert found == {("local", "none"): (1, True), ("ray", "gloo"): (2, True)}
    assert wait_until(lambda: not with_ray.processes(), ENDED_S), with_ray.processes()
