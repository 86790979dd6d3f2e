"""Readings of /proc against facts that this process knows about itself and its children."""

import os
import subprocess
import sys
import time
from typing import Any

from tests.support.running import running

from paceline.base.host import processes
from paceline.base.host.processes import (
    TOKEN_VARIABLE,
    command_line_of,
    end_processes,
    guarded,
    is_alive,
    parent_of,
    pids_with_token,
    process_started_unix_s,
)
from paceline.collectives.host import Process, wait_until

NOBODY = 2**22 + 1  # above the kernel's largest pid


def test_start_time_is_that_of_the_child():
    before = time.time()
    with running("input()") as child:
        after = time.time()
        started = process_started_unix_s(child.pid)
        assert started is not None
        assert before - 0.05 <= started <= after + 0.05
        assert parent_of(child.pid) == os.getpid()
        assert is_alive(child.pid)
        child.kill()
        assert wait_until(lambda: not is_alive(child.pid), 10)  # a zombie is not alive


def test_nobody_is_not_there():
    assert process_started_unix_s(NOBODY) is None
    assert parent_of(NOBODY) is None
    assert command_line_of(NOBODY) == []
    assert Process.of(NOBODY) is None
    assert not is_alive(NOBODY)


def test_command_line_keeps_words_apart():
    with running("input()", "two words", "") as child:
        # right after the fork the child is still a copy of us
        assert wait_until(lambda: command_line_of(child.pid)[1:3] == ["-c", "input()"], 10)
        assert command_line_of(child.pid)[3:] == ["two words", ""]


def test_token_finds_its_own_and_nobody_else():
    def start(token):
        return running("input()", **{TOKEN_VARIABLE: token})

    with start("test-abc") as ours, start("test-abcdef") as longer:
        assert wait_until(lambda: pids_with_token("test-abc") == {ours.pid}, 10)
        assert wait_until(lambda: pids_with_token("test-abcdef") == {longer.pid}, 10)


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "


def test_processes_are_ended_in_order_and_then_by_force():
    deaf = subprocess.Popen([sys.executable, "-c", DEAF + "time.sleep(60)"], stdout=subprocess.PIPE)
    assert deaf.stdout.readline() == b"1\n"
    polite = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    assert end_processes([deaf, polite, ended], 0.5) == [-9, -15, 3]
    deaf.stdout.close()


class Stuck:
    """A process in uninterruptible sleep."""

    returncode = None

    def terminate(self):
        pass

    kill = terminate

    def poll(self):
        return None

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("stuck", timeout)


def test_process_that_sigkill_does_not_end_does_not_hide_the_end_of_others(monkeypatch):
    monkeypatch.setattr(processes, "_KILL_S", 0.0)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    both: list[Any] = [Stuck(), ended]
    assert end_processes(both, 0.0) == [-9, 3]


def assert_ends(pid):
    assert wait_until(lambda: not is_alive(pid), 10)


def start_parent(argv, **settings):
    """A process that starts `guarded(argv)`, prints its pid after its first line, and waits."""
    program = (
        "import subprocess, sys\n"
        "from paceline.base.host.processes import guarded\n"
        f"argv = guarded({argv!r}, **{settings!r})\n"
        "process = subprocess.Popen(argv, stdout=subprocess.PIPE)\n"
        "process.stdout.readline()\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    return running(program)


def test_guarded_program_ends_with_its_parent():
    with start_parent(["sh", "-c", "echo 1; exec sleep 60"]) as parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
    assert_ends(child)


def test_guarded_program_that_ignores_sigterm_is_killed():
    argv = [sys.executable, "-c", DEAF + "time.sleep(60)"]
    with start_parent(argv, kill_after_s=0.3) as parent:
        child = int(parent.stdout.readline())
    assert_ends(child)


def test_guard_becomes_the_program():
    done = subprocess.run(guarded(["echo", "a b"]), capture_output=True, check=True)
    assert done.stdout == b"a b\n"
