"""An MPI job inside barrier tasks, piece by piece, without Spark and without MPI."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support import rows
from tests.support.waiting import wait_for
from typing_extensions import Buffer

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.base.host.programs import Tool
from paceline.measure.records.files import write_json
from paceline.runner.job.job import Job, listen_on, parse_job
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers.mpi.rank import EnclosingJob, train
from paceline.runner.launchers.spark import mpi_agent as spark_mpi_agent
from paceline.runner.launchers.spark import mpi_task as spark_mpi
from paceline.runner.launchers.spark.mpi_agent import (
    DaemonStart,
    Peer,
    accept,
    connect,
    read_command,
)
from paceline.runner.launchers.spark.mpi_task import (
    TaskPlace,
    daemon_command,
    end_of_mpirun,
    environment_of_ranks,
    mpirun_command,
    run_mpi_task,
    run_mpirun,
)
from paceline.runner.launchers.supervise import Watched

TOKEN = "the-token"
ENDED = Watched(ended_by_itself=True)
# As Open MPI 5.0.11 calls its agent, with settings for the shell that ssh would start.
SHELL = (
    "PRTE_PREFIX=/far/venv;export PRTE_PREFIX;PMIX_PREFIX=/far/venv;export PMIX_PREFIX;"
    "LD_LIBRARY_PATH=/far/venv/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    "DYLD_LIBRARY_PATH=/far/venv/lib:$DYLD_LIBRARY_PATH;export DYLD_LIBRARY_PATH;"
    "/far/venv/bin/prted"
)
SSH_WORDS = [
    SHELL, "--leave-session-attached", "--prtemca", "ess", '"env"',
    "--prtemca", "prte_hnp_uri", '"prterun-a-7@0.0;tcp://10.0.0.1:5000:24"',
]  # fmt: skip


def test_daemon_is_taken_out_of_the_shell_command():
    start = read_command(SSH_WORDS)
    assert start.arguments == (
        "--leave-session-attached", "--prtemca", "ess", "env",
        "--prtemca", "prte_hnp_uri", "prterun-a-7@0.0;tcp://10.0.0.1:5000:24",
    )  # fmt: skip
    assert start.variables == ("PRTE_PREFIX", "PMIX_PREFIX", "LD_LIBRARY_PATH")


def test_daemon_of_an_mpi_in_its_usual_place_sets_nothing():
    assert read_command(["prted", "--leave-session-attached"]) == DaemonStart(
        ("--leave-session-attached",), ()
    )
    assert read_command(["/opt/bin/prted --daemonize"]) == DaemonStart(("--daemonize",), ())


def test_command_without_the_daemon_is_refused():
    with pytest.raises(UsageError, match="expected mpirun to start prted"):
        read_command(["rm -rf /tmp/prted-files; orted", "--x"])


def test_daemon_beside_this_hosts_mpirun_is_taken(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "prted").touch()
    start = DaemonStart(("--x",), ("PRTE_PREFIX", "LD_LIBRARY_PATH"))
    command, environment = daemon_command(
        start, tmp_path / "bin" / "mpirun", {"LD_LIBRARY_PATH": "/own", "A": "b"}
    )
    assert command == [f"{tmp_path}/bin/prted", "--x"]
    assert environment == {
        "PRTE_PREFIX": str(tmp_path), "LD_LIBRARY_PATH": f"{tmp_path}/lib:/own", "A": "b",
    }  # fmt: skip
    with pytest.raises(EnvironmentLacks, match=r"expected Open MPI's daemon .*/none/prted beside"):
        daemon_command(start, tmp_path / "none" / "mpirun", {})


def test_environment_forgets_other_jobs_and_finds_python_and_package(job, monkeypatch):
    monkeypatch.setattr("sys.executable", "/container/7/bin/python")
    monkeypatch.setattr(spark_mpi, "PACKAGE", Path("/spark/files/paceline.zip/paceline"))
    own = {
        "PATH": "/usr/bin", "PYTHONPATH": "/spark/pyspark.zip", "HOME": "/root",
        "SLURM_JOB_ID": "9", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_MCA_btl_tcp_links": "2", "OMP_NUM_THREADS": "8",
    }  # fmt: skip
    enclosing = EnclosingJob("spark", [0, 2], [4711])
    made = environment_of_ranks(job.trial, enclosing, own)
    assert made["PATH"] == "/container/7/bin:/usr/bin"
    assert made["PYTHONPATH"] == "/spark/files/paceline.zip:/spark/pyspark.zip"
    monkeypatch.setattr("os.environ", made)
    assert EnclosingJob.from_environment() == enclosing
    assert (made["HOME"], made["OMPI_MCA_btl_tcp_links"]) == ("/root", "2")
    assert made["OMP_NUM_THREADS"] == "1"
    assert not {"SLURM_JOB_ID", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"} & set(made)


def test_one_node_is_started_as_mpirun_starts_it_alone(make_job, monkeypatch):
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    job = make_job(transport="mpi", launcher="spark")
    words = mpirun_command(Path("/opt/mpirun"), job, ["127.0.0.1"] * 2, Path("/tmp/seq"))
    assert words == [
        "/opt/mpirun", "-n", "2", "--bind-to", "none", "--host", "localhost:2",
        "--mca", "btl", "self,sm", "--pmixmca", "ptl_base_if_include", "lo",
        "python", "-m", "paceline.runner.launchers.mpi.rank",
        "--trial", str(job.files.trial), "--out", str(job.run.root),
    ]  # fmt: skip


def test_each_rank_goes_to_the_host_of_its_task(make_job, monkeypatch):
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    monkeypatch.setattr(spark_mpi, "slots_of_this_node", lambda _place: 2)
    job = make_job(transport="mpi", interface="eth0", launcher="spark")
    place = job.trial.placement.model_copy(update={"nodes": 2})
    trial = job.trial.model_copy(update={"placement": place, "interface": "eth0"})
    job = Job(trial=trial, files=job.files, run=None)
    nodes = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    words = mpirun_command(Path("/opt/mpirun"), job, nodes, Path("/tmp/seq"))
    assert words == [
        "/opt/mpirun", "-n", "4", "--bind-to", "none",
        "--host", "10.0.0.1:2,10.0.0.2:2", "--map-by", "seq:file=/tmp/seq",
        "--leave-session-attached", "--prtemca", "plm", "ssh",
        "--prtemca", "plm_ssh_agent", "python -m paceline.runner.launchers.spark.mpi_agent",
        "--prtemca", "plm_ssh_no_tree_spawn", "1",
        "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0",
        "--prtemca", "prte_if_include", "eth0",
        "python", "-m", "paceline.runner.launchers.mpi.rank", "--trial", str(job.files.trial),
    ]  # fmt: skip


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@contextmanager
def connecting(listener, token, hello):
    """Connect in a thread, as another process would; yield the list of the connection."""
    thread, made = in_thread(lambda: connect(listener.getsockname(), token, hello, 20.0))
    try:
        yield made
    finally:
        thread.join(timeout=20)
        for peer in made:
            peer.close()


def test_only_who_knows_the_token_is_heard(listener):
    thread, came = in_thread(lambda: accept(listener, TOKEN, 20.0))
    with connecting(listener, "wrong", {"rank": 7}) as wrong:
        wait_for(lambda: wrong, 20.0, "the accepted connection with the wrong token")
        with connecting(listener, TOKEN, {"rank": 1}):
            thread.join(timeout=20)
    [(peer, hello)] = came
    with peer:
        assert hello == {"rank": 1}
    with socket.create_connection(listener.getsockname()) as intruder:
        intruder.sendall(b'["token"]\n')
        assert accept(listener, TOKEN, 0.2) is None


class Recorder(socket.socket):
    """Keeps what was sent, as a program that reads the network would."""

    sent = b""

    def sendall(self, data: Buffer, flags: int = 0, /) -> None:
        self.sent += bytes(data)
        super().sendall(data, flags)


def test_token_is_not_sent_and_a_recorded_message_not_heard_again(listener, monkeypatch):
    with Recorder() as recorder:
        recorder.connect(listener.getsockname())
        monkeypatch.setattr("socket.create_connection", lambda *_args, **_options: recorder)
        with connecting(listener, TOKEN, {"rank": 1}):
            came = accept(listener, TOKEN, 20.0)
            assert came is not None
            came[0].close()
        recorded = recorder.sent
    assert b"rank" in recorded
    assert TOKEN.encode() not in recorded
    with socket.socket() as intruder:
        intruder.connect(listener.getsockname())
        intruder.sendall(recorded)
        assert accept(listener, TOKEN, 0.2) is None


def test_intruder_that_sends_something_odd_does_not_stop_the_task(listener):
    address = listener.getsockname()
    with socket.create_connection(address) as accented, socket.create_connection(address) as nested:
        accented.sendall('{"text": "", "code": "é"}\n'.encode())
        nested.sendall(b"[" * 50_000 + b"\n")
        with connecting(listener, TOKEN, {"rank": 1}):
            came = accept(listener, TOKEN, 20.0)
            assert came is not None
            with came[0]:
                assert came[1] == {"rank": 1}


def test_messages_follow_one_another_and_an_end_is_noticed():
    one, other = socket.socketpair()
    here = Peer(one, TOKEN, "n", accepted=True)
    there = Peer(other, TOKEN, "n", accepted=False)
    with here:
        there.send({"a": 1})
        there.send({"b": 2})
        assert here.receive(1.0) == {"a": 1}
        assert here.receive(1.0) == {"b": 2}
        assert not here.has_ended(0.01)
        with pytest.raises(TimedOut):
            here.receive(0.01)
        there.close()
        assert here.has_ended(1.0)
        assert here.receive(1.0) is None


def test_message_that_was_changed_or_sent_back_is_not_heard():
    one, other = socket.socketpair()
    here = Peer(one, TOKEN, "n", accepted=True)
    with here, other:
        here.send({"status": 0})
        own = other.recv(1024)
        other.sendall(own)
        assert here.receive(1.0) is None
        there = Peer(other, TOKEN, "n", accepted=False)
        one.sendall(own.replace(b"0", b"1", 1))
        assert there.receive(1.0) is None
        one.sendall(own)
        assert there.receive(1.0) == {"status": 0}


def test_nobody_at_the_address_is_told(listener):
    address = listener.getsockname()
    listener.close()
    with pytest.raises(EnvironmentLacks, match="expected a barrier task of this job to answer"):
        connect(address, TOKEN, {}, 0.01)


def places(addresses, hosts) -> list[TaskPlace]:
    return [
        TaskPlace(host=host, address=a.host, port=a.port, secret="", executor=40 + n)
        for n, (a, host) in enumerate(zip(addresses, hosts, strict=True))
    ]


@pytest.fixture
def far_job(make_job, monkeypatch):
    """A job of two ranks whose run directory is there; mpirun is not."""
    job = make_job(transport="mpi", launcher="spark")
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(job.trial.model_dump_json())
    mpirun = Tool(path=Path("/none/bin/mpirun"), version="5", why="test")
    monkeypatch.setattr(spark_mpi, "find_mpirun", lambda _asked: mpirun)
    return job


def in_thread(call) -> tuple[threading.Thread, list]:
    ends: list = []
    thread = threading.Thread(target=lambda: ends.append(call()))
    thread.start()
    return thread, ends


def test_daemon_of_another_host_is_started_by_its_first_task(far_job, monkeypatch, tmp_path, capfd):
    daemon = tmp_path / "prted"
    daemon.write_text("#!/bin/sh\necho cannot find it\nexit 3\n")
    daemon.chmod(0o755)
    beside = Tool(path=tmp_path / "mpirun", version="5", why="test")
    monkeypatch.setattr(spark_mpi, "find_mpirun", lambda _asked: beside)
    addresses = [listen_on("lo"), listen_on("lo")]
    tasks = places(addresses, ["a", "b"])

    def mpirun(_job, _words, environment) -> RankEnd:
        """Calls the agent, as the real one does for host b, and ends with its status."""
        told = json.loads(environment["PACELINE_SPARK_AGENT"])
        leaders = {"10.9.9.9": [tasks[1].address, tasks[1].port]}
        monkeypatch.setenv("PACELINE_SPARK_AGENT", json.dumps({**told, "leaders": leaders}))
        status = spark_mpi_agent.main(["10.9.9.9", "/elsewhere/prted", "--x"])
        return RankEnd(rank=0, error=rows.failure(f"DaemonEnded: {status}"))

    monkeypatch.setattr(spark_mpi, "run_mpirun", mpirun)
    other, ends = in_thread(lambda: run_mpi_task(far_job, 1, tasks, addresses[1], TOKEN))
    end = run_mpi_task(far_job, 0, tasks, addresses[0], TOKEN)
    other.join(timeout=20)
    assert str(end.error) == "DaemonEnded: 3"
    assert "prted on 10.9.9.9: cannot find it" in capfd.readouterr().err
    assert [end.error for end in ends] == [None]  # how it went is task 0's to say


def test_tasks_hold_their_slots_until_task_0_ends(far_job, monkeypatch):
    addresses = [listen_on("lo"), listen_on("lo")]
    tasks = places(addresses, ["a", "a"])
    held = []

    def mpirun(_job, _words, _environment):
        time.sleep(0.2)
        held.append(other.is_alive())

    monkeypatch.setattr(spark_mpi, "run_mpirun", mpirun)
    other, ends = in_thread(lambda: run_mpi_task(far_job, 1, tasks, addresses[1], TOKEN))
    run_mpi_task(far_job, 0, tasks, addresses[0], TOKEN)
    other.join(timeout=20)
    assert held == [True]
    assert len(ends) == 1


def test_task_that_does_not_come_is_named(far_job):
    address = listen_on("lo")
    job = limited(far_job, rendezvous_s=0.1)
    with pytest.raises(EnvironmentLacks, match=r"task\(s\) 1 \(on b\) did not reach task 0"):
        run_mpi_task(job, 0, places([address, address], ["a", "b"]), address, TOKEN)


def write_status(job, rank, state, error=None, **changes) -> None:
    rows.write_status(job.files, rank, state, error, **{"host": "h", "pid": 7, **changes})


def test_ranks_that_are_done_are_a_good_end(job):
    write_status(job, 0, "done")
    assert end_of_mpirun(job, 0, [], ENDED).exit_code == 5  # where is rank 1?
    write_status(job, 1, "done")
    assert end_of_mpirun(job, 0, [], ENDED).error is None


def test_killed_rank_is_named_from_mpiruns_words(job):
    write_status(job, 0, "failed", "Terminated: x", secondary=True)
    write_status(job, 1, "running")
    said = ["prterun noticed that process rank 1 with PID 7 on node h exited on signal 9"]
    end = end_of_mpirun(job, 137, said, ENDED)
    assert (end.rank, end.exit_code) == (1, 5)
    assert "(host h, pid 7) was killed by SIGKILL (signal 9)" in str(end.error)


def test_error_of_a_rank_outweighs_mpiruns_words(job):
    write_status(job, 0, "failed", "PeerLost: x", secondary=True)
    write_status(job, 1, "failed", "DataError: photo 3 is damaged")
    end = end_of_mpirun(job, 4, ["MPI_ABORT was invoked on rank 0"], ENDED)
    assert (end.rank, end.exit_code, str(end.error)) == (1, 4, "DataError: photo 3 is damaged")


def test_lost_daemon_is_told_with_the_ranks_of_its_host(job):
    write_status(job, 0, "running", host="first.cluster")
    write_status(job, 1, "failed", "Terminated: x", secondary=True, host="second.cluster")
    said = [
        "PRTE has lost communication with a remote daemon.",
        "  HNP daemon   : [prterun-first-17229@0,0] on node first",
        "  Remote daemon: [prterun-first-17229@0,1] on node second",
    ]
    end = end_of_mpirun(job, 0, said, ENDED)
    assert (end.rank, end.exit_code) == (1, 5)
    assert "daemon on host second was lost, and its ranks (1) with it" in str(end.error)


def test_refusal_that_a_rank_has_reported_outweighs_mpiruns_words(job):
    refused = rows.failure("EnvironmentLacks: rank 1 is on host b", 1)
    write_json(job.files.reported, refused)
    end = end_of_mpirun(job, 213, ["paceline: another line"], ENDED)
    assert (end.rank, end.exit_code, end.error) == (1, 3, refused)


def test_refusal_before_any_rank_could_write_is_quoted(job):
    said = ["x", "paceline: world size: expected 2 ranks, the launcher made 1", "more"]
    end = end_of_mpirun(job, 3, said, ENDED)
    assert (end.exit_code, str(end.error)) == (
        3, "EnvironmentLacks: world size: expected 2 ranks, the launcher made 1",
    )  # fmt: skip


def test_mpirun_that_cannot_start_ranks_says_so(job):
    end = end_of_mpirun(job, 213, ["", "No network interfaces were found"], ENDED)
    assert end.exit_code == 5
    assert str(end.error) == "RankFailed: mpirun ended with 213: No network interfaces were found"


def test_limit_is_reported_with_the_first_rank_that_is_not_done(job):
    write_status(job, 0, "done")
    end = end_of_mpirun(job, -15, [], Watched(timed_out=True))
    assert (end.rank, end.exit_code) == (1, 6)


def limited(job: Job, **limits: float) -> Job:
    changed = job.trial.limits.model_copy(update=limits)
    trial = job.trial.model_copy(update={"limits": changed})
    return Job(trial=trial, files=job.files, run=None)


def test_ranks_that_never_start_end_mpirun(job):
    job = limited(job, rendezvous_s=0.2, trial_s=60.0)
    write_status(job, 1, "running")
    end = run_mpirun(job, ["sleep", "60"], {"PATH": "/usr/bin:/bin"})
    assert (end.exit_code, end.rank) == (6, 0)
    assert "rank(s) 0 did not start within 0.2 s" in str(end.error)


def test_trial_that_takes_too_long_is_ended(job):
    job = limited(job, trial_s=0.2)
    end = run_mpirun(job, ["sleep", "60"], {"PATH": "/usr/bin:/bin"})
    assert end.exit_code == 6
    assert str(end.error).startswith("TimedOut: not done within its limit of 0.2 s")


def test_what_mpirun_says_is_passed_on(job, capsys):
    end = run_mpirun(job, ["sh", "-c", "echo no slots; exit 9"], {"PATH": "/usr/bin:/bin"})
    assert str(end.error) == "RankFailed: mpirun ended with 9: no slots"
    assert capsys.readouterr().err == "no slots\n"


class FakeWorld:
    """A rank of 2, both on this host."""

    size, ranks_on_node = 2, 2

    def __init__(self, rank, job=None):
        self.rank = self.local_rank = rank
        self._job = job

    def of_rank_0(self, value):
        return self._job if value is None else value

    def gather(self, value):
        return [value, value]

    def of_this_node(self, value):
        return value


def test_rank_that_mpirun_placed_elsewhere_refuses(far_job, monkeypatch):
    for name, value in EnclosingJob("spark", [0], []).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentLacks, match=r"where spark has the tasks \[0\]"):
        train(FakeWorld(1, far_job))


def test_trial_of_spark_is_refused_by_an_mpi_job_of_its_own(far_job, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--trial", str(far_job.files.trial)])
    with pytest.raises(UsageError, match='for launcher "spark", this is "mpi"'):
        train(FakeWorld(0))


def test_ranks_keep_the_run_directory_of_a_job_by_hand(far_job):
    words = mpirun_command(Path("mpirun"), far_job, ["h", "h"], Path("/tmp/seq"))
    words = words[words.index("--trial") :]
    assert parse_job("spark", "train.py", words) == far_job
