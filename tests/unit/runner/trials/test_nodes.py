"""Nodes that do not see the run directory: what they get, and what they send."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import write_status

from paceline.base.errors import EnvironmentLacks, PacelineWarning, TimedOut
from paceline.base.host.programs import own_module
from paceline.collectives.host import Process
from paceline.measure.records.documents import read_statuses, write_trial
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.plan.spec.values import CheckpointSettings
from paceline.plan.trials.trial import Trial
from paceline.runner.job import run_directory
from paceline.runner.job.context import Order, RemotePlace
from paceline.runner.job.delivery import deliver
from paceline.runner.job.job import Job, parse_job, read_trial
from paceline.runner.job.run_directory import Delivery, in_folder, new_folder
from paceline.runner.launchers.base import Command
from paceline.runner.trials import copies as nodes
from paceline.runner.trials.copies import collect, published
from paceline.train.data.remote_folder import remote_folder

# The package exports the function under the name of the module.
run_trial_module = importlib.import_module("paceline.runner.trials.run_trial")
HOST = "b"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    """Return a trial on two nodes as the launching host sees it, without a remote place."""
    made = make_job(ranks=1, nodes=2, interface="lo")
    write_trial(made.trial, made.files)
    return dataclasses.replace(made, run=None)


@pytest.fixture(params=["url", "hdfs_url"])
def place(request: pytest.FixtureRequest, job: Job) -> RemotePlace:
    """Publish the trial."""
    write_json(run_of(job).copy, {"url": request.getfixturevalue(request.param)})
    return made_place(job)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


def run_of(job: Job) -> RunFiles:
    return RunFiles(job.files.root.parents[1])


def made_place(job: Job) -> RemotePlace:
    made = published(job.trial, job.files)
    assert made is not None
    return made


def elsewhere(job: Job, place: RemotePlace | None, **changes: Any) -> Job:
    """Return the job on a host that does not see the run directory; changes: of the trial."""
    files = TrialFiles(Path("/nowhere/run/trials", job.trial.id))
    trial = job.trial.model_copy(update=changes)
    return dataclasses.replace(job, trial=trial, files=files, place=place)


def on_node(job: Job, place: RemotePlace, ranks: int = 1) -> tuple[Job, Delivery]:
    """Return the job and the delivery of the node's first rank."""
    far = elsewhere(job, place)
    own, delivery = in_folder(far, new_folder(far, HOST), HOST, ranks=ranks, is_first=True)
    assert delivery is not None
    return own, delivery


def test_what_a_node_writes_comes_to_the_run_directory(
    job: Job, place: RemotePlace, temporary: Path
) -> None:
    own, delivery = on_node(job, place)
    assert own.files.root.is_relative_to(temporary)
    assert read_trial(own.files.trial) == job.trial
    write_status(own.files, 1, "done")
    own.files.rank(1).steps.write_text("a row\n", "utf-8")
    delivery.wait()
    assert list(temporary.iterdir()) == []
    assert collect(place, job.files) is None
    assert job.files.rank(1).steps.read_text("utf-8") == "a row\n"
    assert [status.state for status in read_statuses(job.files)] == ["done"]
    assert sorted(path.name for path in job.files.root.iterdir()) == ["ranks", "trial.json"]


def test_records_of_a_killed_rank_are_sent(
    job: Job, place: RemotePlace, sleeper: subprocess.Popen[bytes]
) -> None:
    own, delivery = on_node(job, place)
    write_status(own.files, 1, pid=sleeper.pid)
    assert remote_folder(place.host(HOST)).names() == set()
    sleeper.kill()
    sleeper.wait(10)
    delivery.wait()
    assert collect(place, job.files) is None
    assert [status.state for status in read_statuses(job.files)] == ["running"]


