"""The job side of a launcher: what runs in the processes that a launcher starts.

A launcher has two sides. The command side (`paceline.runner.launchers.base.Launcher`) turns a trial
into a command. The job side is the program of that command. It finds out rank and peers and calls
the one worker. This is the interface for the job side, the same for built-in and third-party
launchers:

1. `parse_job(NAME, PROG)` reads the command line: `--trial trial.json`, or `SPEC --only PATTERN`.
2. `prepare(job)` makes the trial's directory. Call it in one process, before any rank starts.
3. Start `job.trial.placement.ranks` processes. `Job` can be pickled and sent to them.
4. In the process of rank 0, `address = listen_on(job.trial.interface)` opens the rendezvous socket.
   Send `address.for_peers()` to the other ranks, over a way that no other account can read: it has
   the secret with which ranks sign what they store. Rank 0 keeps its own `address`, which has the
   open socket.
5. In every rank, `rank_context(rank, hosts, address)` is its place among its peers, where `hosts`
   has the host name of every rank, by rank. `run_rank(job, context)` then trains and returns a
   `RankEnd`; it writes the rank's status and never raises.
6. `trial_end(job, ends)` picks the end that stands for the trial: the rank that failed first.
   `finish(job, end)` records it: under `paceline run`, if that rank could not write its failure
   itself. `end.exit_code` is the program's exit code.
7. `run_guarded(main)` runs the program and turns a PacelineError into a message and an exit code.

`paceline.runner.launchers.local` is the shortest example. README.md of the package explains how to
add a launcher.
"""

from paceline.base.host.messages import say
from paceline.plan.trials.trial import RankContext, StoreAddress
from paceline.runner.job.context import check_started_once, nodes_of, rank_context
from paceline.runner.job.job import Job, check_reachable, close_listener, listen_on, parse_job
from paceline.runner.job.rank import run_rank
from paceline.runner.job.rank_status import RankEnd, run_guarded, trial_end
from paceline.runner.job.run_directory import finish, prepare

__all__ = [
    "Job",
    "RankContext",
    "RankEnd",
    "StoreAddress",
    "check_reachable",
    "check_started_once",
    "close_listener",
    "finish",
    "listen_on",
    "nodes_of",
    "parse_job",
    "prepare",
    "rank_context",
    "run_guarded",
    "run_rank",
    "say",
    "trial_end",
]
