"""Who is blamed for a failed trial, with which code, and what the user is shown."""

from types import SimpleNamespace

import pytest
from tests.support.rows import failure

from paceline.base.errors import ExitCode
from paceline.measure.records.files import write_json
from paceline.measure.records.rows import TERMINATED
from paceline.runner.launchers.base import launcher_for
from paceline.runner.launchers.diagnosis import diagnose, log_tail
from paceline.runner.launchers.supervise import Ended

PEER = "PeerLost: connection closed by peer"
SOCKET_CLOSED = """\
[a:00000] *** An error occurred in Socket closed
[a:00000] *** reported by process [3137732609,0]
[a:00000] *** on a NULL communicator
[a:00000] *** Unknown error
[a:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
[a:00000] ***    and MPI will try to terminate your MPI job as well)
prterun has exited due to process rank 0 with PID 0 on node a calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
"""
LOST_DAEMON = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-a-17229@0,0] on node a
  Remote daemon: [prterun-a-17229@0,1] on node b
"""
LOST_SHELL = """\
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable.

  Local host:    a
  Remote host:   b
  Daemon exit status: 0
"""


def ended(exit_status=5, **changes) -> Ended:
    values = {
        "exit_status": exit_status,
        "launched_unix_s": 100.0,
        "ended_unix_s": 107.5,
        "timed_out": False,
    }
    return Ended(**{**values, **changes})


@pytest.fixture
def outcome_of(make_launch_trial, files):
    def diagnosed(end, launcher="mpi", log="", reported=None):
        files.root.mkdir(parents=True, exist_ok=True)
        files.launcher_log.write_text(log)
        if reported is not None:
            write_json(files.reported, reported)
        return diagnose(make_launch_trial(launcher), files, end, launcher_for(launcher))

    return diagnosed


def test_all_ranks_done_is_ok(outcome_of, write_status):
    write_status(0, "done")
    write_status(1, "done")
    outcome = outcome_of(ended(0))
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("ok", 0, None)
    assert (outcome.launched_unix_s, outcome.ended_unix_s) == (100.0, 107.5)
    assert outcome.message is None


def test_ranks_that_are_done_are_ok_although_a_process_had_to_be_ended(outcome_of, write_status):
    write_status(0, "done")
    assert outcome_of(ended(-15, stuck_at_exit=True)).status == "failed"
    write_status(1, "done")
    assert outcome_of(ended(-15, stuck_at_exit=True)).status == "ok"
    assert outcome_of(ended(-15)).status == "failed"


def test_launcher_that_ends_well_without_all_ranks_is_a_failure(outcome_of, write_status):
    write_status(0, "done")
    outcome = outcome_of(ended(0))
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert "1 of 2 ranks finished" in outcome.message


def test_rank_killed_without_a_word_is_named(outcome_of, write_status, files):
    write_status(0, "failed", PEER, secondary=True)
    write_status(1, "running", pid=4711)
    files.rank(1).log.write_text("\n".join(f"line {n}" for n in range(50)))
    outcome = outcome_of(ended(137), log="prterun noticed that process rank 1 with PID 4711 on")
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("failed", 5, 1)
    assert "rank 1 of 2 (host elsewhere, pid 4711) was killed or crashed" in outcome.message
    assert "  | line 49" in outcome.message
    assert "  | line 30" in outcome.message
    assert "line 29" not in outcome.message
    assert str(files.rank(1).log) in outcome.message


MPIRUN = (
    "prterun noticed that process rank 1 with PID 4711 on node h exited on\n"
    "signal {number} ({name})."
)
TORCHRUN = (
    "E1129 torch/distributed/elastic] failed (exitcode: -15) local_rank: 0 (pid: 4710) of binary\n"
    "E1129 torch/distributed/elastic] failed (exitcode: -{number}) local_rank: 1 (pid: 4711) of x\n"
)


@pytest.mark.parametrize("log", [MPIRUN, TORCHRUN], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (9, "was killed by SIGKILL (signal 9): by a person, a scheduler, or the kernel for lack"),
        (11, "crashed with SIGSEGV (signal 11): compiled code used memory"),
        (7, "crashed with SIGBUS (signal 7): "),
        (12, "was ended by SIGUSR2 (signal 12)"),
        (99, "was ended by signal 99; it wrote"),
    ],
)
def test_signal_that_ended_a_rank_is_named(log, number, words, outcome_of, write_status, files):
    write_status(0, "failed", PEER, secondary=True)
    write_status(1, "running", pid=4711)
    files.rank(1).log.write_text("step 17\n")
    message = outcome_of(
        ended(1, dead_ranks=(1,)), log=log.format(number=number, name="Name")
    ).message
    assert f"rank 1 of 2 (host elsewhere, pid 4711) {words}" in message
    assert "  | step 17" in message


def test_last_words_of_compiled_code_are_quoted(outcome_of, write_status, files):
    write_status(1, "running", pid=4711)
    files.rank(1).log.write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 400 vs 40\n"
    )
    message = outcome_of(ended(1, dead_ranks=(1,)), log=TORCHRUN.format(number=6)).message
    assert 'gave up; it wrote "[enforce fail at pair.cc:456] op.preamble' in message
    assert '400 vs 40"; the launcher ended' in message


RULE = 74 * "-"
NO_ROOM = f"""\
{RULE}
It appears as if there is not enough space for /dev/shm/x (the shared-memory backing
file). It is likely that your MPI job will now either abort or experience
performance degradation.

  Local host:  a
  Space Requested: 16777216 B
  Space Available: 1 B
{RULE}
{RULE}
prterun noticed that a process with PID 0 on node a exited on
signal 7 (Bus error).
{RULE}
"""
FILLED = f"""\
{RULE}
WARNING: Open MPI will create a shared memory backing file in a directory
that appears to be mounted on a network filesystem.
{RULE}
{RULE}
All nodes which are allocated for this job are already filled.
{RULE}
"""

PPR = f"""\
{RULE}
Your job has requested more processes than the ppr for
this topology can support:

  App: /bin/python
  Number of procs:  2
{RULE}
"""
REQUESTED = "Your job has requested more processes than"
HOSTFILE = "; name hosts with enough slots in [mpi] hostfile, or let `paceline lab run SPEC` make"


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        (14, NO_ROOM, "It appears as if there is not enough space"),
        (213, FILLED, f"All nodes which are allocated for this job are already filled.{HOSTFILE}"),
        (213, PPR, f"{REQUESTED} the ppr for this topology can support{HOSTFILE}"),
    ],
)
def test_reason_that_mpirun_gives_is_passed_on(outcome_of, status, log, said):
    message = outcome_of(ended(status), log=log).message
    assert f"ended with status {status} and 0 of 2 ranks finished" in message
    assert f"; the launcher's log says: {said}" in message


def test_signal_of_a_rank_without_a_status_is_named(outcome_of):
    message = outcome_of(ended(1), log=MPIRUN.format(number=9, name="Killed")).message
    assert "rank 1 of 2 failed before it could write a status: was killed by SIGKILL" in message


def test_killed_rank_is_named_although_mpi_ended_its_peer_first(outcome_of, write_status):
    write_status(0, "running", host="a")
    write_status(1, "running", host="b", pid=4711)
    outcome = outcome_of(ended(14, dead_ranks=(0,)), log=SOCKET_CLOSED)
    assert (outcome.exit_code, outcome.failed_rank) == (5, 1)
    assert "rank 1 of 2 (host b, pid 4711) was killed or crashed" in outcome.message


@pytest.mark.parametrize(
    ("also", "rank"), [("", 2), ("MPI_ABORT was invoked on rank 1 in communicator", 1)]
)
def test_rank_that_ended_after_its_peer_is_not_named(also, rank, outcome_of, write_status):
    for number in range(4):
        write_status(number, "running", host="ab"[number // 2])
    # Ranks 0 and 1 lost their peers; the message of the one and the end of the other came first.
    log = SOCKET_CLOSED.replace("process rank 0", "process rank 1") + also
    assert outcome_of(ended(14, dead_ranks=(0, 1)), log=log).failed_rank == rank


@pytest.mark.parametrize(
    ("log", "name", "ranks", "dead"),
    [
        (LOST_DAEMON, "b", " (1)", (0,)),
        (LOST_DAEMON.replace("on node b", "on node 10.0.0.2"), "10.0.0.2", "", ()),
        (LOST_SHELL, "b", " (1)", (0,)),
    ],
    ids=["name", "address", "shell"],
)
def test_host_that_mpirun_lost_is_named_with_its_ranks(
    log, name, ranks, dead, outcome_of, write_status
):
    write_status(0, "failed", TERMINATED, secondary=True, host="a")
    write_status(1, "running", host="b.cluster", pid=4711)
    outcome = outcome_of(ended(0, dead_ranks=dead), log=log)
    assert (outcome.exit_code, outcome.failed_rank) == (5, 1)
    said = f"wrote no error; the launcher says: MPI's daemon on host {name} was lost, and its ranks"
    assert f"{said}{ranks} with it" in outcome.message


def test_own_error_outweighs_a_host_that_mpirun_lost_for_it(outcome_of, write_status):
    write_status(0, "failed", "DataError: photo 3 is damaged", host="a")
    write_status(1, "running", host="b")
    outcome = outcome_of(ended(4), log=LOST_DAEMON)
    assert (outcome.exit_code, outcome.failed_rank) == (4, 0)
    assert "failed: DataError: photo 3 is damaged" in outcome.message


def test_rank_seen_dying_is_named_where_the_log_is_silent(outcome_of, write_status):
    write_status(0, "running")
    write_status(1, "running")
    assert outcome_of(ended(1, dead_ranks=(1,))).failed_rank == 1


def test_launcher_may_know_why_a_rank_was_asked_to_end(outcome_of, write_status):
    for rank in (0, 1):
        write_status(rank, "failed", TERMINATED, secondary=True)
    reported = failure("RankFailed: the Python of its task was killed", 1)
    outcome = outcome_of(ended(5), launcher="spark", reported=reported)
    assert "was asked to end; the launcher says: RankFailed: the Python" in outcome.message


def test_rank_that_only_missed_its_peer_is_never_blamed(outcome_of, write_status):
    write_status(0, "failed", PEER, secondary=True)
    write_status(1, "failed", "DataError: photo 3 is damaged")
    outcome = outcome_of(ended(5), log="MPI_ABORT was invoked on rank 0 in communicator")
    assert (outcome.failed_rank, outcome.exit_code, outcome.status) == (1, 4, "refused")
    assert "photo 3 is damaged" in outcome.message


@pytest.mark.parametrize(
    ("error", "code"),
    [("UsageError: x", 2), ("DataError: x", 4), ("TimedOut: x", 6), ("ValueError: x", 5),
     ("PacelineError: x", 5), ("ExitCode: x", 5), ("", 5)],
)  # fmt: skip
def test_exit_code_is_that_of_the_ranks_error(error, code, outcome_of, write_status):
    write_status(0, "failed", error)
    assert outcome_of(ended(1)).exit_code == code


@pytest.mark.parametrize("has_written", [True, False])
def test_launchers_log_is_read_only_if_no_record_has_the_cause(
    has_written, make_launch_trial, files, write_status
):
    error = failure("DataError: photo 3 is damaged", 1)
    write_status(0, "running")
    write_status(1, "failed" if has_written else "running", error if has_written else None)
    if not has_written:
        write_json(files.reported, error)
    files.launcher_log.write_text(LOST_DAEMON + "\njava.io.IOException: x\n")
    launcher = SimpleNamespace(failed_rank=pytest.fail)
    outcome = diagnose(make_launch_trial(), files, ended(1, dead_ranks=(0,)), launcher)
    assert (outcome.failed_rank, outcome.exit_code, outcome.error) == (1, 4, error)
    assert "DataError: photo 3 is damaged" in outcome.message.splitlines()[0]


def test_launcher_that_gave_up_a_rank_outweighs_what_the_rank_lost_then(outcome_of, write_status):
    write_status(1, "failed", PEER, secondary=True)
    late = failure("TimedOut: round 3: rank 1 did not end it", 1)
    outcome = outcome_of(ended(6), launcher="spark", reported=late)
    assert (outcome.failed_rank, outcome.exit_code) == (1, 6)
    assert f"ended with {PEER}; the launcher says: TimedOut: round 3" in outcome.message


def test_job_that_refused_before_any_rank_keeps_its_code_and_words(outcome_of):
    outcome = outcome_of(ended(3), log="paceline: world size: expected 2 ranks, got 1\n")
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("refused", 3, None)
    assert "  | paceline: world size: expected 2 ranks, got 1" in outcome.message


def test_rank_that_was_refused_before_its_status_is_told_in_the_job_scripts_words(outcome_of):
    log = "paceline: host b: no run directory\nMPI_ABORT was invoked on rank 1 in communicator\n"
    outcome = outcome_of(ended(3), log=log)
    assert (outcome.exit_code, outcome.failed_rank) == (3, 1)
    told = "rank 1 of 2 failed before it could write a status: host b: no run directory"
    assert outcome.message.splitlines()[0].endswith(told)


def test_job_that_failed_before_any_rank_is_told_in_its_last_error(outcome_of):
    error = 'Exception in thread "main" java.io.IOException: Cannot run program "./env/bin/python"'
    log = (
        "26/11/22 12:26:21 WARN Utils: Your hostname resolves to a loopback address\n"
        f"{error}\n"
        "\tat java.base/java.lang.ProcessBuilder.start(Unknown Source)\n"
        "Caused by: java.io.IOException: error=2, No such file or directory\n"
        "26/11/22 12:26:21 INFO ShutdownHookManager: Shutdown hook called\n"
    )
    first_line = outcome_of(ended(1), launcher="spark", log=log).message.splitlines()[0]
    assert first_line.endswith(f"0 of 2 ranks finished; the launcher's log says: {error}")


def test_time_limit_says_which_ranks_were_not_done(outcome_of, write_status):
    write_status(0, "done")
    write_status(1, "running")
    outcome = outcome_of(ended(143, timed_out=True))
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("timed_out", 6, None)
    assert "limit of 1800 s" in outcome.message
    assert "ranks not done: 1" in outcome.message


def test_what_the_job_script_says_goes_before_errors_of_its_jvm(outcome_of):
    log = "paceline: warning: slow\npaceline: the queue has no room\norg.a.YarnException: x\n"
    outcome = outcome_of(ended(ExitCode.ENVIRONMENT), launcher="spark", log=log)
    assert outcome.exit_code == ExitCode.ENVIRONMENT
    assert outcome.message.splitlines()[0].endswith("says: the queue has no room")


def test_time_limit_counts_ranks_that_never_started(outcome_of):
    outcome = outcome_of(ended(-9, timed_out=True), launcher="mpi")
    assert "ranks not done: 0, 1" in outcome.message


def test_ranks_that_did_not_start_in_time_are_named(outcome_of, write_status):
    write_status(0, "failed", PEER, secondary=True)
    outcome = outcome_of(ended(-15, missing_ranks=(1,)))
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("timed_out", 6, None)
    assert "rank(s) 1 did not start within" in outcome.message


def test_processes_that_stayed_are_told(outcome_of, write_status):
    write_status(0, "running")
    assert "could not be ended: 7 8" in outcome_of(ended(left_behind=(7, 8))).message


def test_log_tail_leaves_out_the_frames_of_a_jvm(tmp_path):
    log = tmp_path / "log"
    log.write_text("cause\n\tat org.a.B$.c(D.scala:1)\n\t... 32 more\n    at home in it\nlast\n")
    assert log_tail(log) == ["cause", "    at home in it", "last"]
    assert log_tail(tmp_path / "none") == []


def test_log_tail_leaves_out_the_frames_of_torchs_library(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "[W1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=17): Socket Timeout\n"
        "Exception raised from recvBytes at Utils.hpp:784 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in libc10.so)\n"
        "frame #19: <unknown function> + 0x2724a (0x7f in libc.so.6)\n"
        "paceline: rank 1 of 2 failed: TimedOut: late\n"
    )
    assert log_tail(log) == [
        "[W1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=17): Socket Timeout",
        "paceline: rank 1 of 2 failed: TimedOut: late",
    ]


def test_wordless_rank_is_told_in_the_words_of_the_job_script(outcome_of, write_status):
    write_status(0, "running")
    write_status(1, "running", pid=4711)
    reported = failure("TimedOut: round 3: rank 1 (elsewhere) did not end it", 1)
    outcome = outcome_of(ended(5, dead_ranks=(0,)), reported=reported)
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("timed_out", 6, 1)
    said = "rank 1 of 2 (host elsewhere, pid 4711) wrote no error; the launcher says: TimedOut: rou"
    assert said in outcome.message
