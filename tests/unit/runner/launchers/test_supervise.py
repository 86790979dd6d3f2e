"""Small programs under supervision: whatever happens, nothing of theirs is left."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.running import running
from tests.support.waiting import wait_for

from paceline.base.errors import PacelineWarning
from paceline.base.host.processes import is_alive
from paceline.collectives.host import host_name
from paceline.measure.records.documents import read_statuses
from paceline.runner.launchers import supervise as module
from paceline.runner.launchers.base import Command
from paceline.runner.launchers.supervise import WaitLimits, Watch, Watched, launched, supervise

# A tree with everything that is hard to find: a grandchild in a session of its own whose parent
# has gone, and one that will not listen.
TREE = """
import os, signal, subprocess, sys, time
pids = open(sys.argv[1], "w")
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    orphan = os.fork()
    if orphan:
        print(orphan, file=pids, flush=True)
        os._exit(0)
    time.sleep(300)
os.wait()
print(child.pid, file=pids, flush=True)
print(os.getpid(), file=pids, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "_STATUS_INTERVAL_S", 0.05)


def limits(trial_s: float = 60.0, **others: Any) -> WaitLimits:
    return WaitLimits(trial_s=trial_s, **{"notice_s": 0.2, **others})


def python(program: str, *arguments: object) -> Command:
    return Command(argv=(sys.executable, "-c", program, *map(str, arguments)))


def pids_in(path: Path) -> list[int]:
    pids = [int(line) for line in path.read_text().split()]
    assert len(pids) == 3
    return pids


def test_end_status_and_output_are_kept(files):
    before = time.time()
    ended = supervise(python("print('out'); raise SystemExit(7)"), files, limits(30))
    assert ended.exit_status == 7
    assert not ended.timed_out
    assert before <= ended.launched_unix_s <= ended.ended_unix_s <= time.time()
    assert files.launcher_log.read_text() == "out\n"


