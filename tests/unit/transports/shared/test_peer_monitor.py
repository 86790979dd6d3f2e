from __future__ import annotations

import os
import subprocess
import sys

from paceline.transports.shared.peer_monitor import Process


def test_this_process_is_alive():
    assert Process.own().alive()
    assert Process.own().pid == os.getpid()


def test_another_process_of_the_same_number_is_not_the_one():
    assert not Process(os.getpid(), "1").alive()


def test_a_zombie_and_one_that_is_gone_are_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = Process(child.pid, start_ticks(child.pid))
    assert started.alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert not started.alive()
    child.communicate()
    assert not started.alive()


def start_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[19]
