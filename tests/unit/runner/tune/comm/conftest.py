"""A spec with trials that send, and a search of it in which nothing really runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.support.specs import spec_text
from tests.unit.analysis.fabricate import LAUNCHED, SEQUENTIAL, Case, Way, make_trial
from tests.unit.runner.tune.conftest import Watcher

from paceline.measure.records.files import read_json
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import load_spec, parse_spec
from paceline.runner.tune import comm, session
from paceline.runner.tune import search as measurement
from paceline.runner.tune.comm import tune_comm

BASELINE = spec_text(workload='name = "simple-big"', tables='[network]; interface = "eth0"')
ALL_PARAMETERS = frozenset(
    {
        "smsc", "btl_sm_eager_limit", "btl_tcp_rdma_pipeline_frag_size", "btl_tcp_sndbuf",
        "btl_tcp_rcvbuf", "btl_tcp_links", "btl_tcp_eager_limit", "btl_tcp_progress_thread",
        "coll_tuned_use_dynamic_rules", "coll_tuned_allreduce_algorithm",
        "coll_tuned_allreduce_algorithm_segmentsize",
    }
)  # fmt: skip


def entry(launcher="mpi", transport="mpi", **values):
    said = {"local_strategy": '"processes"', "ranks_per_node": 2, "oversubscribe": "true", **values}
    named = {"launcher": f'"{launcher}"', **said}
    if transport is not None:
        named["transport"] = f'"{transport}"'
    return "\n".join(["[[trials]]", *(f"{key} = {value}" for key, value in named.items()), ""])


def parsed(*entries, tune=""):
    return parse_spec("\n".join([BASELINE, *entries, "[tune]", tune]), "mine.toml")


def unknown_parameters(names, _mpirun):
    unknown = sorted(set(names) - ALL_PARAMETERS)
    return f"no {', '.join(unknown)}" if unknown else None


@pytest.fixture(autouse=True)
def _no_mpi(monkeypatch):
    monkeypatch.setattr(comm, "find_mpirun", lambda _asked: Tool())
    monkeypatch.setattr(comm, "unknown_parameters", unknown_parameters)


class Tool:
    path = Path("/opt/bin/mpirun")


@dataclasses.dataclass
class Machine:
    """Where trials take as long as they are told to; remembers which it ran."""

    folder: Path
    step_s: object = lambda _trial: 0.5  # of a trial
    runs_left: float = float("inf")
    ran: list[str] = dataclasses.field(default_factory=list)

    def run_trial(self, trial, files):
        if self.runs_left <= 0:
            raise KeyboardInterrupt
        self.runs_left -= 1
        self.ran.append(trial.id)
        training = trial.training
        case = Case(
            workload=training.workload, steps=training.max_steps, warmup_steps=training.warmup_steps
        )
        way = SEQUENTIAL if trial.is_baseline else self.way_of(trial)
        # told apart by a hair from one repeat to the next, so that there is noise to estimate
        case = dataclasses.replace(case, time_scale=1 + 1e-4 * (-1) ** trial.repeat)
        make_trial(files, trial, way, case, LAUNCHED, 1e-4)
        return Outcome(**read_json(files.outcome))

    def way_of(self, trial):
        way = Way(
            launcher=trial.launcher,
            transport=trial.transport,
            local_strategy="processes",
            nodes=trial.placement.nodes,
            ranks=trial.placement.ranks_per_node,
        )
        return dataclasses.replace(way, forward_s=way.forward_s + self.step_s(trial) - way.step_s)

    def tune(self, experiment_text, *, search=tune_comm, resume=False, budget_s=None):
        spec = self.folder / "mine.toml"
        spec.write_text(experiment_text)
        return search(
            load_spec(str(spec)),
            self.folder / "found",
            resume=resume,
            progress=Watcher(),
            budget_s=budget_s,
        )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(session, "make_datasets", lambda *_: {"simple-big": str(tmp_path / "data")})
    monkeypatch.setattr(session, "preflight", list)
    monkeypatch.setattr(measurement, "check_equivalences", lambda *_, **__: None)
    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", made.run_trial)
    return made
