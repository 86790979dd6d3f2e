"""Requests to a host's sampler, as files."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.telemetry.options import SidecarOptions
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.runtime import Runtime, runtime_of
from paceline.telemetry.watches import (
    account_path,
    all_requests,
    forget_refusals,
    path_of,
    read_request,
    refuse,
    remove_request,
    request_of,
    take_refusal,
    write_request,
)

ITSELF = ProcessId.of(os.getpid())


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return runtime_of("h", {"PACELINE_RUNTIME_DIR": str(tmp_path / "r")})


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SidecarOptions:
    monkeypatch.delenv("PACELINE_TARGETS_DIR", raising=False)
    return SidecarOptions(
        pids=(os.getpid(),),
        out=tmp_path / "run" / "trace.jsonl",
        info={"trial": "t"},
        tls_certificate=Path("c.pem"),
        targets_dirs=(Path("here"),),
    )


def test_request_is_read_as_written(runtime: Runtime, options: SidecarOptions) -> None:
    request = request_of(options)
    write_request(runtime, request)
    assert read_request(runtime, request.id) == request
    assert all_requests(runtime) == {request.id: request}


def test_request_says_who_is_watched_and_where_in_full(
    options: SidecarOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TARGETS_DIR", "/elsewhere")
    request = request_of(options)
    assert request.processes == [ITSELF]
    assert (request.owner, request.excluded) == (None, [])
    assert request.run == "run"
    assert request.state == str(tmp_path / "run" / "sidecar.json")
    assert request.tls_certificate == str(tmp_path / "c.pem")
    assert request.other_targets == [str(tmp_path / "here"), "/elsewhere"]
    assert request.is_of_this_boot()
    assert not request.keeps_only()


def test_request_by_hand_ends_with_the_one_who_asks_and_leaves_him_out(
    options: SidecarOptions,
) -> None:
    request = request_of(replace(options, ends_with_caller=True, excludes_caller=True))
    assert (request.owner, request.excluded) == (ITSELF, [os.getpid()])


def test_host_alone_is_watched_for_the_one_who_asks(options: SidecarOptions) -> None:
    assert request_of(replace(options, pids=())).owner == ITSELF


def test_same_trace_has_the_same_name_and_each_request_a_key(options: SidecarOptions) -> None:
    first, second = request_of(options), request_of(options)
    assert first.id == second.id
    assert first.key != second.key
    assert request_of(replace(options, out=Path("/other"))).id != first.id
    assert request_of(replace(options, out=None)).id != request_of(replace(options, out=None)).id


def test_nobody_to_watch_is_refused(options: SidecarOptions) -> None:
    with pytest.raises(UsageError, match="found none of 4194303, 4194304"):
        request_of(replace(options, pids=(4194303, 4194304)))


def test_requests_that_mean_nothing_any_more_are_removed(
    runtime: Runtime, options: SidecarOptions
) -> None:
    good = request_of(options)
    write_request(runtime, good)
    write_request(runtime, replace(good, id="1" * 16, boot_id="another start"))
    write_request(runtime, replace(good, id="2" * 16, schema=99))
    path_of(runtime, "3" * 16).write_text("{")
    write_request(runtime, replace(good, id="4" * 16))
    path_of(runtime, "4" * 16).rename(path_of(runtime, "5" * 16))
    assert list(all_requests(runtime)) == [good.id]
    assert list(runtime.watches.iterdir()) == [path_of(runtime, good.id)]


def test_account_goes_with_its_request(runtime: Runtime, options: SidecarOptions) -> None:
    request = request_of(options)
    write_request(runtime, request)
    account_path(runtime, request.id).write_text("{}")
    remove_request(runtime, request.id)
    remove_request(runtime, request.id)
    assert list(runtime.watches.iterdir()) == []
    assert list(runtime.accounts.iterdir()) == []


def test_refusal_is_for_the_very_request_and_told_once(
    runtime: Runtime, options: SidecarOptions
) -> None:
    request = request_of(options)
    write_request(runtime, request)
    refuse(runtime, request, "no room")
    assert all_requests(runtime) == {}
    assert take_refusal(runtime, request) == "no room"
    assert take_refusal(runtime, request) is None
    refuse(runtime, request, "no room")
    assert take_refusal(runtime, request_of(options)) is None


def test_refusals_that_nobody_comes_for_are_forgotten(
    runtime: Runtime, options: SidecarOptions
) -> None:
    old, new = request_of(options), request_of(replace(options, out=Path("/new")))
    for request in (old, new):
        refuse(runtime, request, "no room")
    long_ago_s = time.time() - 3600
    os.utime(runtime.refusals / f"{old.id}.json", (long_ago_s, long_ago_s))
    forget_refusals(runtime)
    assert [path.stem for path in runtime.refusals.iterdir()] == [new.id]


def test_lifetime_runs_from_the_request(options: SidecarOptions) -> None:
    request = request_of(replace(options, max_lifetime_s=100.0))
    assert request.ends_unix_s == pytest.approx(time.time() + 100.0, abs=30.0)