def test_ranks_that_never_started_do_not_hold_up_the_others(
    job: Job, place: RemotePlace, sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first = Process.of(sleeper.pid)
    assert first is not None
    sleeper.kill()
    sleeper.wait(10)
    files = TrialFiles(tmp_path / "own")
    write_status(files, 1, "done")
    order = Order(
        place=place, host=HOST, folder=str(files.root), trial_root=str(files.root), ranks=2,
        first_rank=first, limit_s=600.0,
    )  # fmt: skip
    deliver(order)
    assert remote_folder(place.host(HOST)).names() == {"files", "done"}


def test_node_that_sends_nothing_is_named_and_others_are_kept(
    job: Job, place: RemotePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_folder(place.host("lost")).make()
    own, delivery = on_node(job, place)
    write_status(own.files, 1, "done")
    delivery.wait()
    monkeypatch.setattr(nodes, "_DELIVERY_S", 0.1)
    message = collect(place, job.files)
    assert message is not None
    assert message.startswith("host lost has sent no records within 0.1 s")
    assert [status.rank for status in read_statuses(job.files)] == [1]


def test_signal_in_a_trial_lets_it_fetch_what_nodes_have_sent(
    job: Job,
    place: RemotePlace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def interrupted(command: Command, _files: TrialFiles) -> Iterator[None]:
        assert command.environment.items() >= place.environment().items()
        remote_folder(place.host("lost")).make()
        own, delivery = on_node(job, place)
        write_status(own.files, 1, "done")
        delivery.wait()
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(run_trial_module, "published", lambda *_: place)
    monkeypatch.setattr(run_trial_module, "launched", interrupted)
    monkeypatch.setattr(nodes, "_AFTER_SIGNAL_S", 0.1)
    with pytest.raises(KeyboardInterrupt):
        run_trial_module.run_trial(job.trial, job.files)
    assert [status.rank for status in read_statuses(job.files)] == [1]
    said = capsys.readouterr().err
    assert f"fetching the records of other nodes from {place.url}, for at most 10.1 s" in said
    assert "host lost has sent no records within 0.1 s of the end" in said
    assert "what comes later stays there" in said


def test_copies_after_a_signal_have_a_limit(
    job: Job,
    place: RemotePlace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, delivery = on_node(job, place)
    write_status(own.files, 1, "done")
    delivery.wait()
    monkeypatch.setattr(nodes, "_COPY_AFTER_SIGNAL_S", -1e6)  # it has ended already
    nodes.collect_after_signal(place, job.files)
    said = capsys.readouterr().err
    assert "the records of other nodes cannot be fetched: " in said
    assert "could not be copied in time" in said or "no answer within 0 s" in said
    assert [path.name for path in job.files.root.iterdir()] == ["trial.json"]


def test_other_ranks_of_the_node_use_the_folder_of_the_first(job: Job, place: RemotePlace) -> None:
    far = elsewhere(job, place)
    far = dataclasses.replace(far, trial=limited(far.trial, 0.1))
    folder = new_folder(far, HOST)
    with pytest.raises(TimedOut, match=r"from the first rank of this host within 0\.1 s"):
        in_folder(far, folder, HOST, ranks=2, is_first=False)
    first, delivery = in_folder(far, folder, HOST, ranks=1, is_first=True)
    second, none = in_folder(far, folder, HOST, ranks=1, is_first=False)
    assert (first.files, None) == (second.files, none)
    write_status(first.files, 1, "done")
    assert delivery is not None
    delivery.wait()


def limited(trial: Trial, trial_s: float) -> Trial:
    limits = trial.limits.model_copy(update={"trial_s": trial_s})
    return trial.model_copy(update={"limits": limits})


def test_states_of_the_baseline_are_sent_once(job: Job, place: RemotePlace) -> None:
    replay = run_of(job).replay / "training"
    write_json(replay / "step-000000000" / "state", {"sent": 1})
    made_place(job)
    write_json(replay / "step-000000000" / "state", {"sent": 2})
    write_json(replay / "step-000000040" / "state", {"sent": 2})
    again = made_place(job)
    assert again.attempt != place.attempt
    own, delivery = on_node(job, again)
    fetched = own.files.replay("training")
    assert '"sent": 1' in (fetched / "step-000000000" / "state").read_text("utf-8")
    assert '"sent": 2' in (fetched / "step-000000040" / "state").read_text("utf-8")
    write_status(own.files, 1, "done")
    delivery.wait()


def test_rank_0_on_such_a_node_reads_the_trial_from_the_place(
    job: Job, place: RemotePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    path = elsewhere(job, None).files.trial
    assert parse_job("mpi", "train.py", ["--trial", str(path)]) == elsewhere(job, place)


def test_node_that_sees_the_run_directory_uses_it(job: Job, place: RemotePlace) -> None:
    near = dataclasses.replace(job, place=place)
    assert new_folder(near, "a") is None
    assert in_folder(near, None, "a", ranks=1, is_first=True) == (near, None)
    assert collect(place, job.files) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": CheckpointSettings(every_steps=1)}, r"leave out \[checkpoint\]"),
        ({"restarts": 1}, "leave out `restarts`"),
    ],
)
def test_trial_that_continues_needs_the_run_directory(
    job: Job, changes: dict[str, object], message: str
) -> None:
    far = elsewhere(job, RemotePlace(url="s3://bucket/run", attempt="a"), **changes)
    with pytest.raises(EnvironmentLacks, match=message) as caught:
        new_folder(far, HOST)
    assert "storage that all nodes share, under the same path, because" in str(caught.value)
    write_json(run_of(job).copy, {"url": "s3://bucket/run"})
    assert published(far.trial, job.files) is None


def test_without_a_place_the_message_names_both_ways_out(job: Job) -> None:
    with pytest.raises(EnvironmentLacks, match=r"host b: expected /nowhere/run/trials/") as caught:
        new_folder(elsewhere(job, None), HOST)
    assert "storage that all nodes share, under the same path; or write the run" in str(
        caught.value
    )
    assert "paceline run --out hdfs://" in str(caught.value)


def test_nothing_is_published_of_what_stays_on_this_host(
    make_job: Callable[..., Job], job: Job
) -> None:
    assert published(job.trial, job.files) is None  # there is no place
    write_json(run_of(job).copy, {"url": "s3://bucket/run"})
    for launcher in ("local", "spark"):  # Spark's local master
        assert published(make_job(launcher=launcher).trial, job.files) is None


def test_place_that_cannot_be_used_is_a_warning_here_and_an_error_there(
    job: Job, url: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    write_json(run_of(job).copy, {"url": url})
    place = made_place(job)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    with pytest.warns(PacelineWarning, match="access was denied") as warned:
        assert published(job.trial, job.files) is None
    assert f"only nodes that see {job.files.root} can take part" in str(warned[0].message)
    with pytest.raises(EnvironmentLacks, match="access was denied"):
        on_node(job, place)
    assert list(temporary.iterdir()) == []
    message = collect(place, job.files)
    assert message is not None
    assert message.startswith("the records of other nodes cannot be fetched: s3://")


def test_records_that_cannot_be_sent_stay_on_the_node(
    job: Job, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run_of(job).copy, {"url": url})
    place = made_place(job)

    def without_rights(name: str) -> tuple[list[str], dict[str, str]]:
        command, environment = own_module(name)
        return command, {**environment, "AWS_ACCESS_KEY_ID": "unknown"}

    monkeypatch.setattr(run_directory, "own_module", without_rights)
    own, delivery = on_node(job, place)
    write_status(own.files, 1, "done")
    delivery.wait()
    assert f"cannot be sent and stay in {delivery.order.folder}: paceline: s3:" in (
        capsys.readouterr().err
    )
    assert own.files.rank(1).status.exists()
