"""Fixtures and hooks for all tests: shared data sets, order, required capabilities."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from tests.support import capabilities, scheduling
from tests.support.environment import QUICK_JVM, class_archive_options, make_class_archives
from tests.support.forking import ForkServer, fork_server
from xdist.remote import Producer
from xdist.scheduler import Scheduling

from paceline.plan.spec import model_facts

if TYPE_CHECKING:
    from tests.support.mock_gpu import MockGpus

# Every run tries the same examples, and a busy machine is not an error. To search for new
# examples: pytest --hypothesis-profile=search.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("repeatable")

# Threads of torch spin while they wait for each other: with two on a busy machine of two cores,
# tests/unit/strategies took 58 s of CPU time, with one thread 16 s. Torch reads this at its import,
# which a conftest.py of a folder may do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control lets its background jobs ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_STDERR = pytest.StashKey[int]()  # file descriptor that is not captured
_END_S = 60.0  # for the end of a test that has reached its time limit

_MPI_FOLDER = "PRTE_MCA_prte_tmpdir_base"

# Modules and tests are there until the end. To search them again and again took half of the 10 s
# of CPU time in which a worker collects all tests; see pytest_collection_finish.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the soak tests."""
    group = parser.getgroup("soak", "repetitions (-m soak)")
    group.addoption("--soak-count", type=int, default=100, help="repetitions of each test")
    group.addoption("--soak-trials", type=int, default=200, help="trials of the long run")
    group.addoption("--soak-steps", type=int, default=3300, help="steps of each of these trials")
    group.addoption("--soak-seed", type=int, default=0, help="seed of the first repetition")
    group.addoption("--soak-minutes", type=float, default=120.0, help="of the fuzz, at most")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests and the programs they start find ip, tc and prometheus; give them folders.

    In a shared folder, files of a killed mpirun stop a later one that has its process id. The list
    of runs that were made here belongs to the user.
    """
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)
    config.add_cleanup(functools.partial(os.close, config.stash[_STDERR]))
    os.environ["PATH"] = capabilities.path_with_system_folders(os.environ.get("PATH", os.defpath))
    if _MPI_FOLDER not in os.environ:  # else it is that of the process that started this one
        folder = tempfile.TemporaryDirectory(prefix="mpi-")
        config.add_cleanup(folder.cleanup)
        os.environ[_MPI_FOLDER] = folder.name
        state = tempfile.TemporaryDirectory(prefix="state-")
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name


# Folders whose tests may leave no file, socket or process open. Elsewhere libraries do: Petastorm
# leaves its files to Python, PySpark its sockets.
_CLOSES_EVERYTHING = tuple(f"tests/unit/{name}/" for name in (
    "host", "lab", "launchers", "node", "transports",
))  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the soak tests; order the groups, so that all cores have work until the end."""
    if "soak" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    places = scheduling.places([_file(item) for item in items])
    items.sort(key=lambda item: places[_file(item)])
    for item in items:
        if _file(item).startswith(_CLOSES_EVERYTHING):
            item.add_marker(pytest.mark.filterwarnings("error::ResourceWarning"))


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(scheduling.ROOT).as_posix()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without what is there already."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Run the tests of a group in one worker with `--dist loadgroup`."""
    grouped = config.getvalue("dist") == "loadgroup"
    return scheduling.GroupScheduling(config, log) if grouped else None


def _needed(item: pytest.Item) -> set[str]:
    return {name for marker in item.iter_markers("needs") for name in marker.args}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test whose time limit did not end it, and write where it stands.

    The limit is an exception in the main thread. Compiled code that waits does not see it, and it
    comes once: what cleans up after the test may wait for what hangs.
    """
    if item.config.getoption("usepdb"):
        return (yield)  # someone looks around
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + _END_S, file=item.config.stash[_STDERR], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose capability is missing."""
    for name in sorted(_needed(item)):
        reason = capabilities.why_not(name)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure if its capability is required.

    A test that also needs a capability which is missing and not required may be skipped.
    """
    report = yield
    missed = sorted(_needed(item) & capabilities.required())
    if report.skipped and missed and not _is_excused(item) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"{capabilities.REQUIRE} requires {', '.join(missed)}, but the test was skipped: "
            f"{report.longrepr}"
        )
    return report


def _is_excused(item: pytest.Item) -> bool:
    others = _needed(item) - capabilities.required()
    return any(capabilities.why_not(name) is not None for name in others)


@pytest.fixture(scope="session", autouse=True)
def _quick_jvm(shared_folder: Path) -> Iterator[None]:
    """Start every Spark of the tests with the options of QUICK_JVM and class archives."""
    archives = class_archive_options(shared_folder)
    with pytest.MonkeyPatch.context() as patch:
        for variable, flags in QUICK_JVM.items():
            own = os.environ.get(variable, "")
            patch.setenv(variable, f"{own} {flags} {archives}".lstrip())
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_model_facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Derive the facts of models of the package and of files in this process, which then imports
    torch once, and keep them in a folder of this session.

    tests/unit/train/workloads/test_facts.py has the process that derives them otherwise.
    """
    replaced = SimpleNamespace(**{**vars(subprocess), "run": _run_or_derive})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_facts, "subprocess", replaced)
        folder = tmp_path_factory.mktemp("facts")
        patch.setattr(model_facts, "default_cache_dir", lambda: folder)
        yield


def _run_or_derive(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Do what `python -m paceline.train.workloads` does with the last four words of the command."""
    task, values, data, samples = command[-4:]
    if task.startswith("paceline.") or ".py:" in task:
        with suppress(Exception):  # the process reports it
            from paceline.train.workloads.facts import derive_facts

            facts = derive_facts(task, json.loads(values), data, int(samples))
            return subprocess.CompletedProcess(command, 0, facts.model_dump_json(), "")
    return subprocess.run(command, **options)  # noqa: PLW1510  (one of the options)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for all workers of this test session."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has a folder in it
    folder = base / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def shared_cache(shared_folder: Path) -> Path:
    """Return a PACELINE_CACHE; `ensure_dataset` locks it, so each data set in it is made once."""
    make_class_archives(shared_folder)
    return shared_folder / "cache"


@pytest.fixture(scope="session")
def tiny_dataset(shared_cache: Path) -> Path:
    """Return a data set of 48 images, made by Spark; a spec with `samples = 48` and `seed = 3`
    names the same one. Read only."""
    from paceline.train.data.catalogue import ensure_dataset

    return ensure_dataset("tiny", images=48, seed=3, cache_dir=shared_cache)


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Start ranks quickly: see tests/support/forking.py."""
    with fork_server() as server:
        yield server


@pytest.fixture(scope="session")
def mock_gpu(pytestconfig: pytest.Config) -> Iterator[MockGpus]:
    """Give processes in which `device = "cuda"` is the device of tests/support/mock_gpu.py. Its
    tests need "mock-gpu"."""
    from tests.support.mock_gpu import mock_gpus  # imports torch

    assert pytestconfig.cache is not None
    with mock_gpus(pytestconfig.cache.mkdir("mock-gpu")) as gpus:
        yield gpus
