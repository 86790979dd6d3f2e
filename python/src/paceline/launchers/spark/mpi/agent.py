"""`python -m paceline.launchers.spark.mpi.agent HOST COMMAND…`: what mpirun calls in place of ssh.

Hands the start of PRRTE's daemon to the barrier task that leads HOST and lives as long as the
daemon does, whose exit status it ends with; but no longer than mpirun.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, UsageError
from paceline.host.processes import die_with_parent
from paceline.launchers.spark.mpi.wire import greet, receive

if TYPE_CHECKING:
    from collections.abc import Sequence

# Set for mpirun by task 0: {"leaders": {HOST: [address, port]}, "token": .., "limit_s": ..}
AGENT_VARIABLE = "PACELINE_SPARK_AGENT"
DAEMON = "prted"
_START_LIMIT_S = 20.0
# Where an Open MPI that was moved finds itself.
PREFIXES = ("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class DaemonStart:
    """How mpirun wants PRRTE's daemon to be started on another host."""

    program: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...]  # of PREFIXES, those that a shell there was to set first


def read_command(words: Sequence[str]) -> DaemonStart:
    """What ssh's command asks for: settings of variables, `prted`, its arguments.

    It is made for a shell, which does not see it: the daemon and its arguments are taken out, and
    nothing else is ever run. Raises UsageError if it does not start a prted.
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
    try:
        told = json.loads(os.environ[AGENT_VARIABLE])
        start = read_command(words[1:])
        host, port = told["leaders"][words[0]]
        hello = {
            "program": start.program,
            "arguments": start.arguments,
            "variables": start.variables,
        }
        with greet((host, port), told["token"], hello, _START_LIMIT_S) as leader:
            end = receive(leader, told["limit_s"])
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (KeyError, IndexError) as error:
        print(f"paceline: no barrier task for {words[:1]} ({error!r})", file=sys.stderr)
        return 2
    if end is None:
        print(f"paceline: the barrier task on {words[0]} has gone", file=sys.stderr)
        return 1
    if end["output"]:
        print(f"paceline: {DAEMON} on {words[0]}: {end['output']}", file=sys.stderr)
    return int(end["status"])


if __name__ == "__main__":
    # An mpirun that is killed ends nobody, and a host that cannot be reached never answers.
    die_with_parent(os.getppid())
    sys.exit(main(sys.argv[1:]))
