import pytest

from paceline.errors import UsageError
from paceline.spec.loading import parse_spec

SPEC = """
schema = 1
name = "mine"
[[workloads]]
name = "tiny"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
local_strategy = "best"
"""


def fault_of(text):
    with pytest.raises(UsageError) as raised:
        parse_spec(text, "mine.toml")
    return str(raised.value)


def test_best_wants_a_search():
    assert parse_spec(SPEC + "[tune]\n", "mine.toml").trials[1].local_strategy == "best"
    assert "add a table [tune]" in fault_of(SPEC)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ranks_per_node = 2", "ranks_per_node: "),
        ("micro_batches = 8", "micro_batches: "),
        ("cuts = [3]", "cuts: "),
        ('transport = "mpi"', "transport: "),
        ('device = "cuda"', "device: "),
    ],
)
def test_what_the_search_finds_cannot_be_said_of_the_best(line, told):
    assert told in fault_of(SPEC + line + "\n[tune]\n")


def test_best_on_several_nodes_may_say_its_transport():
    nodes = 'nodes = 2\ntransport = "gloo"\n[network]\ninterface = "eth0"\n'
    assert parse_spec(SPEC + nodes + "[tune]\n", "mine.toml").trials[1].transport == "gloo"


@pytest.mark.parametrize(
    "line",
    [
        "steps = 0",
        "warmup_steps = 0",
        "keep = 1",
        "repeats = 0",
        "timeout_s = 0",
        "strategies = []",
    ],
)
def test_values_that_leave_nothing_to_search_are_refused(line):
    assert f"tune.{line.split()[0]}" in fault_of(SPEC + f"[tune]\n{line}\n")


def test_strategy_to_search_must_be_one():
    assert "tune.strategies[1]" in fault_of(SPEC + '[tune]\nstrategies = ["best"]\n')
