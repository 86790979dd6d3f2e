"""`python -m paceline.launchers.spark.mpi.agent HOST COMMAND…`: mpirun calls it in place of ssh.

It passes the start of PRRTE's daemon to the barrier task that leads HOST, and lives as long as the
daemon, but no longer than mpirun. Its exit status is the daemon's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, UsageError
from paceline.host.processes import die_with_parent
from paceline.launchers.spark.mpi.wire import connect, receive

if TYPE_CHECKING:
    from collections.abc import Sequence

# Task 0 sets it for mpirun: {"leaders": {HOST: [address, port]}, "token": .., "limit_s": ..}
AGENT_VARIABLE = "PACELINE_SPARK_AGENT"
DAEMON = "prted"
_START_LIMIT_S = 20.0
# Variables with which an Open MPI that was moved finds its own files.
PREFIXES = ("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class DaemonStart:
    """The start of PRRTE's daemon on another host, as mpirun asks for it."""

    program: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...]  # those of PREFIXES that mpirun's shell command sets first


def read_command(words: Sequence[str]) -> DaemonStart:
    """Read the command for ssh: settings of variables, `prted`, its arguments.

    mpirun writes it for a shell, but no shell runs it: only the daemon and its arguments are used.
    Raises UsageError if it does not start a prted.
    """
    parts = shlex.split(" ".join(words))
    for number, part in enumerate(parts):
        program = part.rpartition(";")[2]
        if program.rpartition("/")[2] == DAEMON:
            before = " ".join([*parts[:number], part.removesuffix(program)])
            return DaemonStart(
                program=program,
                arguments=tuple(parts[number + 1 :]),
                variables=tuple(name for name in PREFIXES if re.search(rf"\b{name}\b", before)),
            )
    raise UsageError(
        f"expected mpirun to start {DAEMON} on another host, got: {' '.join(words)[:300]}; "
        "inside Spark, Open MPI 5 with its own PRRTE is needed"
    )


def main(words: Sequence[str]) -> int:
    """Have the daemon started on the host `words[0]`; return its exit status."""
    try:
        settings = json.loads(os.environ[AGENT_VARIABLE])
        start = asdict(read_command(words[1:]))
        host, port = settings["leaders"][words[0]]
        with connect((host, port), settings["token"], start, _START_LIMIT_S) as leader:
            end = receive(leader, settings["limit_s"])
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (KeyError, IndexError) as error:
        print(f"paceline: no barrier task for {words[:1]} ({error!r})", file=sys.stderr)
        return 2
    if end is None:
        print(f"paceline: the barrier task on {words[0]} has ended", file=sys.stderr)
        return 1
    if end["output"]:
        print(f"paceline: {DAEMON} on {words[0]}: {end['output']}", file=sys.stderr)
    return int(end["status"])


if __name__ == "__main__":
    # A killed mpirun does not end the agent, and a host that cannot be reached never answers.
    die_with_parent(os.getppid())
    sys.exit(main(sys.argv[1:]))
