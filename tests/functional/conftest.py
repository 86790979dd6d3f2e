from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.functional.cli_runs import SMALL, cli_in
from tests.functional.monitored import monitored
from tests.support.hostile import RUN
from tests.support.once import making_once
from tests.unit.show.monitor.recorded import make_recorded_run


@pytest.fixture(scope="session")
def cache(shared_cache):
    """PACELINE_CACHE of what the tests run."""
    return shared_cache


@pytest.fixture
def paceline(cache, tmp_path):
    return cli_in(cache, tmp_path)


@pytest.fixture(scope="session")
def small_run(cache, shared_folder):
    """Return the directory of a finished run of SMALL alone. Read only."""
    folder = shared_folder / "small-run"
    with making_once(folder) as is_first:
        if is_first:
            folder.mkdir()
            (folder / "small.toml").write_text(SMALL, "utf-8")
            result = cli_in(cache, folder)("run", "small.toml", "--out", folder / "run")
            assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture(scope="session")
def recorded_api(tmp_path_factory):
    """Return a Prometheus with a recorded run; files with it have one worker (scheduling.py)."""
    run = make_recorded_run(tmp_path_factory.mktemp("monitored") / "recorded")
    with monitored(run.root) as monitor:
        yield monitor.api()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
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
def results(tmp_path_factory):
    """Return the file that gets one line for each case."""
    return tmp_path_factory.getbasetemp() / "hostile_input.jsonl"
