"""The sidecar's options and command line."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.telemetry.options import SidecarOptions, add_arguments, options_from

GOOD = SidecarOptions(pids=(1,), out=Path("trace.jsonl"))


def parse(*argv: str) -> SidecarOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(argv))


def test_command_line_of_the_contract() -> None:
    options = parse(
        *("--listen", "127.0.0.1:9464", "--interval", "0.5", "--pid", "12", "--pid", "34"),
        *("--out", "t.jsonl", "--state", "s.json", "--info", "trial=a=b", "--info", "launcher=mpi"),
        *("--max-lifetime", "60"),
    )
    assert options == SidecarOptions(
        listen_host="127.0.0.1",
        listen_port=9464,
        interval_s=0.5,
        pids=(12, 34),
        out=Path("t.jsonl"),
        state=Path("s.json"),
        info={"trial": "a=b", "launcher": "mpi"},
        max_lifetime_s=60.0,
        ends_with_caller=True,
        excludes_caller=True,
    )


def test_command_line_of_all_that_is_secret_or_for_others() -> None:
    options = parse(
        *("--out", "t.jsonl", "--run", "r", "--textfile-dir", "text"),
        *("--targets-dir", "a", "--targets-dir", "b"),
        *("--tls-certificate", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem"),
        *("--basic-auth-file", "u", "--bearer-token-file", "t"),
    )
    assert options == SidecarOptions(
        out=Path("t.jsonl"),
        run="r",
        textfile_dir=Path("text"),
        targets_dirs=(Path("a"), Path("b")),
        tls_certificate=Path("c.pem"),
        tls_key=Path("k.pem"),
        tls_client_ca=Path("ca.pem"),
        basic_auth_file=Path("u"),
        bearer_token_file=Path("t"),
        ends_with_caller=True,
        excludes_caller=True,
    )


def test_short_command_line_watches_the_host_alone_and_serves_nothing() -> None:
    options = parse("--out", "t.jsonl")
    assert (options.listen_port, options.interval_s, options.pids) == (None, 1.0, ())


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        SidecarOptions(
            pids=(0,),
            out=Path("t"),
            interval_s=0.05,
            listen_port=65536,
            max_lifetime_s=0,
            info={"host": "x", "colour": "y"},
        )
    message = str(caught.value)
    for expected in (
        "interval: expected 0.1 to 10.0 seconds, got 0.05",
        "listen: expected a port from 0 to 65535, got 65536",
        "pid: expected a process id, got 0",
        "max-lifetime: expected seconds above 0, got 0",
        "info: expected one of trial, workload, launcher, ",
        "got 'host'",
        "got 'colour'",
    ):
        assert expected in message


@pytest.mark.parametrize("interval_s", [0.0999, 10.01, -1.0, float("nan"), float("inf")])
def test_interval_out_of_range_is_refused(interval_s: float) -> None:
    with pytest.raises(UsageError, match=r"0\.1 to 10"):
        replace(GOOD, interval_s=interval_s)


@pytest.mark.parametrize(
    "listen", ["9464", "localhost", "127.0.0.1:", "127.0.0.1:http", ":80", "::1:²"]
)
def test_listen_without_address_and_port_is_refused(listen: str) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1"):
        parse("--pid", "1", "--out", "t", "--listen", listen)


def test_listen_takes_an_ipv6_address_in_brackets() -> None:
    options = parse("--pid", "1", "--out", "t", "--listen", "[::1]:80")
    assert (options.listen_host, options.listen_port) == ("::1", 80)


def test_info_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="KEY=VALUE, got 'trial'"):
        parse("--pid", "1", "--out", "t", "--info", "trial")
