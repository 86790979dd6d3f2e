"""Stacks and pending operations of ranks, and the sentence about them."""

from __future__ import annotations

import dataclasses
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.rows import running_rank
from tests.support.running import running
from tests.support.waiting import wait_for

from paceline.measure.records.communication import LastOperation, OperationNotes
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.runner.job.stacks import (
    Frame,
    RankStack,
    read_stacks,
    request_stacks,
    stacks_sentence,
    write_error,
)

SLEEPING = """
import sys, time
from pathlib import Path
from paceline.runner.job.stacks import answer_requests
from paceline.measure.records.layout import RankFiles

def forward():
    time.sleep(60)  # the fixture ends it

answer_requests(RankFiles(Path(sys.argv[1])))
print("ready", flush=True)
forward()
"""


def stack(rank, *operations, file="/home/me/train.py"):
    return RankStack(
        rank=rank,
        host="node1",
        frames=(
            Frame(file=f"{sys.prefix}/lib/torch/x.py", line=1, function="call"),
            Frame(file=file, line=30 + rank, function="forward"),
        ),
        operations=operations,
    )


def operation(sequence, *, pending=1, group="world"):
    return LastOperation(
        group=group,
        operation="all_reduce",
        sequence=sequence,
        pending=pending,
        begun_unix_s=time.time() - 12,
    )


def test_ranks_that_wait_and_the_one_that_is_missing():
    ranks = [stack(0, operation(7)), stack(1, operation(6, pending=0)), stack(2, operation(7))]
    assert stacks_sentence(ranks) == (
        "ranks 0, 2 wait in all_reduce (operation 7 of their group) for 12 s; rank 1 has not begun "
        "it and is at /home/me/train.py:31 in forward"
    )


def test_a_rank_that_is_further_does_not_count_as_missing():
    ranks = [stack(0, operation(7)), stack(1, operation(8))]
    sentence = stacks_sentence(ranks)
    assert "which all ranks have begun" in sentence


def test_ranks_in_different_operations_are_named_with_their_places():
    other = dataclasses.replace(operation(7), operation="barrier")
    assert stacks_sentence([stack(0, operation(7)), stack(1, other)]) == (
        "ranks wait in different operations (operation 7 of their group): rank 0 in all_reduce at "
        "/home/me/train.py:30 in forward, rank 1 in barrier at /home/me/train.py:31 in forward"
    )


def test_the_place_of_an_error_counts_before_later_stacks(sleeping):
    try:
        int("x")
    except ValueError as error:
        write_error(sleeping.rank(0), error)
    request_stacks(sleeping)
    [found] = read_stacks(sleeping)
    assert found.place.function == "test_the_place_of_an_error_counts_before_later_stacks"


def test_without_a_pending_operation_every_rank_has_its_place():
    assert stacks_sentence([stack(0), stack(1, operation(3, pending=0))]) == (
        "rank 0 is at /home/me/train.py:30 in forward; rank 1 is at /home/me/train.py:31 in forward"
    )


def test_nothing_is_said_without_any_stack():
    bare = dataclasses.replace(stack(0), frames=())
    assert stacks_sentence([bare]) is None
    assert "its stack is not known" in stacks_sentence([stack(0, operation(2)), bare, stack(1)][:2])


@pytest.fixture
def sleeping(tmp_path):
    """A trial whose rank sleeps in a function, and waits for an operation."""
    files = TrialFiles(tmp_path)
    own = files.rank(0)
    own.root.mkdir(parents=True)
    notes = OperationNotes(own.operations)
    notes.begun("world", "barrier", 4, time.time())
    notes.close()
    with running(SLEEPING, own.root) as process:
        assert process.stdout.readline() == "ready\n"
        write_json(own.status, running_rank(0, process.pid))
        yield files


def test_a_running_rank_writes_its_stack_at_every_request(sleeping):
    for _ in range(2):
        request_stacks(sleeping)
        [found] = read_stacks(sleeping)
        assert [frame.function for frame in found.frames][:2] == ["forward", "<module>"]
        assert [(each.operation, each.pending) for each in found.operations] == [("barrier", 1)]
    text = sleeping.rank(0).stacks.read_text()
    assert text.count("in forward") == 2


OTHER = """
import signal, sys, time
kept = [open(path) for path in sys.argv[2:]]
if sys.argv[1] == "handles":
    signal.signal(signal.SIGUSR2, lambda *_: print("signalled", flush=True))
print("ready", flush=True)
time.sleep(60)  # the test ends it
"""


@pytest.mark.parametrize("case", ["no handler", "no file", "link", "symbolic link", "directory"])
def test_another_process_that_a_status_names_gets_no_signal(tmp_path, case):
    """It may be any process of the reader, or a rank that has not installed its handler yet."""
    own = TrialFiles(tmp_path).rank(0)
    own.root.mkdir(parents=True)
    log = tmp_path / "log of another program"
    log.write_text("")
    if case == "directory":
        own.stacks.mkdir()
    elif case == "symbolic link":
        own.stacks.symlink_to(log)
    elif case == "link":
        own.stacks.hardlink_to(log)
    else:
        own.stacks.write_text("")
    opened = {"no handler": [own.stacks], "no file": [], "directory": []}.get(case, [log])
    handles = "ignores" if case == "no handler" else "handles"
    with running(OTHER, handles, *opened) as process:
        assert process.stdout.readline() == "ready\n"
        write_json(own.status, running_rank(0, process.pid))
        request_stacks(TrialFiles(tmp_path))
        time.sleep(0.2)
        assert process.poll() is None
        process.terminate()
        assert process.stdout.read() == ""


def test_ranks_that_are_done_are_not_asked(sleeping):
    own = sleeping.rank(0)
    status = own.status.read_text().replace('"running"', '"done"')
    own.status.write_text(status)
    began_s = time.monotonic()
    request_stacks(sleeping)
    assert time.monotonic() - began_s < 60
    assert own.stacks.read_text() == ""
    assert read_stacks(sleeping) == []


def test_ranks_of_other_hosts_are_asked_through_their_sidecar(sleeping):
    write_json(sleeping.rank(0).status, running_rank(0, host="elsewhere"))
    request_stacks(sleeping, elsewhere=True)  # there is no sidecar
    write_json(sleeping.host("elsewhere").sidecar, {"ended": None})
    request_stacks(sleeping)
    assert not sleeping.stacks_request.exists()

    def answer():
        wait_for(sleeping.stacks_request.exists, 10, "a request")
        sleeping.rank(0).stacks.write_text("answered")

    with ThreadPoolExecutor() as threads:
        answered = threads.submit(answer)
        request_stacks(sleeping, elsewhere=True)
        assert sleeping.rank(0).stacks.read_text() == "answered"
        answered.result()
