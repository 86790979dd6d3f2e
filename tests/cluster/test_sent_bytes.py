"""Bytes that four hosts send in each algorithm and in a step with sufficient factors, counted by
the messages and by the interfaces of the hosts, against the formulas."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lab.labs import checked_lab
from tests.cluster.programs.sent_bytes_case import ALL_GATHER, ELEMENTS, SAMPLES, make_model
from tests.support.commands import run_command
from torch import nn

from paceline.collectives.message_schedules import ALGORITHMS, MESSAGE_BYTES, chunk_length, chunks
from paceline.plan.costs import (
    LinearShape,
    all_gather_bytes,
    all_reduce,
    all_reduce_bytes,
    all_reduce_cost,
    factor_cost,
)
from paceline.runner.lab import INTERFACE, LabSettings

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

PROGRAM = Path(__file__).with_name("programs") / "sent_bytes.py"
HOSTS = 4
LIMIT_S = 180
PAYLOAD_BYTES = 4 * ELEMENTS
# Headers of a TCP segment: 66 of 1,514 bytes. The same header acknowledges what was received.
_HEADERS = 0.05
# Barriers, connections that TCP keeps open, and the headers of MPI and of Gloo.
_OTHER_BYTES = 30_000


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank counted, by operation."""
    folder = tmp_path_factory.mktemp("sent")
    with checked_lab(LabSettings(hosts=HOSTS, slots=1)) as lab:
        command = lab.hosts[0].command(
            Path(sys.executable).with_name("mpirun"), "-n", HOSTS, "--hostfile", lab.hostfile,
            "--bind-to", "none", "--mca", "btl", "tcp,self", "-x", "PACELINE_INTERFACE",
            "-x", "GLOO_SOCKET_IFNAME", "-x", "OMP_NUM_THREADS", sys.executable, PROGRAM, folder,
        )  # fmt: skip
        variables = {
            "PACELINE_INTERFACE": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        ended = run_command(command, LIMIT_S, env={**os.environ, **variables})
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(HOSTS)]


def check_interface(found: Mapping[str, Any], sent_bytes: float) -> None:
    """Check that the interface sent these bytes, headers and acknowledgements."""
    most = sent_bytes + _HEADERS * (sent_bytes + found["received"]) + _OTHER_BYTES
    assert sent_bytes <= found["sent"] <= most


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_and_bytes_of_an_algorithm_equal_its_formula(
    algorithm: str, sent: list[dict[str, Any]]
) -> None:
    cost = all_reduce(algorithm, HOSTS)
    pieces = len(chunks(ELEMENTS, chunk_length(algorithm, HOSTS, 4)))
    counted = [rank[algorithm]["counted"] for rank in sent]
    assert sum(nbytes for nbytes, _ in counted) == cost.volumes * PAYLOAD_BYTES
    assert sum(messages for _, messages in counted) == cost.messages * pieces
    for rank in sent:
        check_interface(rank[algorithm], rank[algorithm]["counted"][0])


def test_messages_and_bytes_of_the_all_gather_equal_its_formula(sent: list[dict[str, Any]]) -> None:
    pieces = len(chunks(PAYLOAD_BYTES, MESSAGE_BYTES))
    for rank in sent:
        expected = [all_gather_bytes(PAYLOAD_BYTES, HOSTS), (HOSTS - 1) * pieces]
        assert rank[ALL_GATHER]["counted"] == expected
        check_interface(rank[ALL_GATHER], expected[0])


@pytest.mark.parametrize("backend", ["gloo", "mpi4py"])
def test_collectives_of_both_backends_send_the_bytes_of_a_ring(
    backend: str, sent: list[dict[str, Any]]
) -> None:
    for rank in sent:
        check_interface(rank[f"{backend} all-reduce"], all_reduce_bytes(PAYLOAD_BYTES, HOSTS))
        check_interface(rank[f"{backend} all-gather"], all_gather_bytes(PAYLOAD_BYTES, HOSTS))


@pytest.mark.parametrize("backend", ["gloo", "mpi4py"])
def test_a_step_with_factors_sends_what_the_formulas_say(
    backend: str, sent: list[dict[str, Any]]
) -> None:
    model = make_model()
    shapes = [
        LinearShape(inputs=layer.in_features, outputs=layer.out_features)
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    linear = sum(all_reduce_cost(shape, HOSTS, None).sent_bytes for shape in shapes)
    factors = sum(factor_cost(shape, SAMPLES, 4, HOSTS, None).sent_bytes for shape in shapes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    everything = all_reduce_bytes(4 * parameters, HOSTS)
    assert factors < 0.1 * linear
    for rank in sent:
        check_interface(rank[f"{backend} step, factors never"], everything)
        check_interface(rank[f"{backend} step, factors always"], everything - linear + factors)
