"""The view fits 80 columns, needs no colour, and leaves out what is not known."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from paceline.monitor.screen import plain_line, screen, sparkline
from paceline.monitor.views import HostView, RankView, RunView, TrialView

CPU = {"cpu_busy_percent": 70.0, "cpu_idle_percent": 25.0, "cpu_iowait_percent": 5.0}
SAMPLE = {"ram_used_bytes": 3 << 30, "ram_total_bytes": 16 << 30, "run_threads": 14}


def _trial(**values) -> TrialView:
    usual = {
        "trial_id": "tiny.mpi.mpi.processes.n1r2t1.fp32.r0",
        "number": 4,
        "steps": 12,
        "steps_planned": 24,
        "epoch": 1,
        "samples_per_s": 1234.5,
        "loss": 1.0625,
        "rates": (1.0, 2.0, 3.0),
        "losses": (3.0, 2.0, 1.0),
        "phases": {"forward": 0.25, "backward": 0.5, "comm_wait": 0.2, "comm_transfer": 0.05},
        "ranks": (),
        "hosts": (),
        "straggler": None,
    }
    return TrialView(**{**usual, **values})


def _run(trial: TrialView | None, **values) -> RunView:
    usual = {
        "name": "mine",
        "stage": "",
        "planned": 9,
        "done": 3,
        "failed": 0,
        "elapsed_s": 3725.0,
        "trial": trial,
        "ended": False,
        "message": None,
    }
    return RunView(**{**usual, **values})


def _rank(rank: int, **values) -> RankView:
    usual = {"host": "node0", "state": "running", "steps": 7, "step_s": 0.042}
    return RankView(rank=rank, sample=None, **{**usual, "waiting_share": 0.13, **values})


def _drawn(view: RunView, width: int = 80, height: int = 40) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, height=height, color_system=None)
    console.print(screen(view, width, height))
    return text.getvalue().splitlines()


def test_every_line_fits_the_width() -> None:
    long = _trial(
        trial_id="simple-big.spark.spark-rounds.processes." * 3,
        hosts=(
            HostView(
                host="a-very-long-host-name",
                sample={**SAMPLE, **CPU, "pressure_cpu_percent": 50.0},
            ),
        ),
        ranks=tuple(_rank(n, host="a-very-long-host-name-with-a-domain") for n in range(4)),
        phases=dict.fromkeys(
            ("forward", "backward", "comm_wait", "comm_transfer", "bubble", "data_wait"), 0.1
        ),
    )
    for width in (80, 120):
        assert max(map(len, _drawn(_run(long, name="n" * 64), width))) <= width


def test_the_heading_says_how_far_the_run_is() -> None:
    assert _drawn(_run(None, failed=2))[0].split() == [
        "mine", "3", "of", "9", "done,", "2", "failed,", "1:02:05",
    ]  # fmt: skip
    assert "3 done" in _drawn(_run(None, planned=None))[0]
    assert "mine (tune)" in _drawn(_run(None, stage="tune"))[0]


def test_between_trials_it_says_what_is_awaited() -> None:
    assert _drawn(_run(None))[1] == "waiting for the next trial"
    assert _drawn(_run(None, done=0))[1] == "waiting for the first trial"
    assert _drawn(_run(None, ended=True))[1] == "the run has ended"


def test_shares_of_a_step_are_told_without_colour() -> None:
    lines = _drawn(_run(_trial()))
    (bar,) = [line for line in lines if line.startswith("a step")]
    assert (bar.count("▓"), bar.count("█"), bar.count("░"), bar.count("▒")) == (18, 34, 14, 4)
    words = " ".join(lines)
    for part in ("forward 25%", "backward 50%", "waiting for ranks 20%", "transfer 5%"):
        assert part in words


def test_what_is_not_known_yet_is_not_drawn() -> None:
    early = _trial(samples_per_s=None, loss=None, phases={}, epoch=None, steps=0)
    lines = _drawn(_run(early))
    assert not [line for line in lines if line.startswith(("samples/s", "loss", "a step"))]
    assert "0/24 steps" in lines[2]


def test_more_ranks_than_lines_shows_those_that_compute_longest() -> None:
    ranks = tuple(_rank(n, step_s=0.5, waiting_share=0.9 if n != 7 else 0.0) for n in range(40))
    lines = _drawn(_run(_trial(ranks=ranks)), height=24)
    assert len(lines) <= 24
    assert any(line.split()[:1] == ["7"] for line in lines)
    assert any("ranks that compute less" in line for line in lines)


def test_a_failed_rank_and_the_reason_are_shown() -> None:
    lines = _drawn(_run(_trial(ranks=(_rank(0, state="failed"),)), message="rank 0 was killed"))
    assert any(line.split()[-1] == "failed" for line in lines)
    assert lines[-1] == "failed: rank 0 was killed"


def test_the_plain_line_says_it_all_in_one() -> None:
    host = HostView(host="node0", sample={**SAMPLE, **CPU})
    trial = _trial(hosts=(host,), straggler="rank 1 on node0 costs 20% of a step")
    line = plain_line(_run(trial))
    assert "\n" not in line
    for part in (
        "3 of 9 done tiny.mpi.mpi.processes.n1r2t1.fp32.r0 step 12/24 1234 samples/s loss 1.062",
        "waiting 20% transfer 5%",
        "node0 CPU 70% idle 25% IOWait 5.0% RAM 3.0/16.0 GiB threads 14",
        "straggler: rank 1 on node0",
    ):
        assert part in line
    assert plain_line(_run(None)).endswith("3 of 9 done waiting for the next trial")


def test_a_host_with_one_sample_has_no_shares_yet() -> None:
    host = HostView(host="n", sample=SAMPLE)
    assert "IOWait" not in plain_line(_run(_trial(hosts=(host,))))


@pytest.mark.parametrize(
    ("values", "columns", "drawn"),
    [
        ([], 5, ""),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 8, "▁▂▃▄▅▆▇█"),
        ([1.0, 1.0, 5.0, 5.0], 2, "▁█"),
        ([2.0, 2.0], 9, "▄▄"),
        ([math.nan, 1.0, math.inf, 2.0], 9, "▁█"),  # a loss that is not known, or has diverged
        ([math.nan, math.nan], 9, ""),
    ],
)
def test_a_sparkline_has_a_column_for_each_piece(values, columns, drawn) -> None:
    assert sparkline(values, columns) == drawn