def test_environment_is_added_to_ours(files, monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_OURS", "1")
    program = "import os; print(os.environ['PACELINE_TEST_OURS'], os.environ['THEIRS'])"
    command = Command(argv=(sys.executable, "-c", program), environment={"THEIRS": "2"})
    assert supervise(command, files, limits(30)).exit_status == 0
    assert files.launcher_log.read_text() == "1 2\n"


def test_launcher_gets_folders_that_exist_until_its_end(files):
    program = "import os; f = os.environ['FOLDER']; open(f + '/left', 'w'); print(f)"
    command = Command(
        argv=(sys.executable, "-c", program), temporary=lambda f: {"FOLDER": str(f.memory)}
    )
    assert supervise(command, files, limits(30)).exit_status == 0
    folder = Path(files.launcher_log.read_text().strip())
    assert folder.name.startswith("paceline-")
    assert not folder.exists()


def test_program_that_does_not_exist_ends_127_and_says_so(files):
    ended = supervise(Command(argv=("/no/such/program",)), files, limits(30))
    assert ended.exit_status == 127
    assert "/no/such/program" in files.launcher_log.read_text()


def test_pid_is_the_launchers(files):
    with launched(python("import os; print(os.getpid())"), files) as launcher:
        launcher.wait(limits(30))
    assert files.launcher_log.read_text() == f"{launcher.pid}\n"


def test_stragglers_of_a_launcher_that_ended_are_ended(files, tmp_path):
    pids = tmp_path / "pids"
    assert supervise(python(TREE, pids, 0), files, limits(30)).exit_status == 0
    assert [pid for pid in pids_in(pids) if is_alive(pid)] == []


def test_what_the_block_starts_is_left_alone(files):
    with ExitStack() as stack:
        with launched(python("pass"), files) as launcher:
            sidecar = stack.enter_context(running("import time; time.sleep(300)"))
            launcher.wait(limits(30))
        assert sidecar.poll() is None


def test_time_limit_ends_the_whole_tree(files, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TERMINATION_S", 0.5)
    pids = tmp_path / "pids"
    ended = supervise(python(TREE, pids, 300), files, limits(1.5))
    assert ended.timed_out
    assert ended.exit_status == -signal.SIGTERM
    assert ended.left_behind == ()
    assert [pid for pid in pids_in(pids) if is_alive(pid)] == []


def test_launcher_that_sigkill_does_not_end_has_an_exit_status(files, monkeypatch):
    stuck = SimpleNamespace(pid=2**22 + 1, returncode=None)
    monkeypatch.setattr(module, "_start", lambda *_: stuck)
    monkeypatch.setattr(module, "wait_for_end", lambda *_, **__: Watched(timed_out=True))
    monkeypatch.setattr(module, "end_processes", lambda *_: [-9])
    ended = supervise(python("pass"), files, limits(30))
    assert (ended.exit_status, ended.timed_out) == (-9, True)


def test_interrupt_ends_the_whole_tree(files, tmp_path):
    pids = tmp_path / "pids"

    def interrupted():
        with launched(python(TREE, pids, 300), files):
            wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3, 30, "three pids")
            assert [is_alive(pid) for pid in pids_in(pids)] == [True] * 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [pid for pid in pids_in(pids) if is_alive(pid)] == []


def test_dead_rank_ends_a_launcher_that_does_not_notice(files, write_status, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    write_status(1, "running", host=host_name(), pid=gone.pid)
    gone.wait()
    write_status(0, "running", host=host_name())

    monkeypatch.setattr(module, "_living_ranks", lambda _files: set())  # rank 0 is this very test
    ended = supervise(python("import time; time.sleep(300)"), files, limits(60))
    assert not ended.timed_out
    assert ended.dead_ranks == (1,)
    assert ended.exit_status == -signal.SIGTERM


def test_rank_that_does_not_start_in_time_ends_the_launcher(files, write_status):
    write_status(0, "done")
    sleeping = python("import time; time.sleep(300)")
    ended = supervise(sleeping, files, limits(start_s=0.5, ranks=2))
    assert ended.missing_ranks == (1,)
    assert not ended.timed_out


STUCK = """
import dataclasses, sys, time
from pathlib import Path
from paceline.collectives.host import Process, host_name
from paceline.runner.job.stacks import answer_requests
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import RankStatus

def destructor():
    time.sleep(300)  # longer than the limit after which the supervisor ends it

own = TrialFiles(Path(sys.argv[1])).rank(0)
answer_requests(own)
process = dataclasses.asdict(Process.current())
status = RankStatus(
    rank=0, host=host_name(), process_started_unix_s=0.0, state="done", **process
)
write_json(own.status, status)
destructor()
"""


def test_launcher_that_does_not_end_after_its_ranks_are_done_is_ended(files):
    with pytest.warns(PacelineWarning, match=r"all ranks are done, .* to .*/ranks/\*/stacks.txt"):
        ended = supervise(python(STUCK, files.root), files, limits(exit_s=0.2))
    assert ended.stuck_at_exit
    assert not ended.timed_out
    assert ended.exit_status == -signal.SIGTERM
    assert "in destructor" in files.rank(0).stacks.read_text()


def test_step_of_the_wall_clock_is_no_death(files, write_status, monkeypatch):
    write_status(0, "running", host=host_name())
    unix_s = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: unix_s)
    watch = Watch(limits(), 0.0)
    assert not watch.look(1.0, read_statuses(files))
    assert watch.found.dead_ranks == ()


def test_rank_on_another_host_is_not_looked_for_here(files, write_status):
    write_status(0, "running", host="elsewhere", pid=2**22 + 1)
    ended = supervise(python("import time; time.sleep(0.8)"), files, limits(60))
    assert ended.exit_status == 0
    assert ended.dead_ranks == ()


def test_killed_supervisor_takes_the_launcher_along(files, tmp_path):
    pid_file = tmp_path / "pid"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.runner.launchers.base import Command\n"
        "from paceline.runner.launchers.supervise import WaitLimits, launched\n"
        "from paceline.measure.records.layout import TrialFiles\n"
        "sleep = Command(argv=(sys.executable, '-c', 'import time; time.sleep(300)'))\n"
        "with launched(sleep, TrialFiles(Path(sys.argv[2]))) as launcher:\n"
        "    Path(sys.argv[1]).write_text(f'{launcher.pid}\\n')\n"
        "    launcher.wait(WaitLimits(trial_s=300))\n"
    )
    with running(program, pid_file, files.root):
        wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), 30, "a pid")
        launcher = int(pid_file.read_text())
        time.sleep(0.3)  # the guard has run, and become the program
        assert is_alive(launcher)
    wait_for(lambda: not is_alive(launcher), 15, "the launcher gone")


def test_rank_that_dies_after_another_gave_its_reason_is_not_called_dead(files, write_status):
    write_status(0, "failed", "TimedOut: rank 0: a collective did not end")
    write_status(1, "running", host=host_name(), pid=2**22 + 1)
    ended = supervise(python("import time; time.sleep(300)"), files, limits(60))
    assert ended.dead_ranks == ()
    assert ended.exit_status == -signal.SIGTERM


def test_launcher_that_replaces_a_dead_rank_in_time_is_not_ended(files):
    """The status of a dead process is replaced by one of a process that runs."""
    program = """
import json, os, pathlib, subprocess, sys, time
path = pathlib.Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
def write(pid):
    row = {"rank": 0, "host": sys.argv[2], "pid": pid, "process_started_unix_s": 1.0,
           "state": "running"}
    path.with_suffix(".new").write_text(json.dumps(row))
    path.with_suffix(".new").rename(path)
child = subprocess.Popen(["true"]); child.wait()
write(child.pid)
time.sleep(1.0)
path.unlink()
time.sleep(0.5)
"""
    command = python(program, files.rank(0).status, host_name())
    assert supervise(command, files, limits(30, notice_s=20, replaces_ranks=True)).exit_status == 0
    ended = supervise(command, files, limits(30))
    assert ended.exit_status != 0  # nobody replaces ranks of other launchers
    assert ended.dead_ranks == (0,)
    assert ended.trouble_unix_s is not None
