"""What /proc is asked, against what this process knows of itself and its children."""

import os
import subprocess
import sys
import time

from paceline.host.processes import (
    TOKEN_VARIABLE,
    command_line_of,
    is_alive,
    parent_of,
    pids_with_token,
    process_started_unix_s,
    wait_until,
)

NOBODY = 2**22 + 1  # above the kernel's largest pid


def test_start_time_is_that_of_the_child():
    before = time.time()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.time()
    try:
        started = process_started_unix_s(child.pid)
        assert started is not None
        assert before - 0.05 <= started <= after + 0.05
        assert parent_of(child.pid) == os.getpid()
        assert is_alive(child.pid)
        assert is_alive(child.pid, started)
        assert not is_alive(child.pid, started - 100)  # the pid was somebody else's then
    finally:
        child.kill()
        assert wait_until(lambda: not is_alive(child.pid), 10)  # a zombie is not alive
        child.wait()


def test_nobody_is_not_there():
    assert process_started_unix_s(NOBODY) is None
    assert parent_of(NOBODY) is None
    assert command_line_of(NOBODY) == []
    assert not is_alive(NOBODY)


def test_command_line_keeps_words_apart():
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", "two words", ""], stdin=subprocess.PIPE
    )
    try:
        # right after the fork the child is still a copy of us
        assert wait_until(lambda: command_line_of(child.pid)[1:3] == ["-c", "input()"], 10)
        assert command_line_of(child.pid)[3:] == ["two words", ""]
    finally:
        child.kill()
        child.wait()


def test_token_finds_its_own_and_nobody_else():
    def start(token):
        environment = {**os.environ, TOKEN_VARIABLE: token}
        return subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment
        )

    ours, longer = start("test-abc"), start("test-abcdef")
    try:
        assert wait_until(lambda: pids_with_token("test-abc") == {ours.pid}, 10)
        assert wait_until(lambda: pids_with_token("test-abcdef") == {longer.pid}, 10)
    finally:
        for child in (ours, longer):
            child.kill()
            child.wait()


def test_wait_until_gives_up():
    assert not wait_until(lambda: False, 0.05, poll_s=0.01)
