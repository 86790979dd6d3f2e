"""The process that a user started: the launcher, or this process itself."""

from __future__ import annotations

import os
import shlex
import sys
import time

from paceline.host.processes import command_line_of, parent_of, process_started_unix_s

# Programs that start ranks as their children. If the parent is another program, such as a shell,
# this process itself is the one that the user started.
_STARTERS = {"mpirun", "mpiexec", "prterun", "java", "torchrun", "torch.distributed.run"}
_SPARK_SUBMIT = "org.apache.spark.deploy.SparkSubmit"


def launching_pid() -> int:
    """Return the process that the user started: the parent if it starts ranks, else this one."""
    parent = parent_of(os.getpid())
    if parent is None:
        return os.getpid()
    words = command_line_of(parent)
    names = {word.rpartition("/")[2] for word in words[:3]}  # `python -m torch.distributed.run`
    return parent if names & _STARTERS else os.getpid()


def launched_unix_s() -> float:
    """Return when that process was started."""
    started = process_started_unix_s(launching_pid())
    return time.time() if started is None else started


def launching_command() -> str:
    """Return its command as a line for a shell."""
    words = command_line_of(launching_pid()) or [sys.executable, *sys.argv]
    if _SPARK_SUBMIT in words:  # spark-submit becomes `java … SparkSubmit` with the same options
        words = ["spark-submit", *words[words.index(_SPARK_SUBMIT) + 1 :]]
    return shlex.join(words)
