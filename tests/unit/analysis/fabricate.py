"""Run directories made of known numbers: what the analysis must find is what was put in.

Times are exact where `jitter` is 0: every rank of a trial ends a step at the same instant, the
slowest rank's gradients are ready last, and transfer takes `transfer_s`.
"""

# ruff: noqa: F401  (tests use the ways as names of this module)

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tests.support.rows import ENDED_WELL
from tests.support.trials import tiny_trial
from tests.unit.analysis.ways import (
    HYBRID,
    INTRAOP,
    LOCAL_WAYS,
    MPI,
    MPI_GLOO,
    PIPELINE,
    PROCESSES,
    SEQUENTIAL,
    SPARK,
    THREADS,
    TORCHRUN,
    Way,
    on_nodes,
)

from paceline.collectives.message_schedules import share_bounds
from paceline.measure.records.files import JsonlWriter, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import (
    SCHEMA,
    EvaluationRow,
    RankEnvironment,
    RankStatus,
    RankWeights,
    SampleLogRow,
    SpanName,
    SpanRow,
    StepRow,
    TrainingResult,
    WorkerEnvironment,
)
from paceline.plan.spec.values import Target
from paceline.plan.trials.trial import Evaluation, Trial, trial_name

LAUNCHED = 1_700_000_000.0
LEARNED = 0.02  # loss lost a step
CORES = 2  # of every host
HELD_OUT = 20
EVALUATION_S = 0.5  # of one evaluation


@dataclass(frozen=True, kw_only=True)
class Case:
    """The training that every configuration of a fabricated run does."""

    workload: str = "tiny"
    model: str = "tiny-alexnet"
    samples: int = 40
    global_batch: int = 8
    steps: int = 12
    warmup_steps: int = 2
    dropout: bool = False
    time_scale: float = 1.0
    evaluate_every_steps: int | None = None  # on HELD_OUT samples
    target: Target | None = None
    vary_seed: bool = False
    parameters: int = 41
    batch_per_replica: int | None = None
    entry: str | None = None  # of [[workloads]], if it has several batches

    @property
    def evaluation(self) -> Evaluation | None:
        if self.evaluate_every_steps is None:
            return None
        return Evaluation(
            held_out_samples=HELD_OUT,
            split_seed=1,
            every_steps=self.evaluate_every_steps,
            every_epochs=None,
            target=self.target,
        )

    def is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        found = self.evaluation
        return found is not None and found.is_due(step, self.steps, self.steps)

    def evaluations_s(self) -> float:
        """The time of all evaluations."""
        return EVALUATION_S * sum(self.is_evaluated(step) for step in range(self.steps))


def make_run(
    root: Path,
    ways: Sequence[Way],
    *,
    cases: Sequence[Case] = (Case(),),
    repeats: int = 1,
    jitter: float = 0.0,
    in_repeat: Callable[[Way, int], Way] = lambda way, _: way,
    in_case: Callable[[Way, Case], Way | None] = lambda way, _: way,
) -> RunFiles:
    """Fabricate a run; trial `i` starts 1000 s after the one before it.

    in_repeat: returns what a way takes in a repeat. in_case: returns what it takes in a case; None:
    the case does not run it.
    """
    run = RunFiles(root)
    ids: list[str] = []
    for repeat in range(repeats):
        for case in cases:
            for way in ways:
                taken = in_case(way, case)
                if taken is None:
                    continue
                trial = make_trial_value(way, case, repeat)
                launched = LAUNCHED + 1000.0 * len(ids)
                took = in_repeat(taken, repeat)
                make_trial(run.trial(trial.id), trial, took, case, launched, jitter)
                ids.append(trial.id)
    write_json(run.manifest, _manifest(ids, cases))
    return run


PER_REPLICA = 8  # samples in a step of each replica of a fabricated weak scaling


def scaled_way(local_strategy: str = "processes", **changes: Any) -> Way:
    """Return a way whose replicas compute as one process does with PER_REPLICA samples."""
    places = {"launcher": "mpi", "transport": "gloo", "ranks": 2, "transfer_s": 0.03}
    times = {"forward_s": SEQUENTIAL.forward_s, "backward_s": SEQUENTIAL.backward_s}
    return Way(local_strategy=local_strategy, **{**places, **times, **changes})


def make_weak_scaling(
    root: Path, *ways: Way, replicas: Sequence[int] = (1, 2, 4), jitter: float = 0.003
) -> RunFiles:
    """Fabricate a run of ways with PER_REPLICA samples for each of their replicas.

    The baseline runs with the global batch of each number of `replicas`.
    """
    batches = [PER_REPLICA * number for number in replicas]
    cases = [
        Case(
            workload=f"tiny-batch{batch}", entry="tiny", global_batch=batch, samples=12 * batch,
            batch_per_replica=PER_REPLICA,
        )
        for batch in batches
    ]  # fmt: skip

    def taken(way: Way, case: Case) -> Way | None:
        factor = case.global_batch // PER_REPLICA
        if way is not SEQUENTIAL:
            return way if way.replicas == factor else None
        times = {"forward_s": factor * way.forward_s, "backward_s": factor * way.backward_s}
        return dataclasses.replace(way, **times)

    every = [SEQUENTIAL, *ways]
    return make_run(root, every, cases=cases, repeats=3, jitter=jitter, in_case=taken)


def make_half_batch(run: RunFiles, ways: Sequence[Way], case: Case, **drawn: Any) -> None:
    """Fabricate the steps of one node with half of the batch, as `predict --measure` adds them.

    drawn: `repeats` and `jitter`.
    """
    half = dataclasses.replace(case, global_batch=case.global_batch // 2)
    halves = [
        dataclasses.replace(way, forward_s=way.forward_s / 2, backward_s=way.backward_s / 2)
        for way in ways
    ]
    make_run(run.shares / f"{case.workload}-b{half.global_batch}", halves, cases=[half], **drawn)


def make_one(
    root: Path, way: Way = MPI, *, case: Case = Case(), jitter: float = 0.0, **changes: object
) -> TrialFiles:
    """Fabricate a run of one trial, and return its files. changes: of the way."""
    run = make_run(root, [dataclasses.replace(way, **changes)], cases=[case], jitter=jitter)
    return next(files for _, files in run.trials())


def make_trial_value(way: Way, case: Case = Case(), repeat: int = 0) -> Trial:
    placement = {
        "nodes": way.nodes, "ranks_per_node": way.ranks, "threads_per_rank": way.threads,
        "stages": way.stages, "allocated_cores": way.allocated_cores,
        "replicas_per_node": way.ranks // way.stages * way.thread_replicas,
    }  # fmt: skip
    training = {
        "workload": case.workload, "model": case.model, "dataset": f"data/{case.workload}",
        "seed": 1 + (repeat if case.vary_seed else 0), "image_size": 64,
        "global_batch": case.global_batch, "epochs": 9, "max_steps": case.steps,
        "warmup_steps": case.warmup_steps, "dropout": case.dropout, "precision": way.precision,
        "batch_norm": way.batch_norm, "evaluation": case.evaluation, "entry": case.entry,
        "batch_per_replica": case.batch_per_replica,
    }  # fmt: skip
    compression = {} if way.compression is None else {"compression": way.compression}
    trial = tiny_trial(
        placement, training, experiment="fabricated", repeat=repeat, launcher=way.launcher,
        transport=way.transport, local_strategy=way.local_strategy, link=way.link,
        strategy_options=_strategy_options(way), transport_options=compression,
    )  # fmt: skip
    return trial.model_copy(update={"id": trial_name(trial.configuration, repeat)})


def _strategy_options(way: Way) -> dict[str, object]:
    if way.stages > 1:
        return {
            "micro_batches": way.micro_batches,
            "schedule": way.schedule,
            "balance": None if way.split_points else way.balance,
            "split_points": way.split_points,
        }
    own = {"reduction": way.reduction, "averaging": way.averaging}
    return {key: value for key, value in own.items() if value is not None}


def make_trial(
    files: TrialFiles, trial: Trial, way: Way, case: Case, launched: float, jitter: float = 0.0
) -> None:
    files.root.mkdir(parents=True, exist_ok=True)
    files.trial.write_text(trial.model_dump_json())
    files.command.write_text(f"paceline-fabricated --trial {trial.id} <&>\n")
    noise = np.random.default_rng([trial.repeat, *trial.id.encode()])
    factors = np.exp(jitter * noise.standard_normal(case.steps)) * case.time_scale
    factors *= np.exp(0.3 * jitter * noise.standard_normal())
    train_start = launched + way.launch_s + way.imports_s + way.rendezvous_s
    train_start += way.data_load_s + way.model_build_s
    trained_s = float(way.step_s * factors.sum()) + case.evaluations_s()
    for rank in range(way.world):
        _make_rank(
            files, trial, way, case, rank,
            launched=launched, train_start=train_start, factors=factors,
        )  # fmt: skip
    ended = train_start + trained_s + way.bookkeeping_s + way.teardown_s
    for node in range(way.nodes):
        _make_trace(files, way, node, launched, train_start, train_start + trained_s, ended)
    _make_tensors(files, way, case)
    outcome = dataclasses.replace(
        ENDED_WELL, trial_id=trial.id, launched_unix_s=launched, ended_unix_s=ended
    )
    write_json(files.outcome, outcome)


def step_samples(case: Case, step: int) -> tuple[int, list[int]]:
    """Epoch and sample ids of a global step: each epoch in a seeded order of its own."""
    steps_per_epoch = -(-case.samples // case.global_batch)
    epoch, within = divmod(step, steps_per_epoch)
    order = np.random.default_rng(epoch).permutation(case.samples)
    return epoch, order[within * case.global_batch :][: case.global_batch].tolist()


def _make_rank(
    files: TrialFiles,
    trial: Trial,
    way: Way,
    case: Case,
    rank: int,
    *,
    launched: float,
    train_start: float,
    factors: NDArray[np.float64],
) -> None:
    own = files.rank(rank)
    offset = way.clock_offset_s if rank else 0.0
    at = launched + way.launch_s - offset  # this rank's clock
    process_start = at
    steps_end = train_start - offset + float(way.step_s * factors.sum()) + case.evaluations_s()
    with JsonlWriter(own.spans) as spans:
        spent: tuple[tuple[SpanName, float], ...] = (
            ("imports", way.imports_s),
            ("rendezvous", way.rendezvous_s),
            ("data_load", way.data_load_s),
            ("model_build", way.model_build_s),
        )
        for name, seconds in spent:
            spans.write(SpanRow(name=name, started_unix_s=at, ended_unix_s=at + seconds))
            at += seconds
        ended = steps_end + way.bookkeeping_s
        spans.write(SpanRow(name="train", started_unix_s=at, ended_unix_s=steps_end))
        spans.write(SpanRow(name="bookkeeping", started_unix_s=steps_end, ended_unix_s=ended))
    with JsonlWriter(own.steps) as rows, JsonlWriter(own.sample_log) as sample_log:
        for step in range(case.steps):
            row, ids = _step_row(way, case, rank, step, at, float(factors[step]))
            rows.write(row)
            sample_log.write(SampleLogRow(step=step, epoch=row.epoch, sample_ids=ids))
            at += row.step_s
            if case.is_evaluated(step):
                _make_evaluation(own, way, row, rank, at)
                at += EVALUATION_S
    node, local_rank = divmod(rank, way.ranks)
    # ranks with clocks of their own are on hosts of their own
    host = f"node{rank if way.clock_offset_s else node}"
    each = way.threads // way.thread_replicas
    affinity = list(way.affinity or range(local_rank * way.threads, (local_rank + 1) * way.threads))
    write_json(
        own.environment,
        RankEnvironment(
            rank=rank,
            world_size=way.world,
            local_rank=local_rank,
            node_index=node,
            host=host,
            pid=100 + rank,
            intraop_threads=each,
            interop_threads=1,
            omp_environment=way.omp,
            affinity=affinity,
            cgroup_cpu_limit=None,
            cgroup_memory_limit_bytes=None,
            cpu_model="Fabricated CPU @ 2.00GHz",
            precision=trial.training.precision,
            memory_format="contiguous",
            transport=way.transport,
            interface="lo",
            link=way.link,
            clock_offset_s=offset,
            clock_error_s=1e-5,
            versions={"python": "3.11.9", "torch": "2.13.0"},
            initial_weights_sha256="ab" * 32,
            workers=[
                WorkerEnvironment(
                    worker=worker,
                    thread_id=1000 + worker,
                    intraop_threads=each,
                    affinity=affinity[worker * each :][:each],
                )
                for worker in range(way.thread_replicas)
                if way.thread_replicas > 1
            ],
        ),
    )
    write_json(own.weights, RankWeights(replicas=[{"scale": "ab" * 32}], local=[]))
    write_json(
        own.status,
        RankStatus(
            rank=rank,
            host=host,
            pid=100 + rank,
            process_started_unix_s=process_start,
            state="done",
        ),
    )


def _make_evaluation(own: RankFiles, way: Way, row: StepRow, rank: int, at: float) -> None:
    """Accuracy grows by way.learned samples of 20 with each step, up to all of them.

    Each rank evaluates its share; the first ranks have the samples that are right.
    """
    low, high = share_bounds(HELD_OUT, rank, way.world)
    right = min(HELD_OUT, round(way.learned * (row.step + 1)))
    loss = 1.2 - LEARNED * (row.step + 1)
    values = {
        "loss": (loss * (high - low), high - low),
        "accuracy": (max(0, min(high, right) - low), high - low),
    }
    with JsonlWriter(own.evaluations) as rows:
        for metric, (total, count) in values.items():
            rows.write(
                EvaluationRow(
                    steps=row.step + 1,
                    epoch=row.epoch,
                    metric=metric,
                    sums=[float(total)],
                    counts=[float(count)],
                    started_unix_s=at,
                    ended_unix_s=at + EVALUATION_S,
                )
            )


def _step_row(
    way: Way, case: Case, rank: int, step: int, at: float, factor: float
) -> tuple[StepRow, list[int]]:
    epoch, ids = step_samples(case, step)
    node, local_rank = divmod(rank, way.ranks)
    replica, stage = divmod(local_rank, way.stages)
    shares = way.ranks // way.stages  # a node
    low, high = share_bounds(len(ids), node * shares + replica, way.nodes * shares)
    lead = way.lead_s * (way.world - 1 - rank)
    alone = way.replicas == 1
    skew = way.skew_s * stage
    forward = way.forward_s - skew
    backward = way.backward_s - lead
    bubble = way.bubble_s + skew if way.stages > 1 else 0.0
    within = None if way.pass_comm_s is None else way.pass_comm_s + lead
    comm = way.transfer_s + (lead if within is None else 0.0)
    ready = at + (way.data_wait_s + forward + backward + bubble + (within or 0.0)) * factor
    loss = 1.2 - LEARNED * step + (way.more_loss if step else 0.0)
    samples = high - low if stage == 0 else 0
    return StepRow(
        step=step,
        epoch=epoch,
        started_unix_s=at,
        samples=samples,
        global_samples=len(ids),
        loss_sum=loss * (high - low) if stage == way.stages - 1 else 0.0,
        data_wait_s=way.data_wait_s * factor,
        forward_s=forward * factor,
        backward_s=backward * factor,
        comm_s=None if alone else comm * factor,
        comm_ready_unix_s=None if alone else ready,
        optimizer_s=way.optimizer_s * factor,
        other_s=way.other_s * factor,
        step_s=way.step_s * factor,
        bubble_s=bubble * factor if way.stages > 1 else None,
        pass_comm_s=None if alone or within is None else within * factor,
    ), ids[low:high] if samples else []


def _make_trace(
    files: TrialFiles,
    way: Way,
    node: int,
    launched: float,
    train_start: float,
    train_end: float,
    ended: float,
) -> None:
    host = f"node{node}"
    threads = 7 * way.ranks if way.run_threads is None else way.run_threads
    with JsonlWriter(files.host(host).trace) as trace:
        trace.write({"schema": SCHEMA, "host": host, "cores": CORES, "interval_s": 0.5})
        ticks = np.arange(launched + 0.5, ended, 0.5)
        cpu_seconds = dict.fromkeys(("user", "system", "idle", "iowait", "steal", "other"), 100.0)
        run_cpu_seconds, trained_s = 0.0, 0.0
        for number, now in enumerate(ticks):
            training = train_start < now <= train_end
            loading = not training and train_start - way.data_load_s - 0.2 < now <= train_start
            busy = way.cpu_percent if training else 25.0
            iowait = 10.0 if loading else way.iowait_percent if training else 1.0
            steal = way.steal_percent if training else 0.0
            if number:
                percent = {"user": busy - 5, "system": 4.0, "other": 1.0}
                percent |= {"iowait": iowait, "steal": steal}
                percent["idle"] = 100.0 - busy - iowait - steal
                for mode, share in percent.items():
                    cpu_seconds[mode] += CORES * 0.5 * share / 100
                others = way.others_percent if training else 0.0
                run_cpu_seconds += 0.5 * 2 * (busy - others) / 100
                trained_s += 0.5 * training
            # a reading of what is expensive to read on every fourth tick
            is_read = way.full_trace and not number % 4
            switches = round(way.switches_per_s * trained_s) if is_read else None
            pressure = {
                "cpu": {"some_s": way.cpu_pressure_percent / 100 * trained_s},
                "io": {"some_s": way.io_pressure_percent / 100 * trained_s},
            }
            cgroup = {"throttled_s": way.throttled_percent / 100 * trained_s}
            read, sent = way.disk_bytes_per_s * trained_s, way.network_bytes_per_s * trained_s
            trace.write(
                {
                    "unix_s": float(now),
                    "ram_used_bytes": way.ram_bytes if training else 2_000_000_000,
                    "ram_total_bytes": 16_000_000_000,
                    "swap_used_bytes": 0,
                    "run_processes": way.ranks,
                    "run_cpu_seconds": run_cpu_seconds,
                    "run_rss_bytes": way.run_rss_bytes,
                    "run_pss_bytes": None if number % 4 else way.run_pss_bytes,
                    "run_threads": threads + (number % 2 if not training else 0),
                    "run_voluntary_context_switches": switches,
                    "run_involuntary_context_switches": switches,
                    "sidecar_cpu_seconds": 0.5 + 0.002 * number,
                    "sidecar_rss_bytes": 30_000_000,
                    "cpu_seconds": dict(cpu_seconds),
                    "cpu_frequency_hertz": way.frequency_hertz if way.full_trace else None,
                    "pressure": pressure if way.full_trace else {},
                    "cgroup": cgroup if way.full_trace else None,
                    "disks": {"sda": {"read_bytes": round(read), "written_bytes": 0}},
                    "networks": {"eth0": {"sent_bytes": round(sent), "received_bytes": 0}},
                }
            )


def _make_tensors(files: TrialFiles, way: Way, case: Case) -> None:
    random = np.random.default_rng(7)
    shapes = {"features.0.weight": (4, 3, 3), "features.0.bias": (4,), "scale": ()}
    initial = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    gradient = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    update = {n: np.float32(-0.01 * case.steps) * g for n, g in gradient.items()}
    final = {n: initial[n] + update[n] * np.float32(1 + way.weights_error) for n in shapes}
    files.gradient.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: np.asarray(g * np.float32(1 + way.gradient_error)) for n, g in gradient.items()},
        files.gradient,
    )
    save_file({n: np.asarray(w) for n, w in final.items()}, files.weights)
    write_json(
        files.result,
        TrainingResult(
            steps=case.steps,
            weights_sha256=hashlib.sha256(
                b"".join(np.asarray(final[n]).tobytes() for n in sorted(final))
            ).hexdigest(),
            update_l2={n: float(np.linalg.norm(final[n] - initial[n])) for n in shapes},
            parameters=case.parameters,
            communication=_communication(way),
        ),
    )


def _communication(way: Way) -> dict[str, object]:
    """What a strategy says of itself; of a pipeline, a cut before every other layer."""
    if way.sent_bytes is not None:
        return {
            "transport": way.transport,
            "sent_bytes_per_step": way.sent_bytes,
            "uncompressed_bytes_per_step": 4_000_000,
        }
    if way.stages == 1:
        return {"transport": way.transport}
    split_points = list(way.split_points or range(2, 2 * way.stages, 2))
    bounds = [0, *split_points, max(split_points) + 2]
    return {
        "transport": way.transport,
        "stages": way.stages,
        "micro_batches": way.micro_batches,
        "schedule": way.schedule,
        "balance": None if way.split_points else way.balance,
        "split_points": split_points,
        "first_layers": [f"features.{cut}" for cut in split_points],
        "layers": [[f"features.{n}" for n in range(*ends)] for ends in pairwise(bounds)],
        "bytes_forward": [1_500_000 * cut for cut in split_points],
        "bytes_backward": [1_500_000 * cut for cut in split_points],
    }


def _manifest(ids: list[str], cases: Sequence[Case]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "name": "fabricated",
        "spec_toml": 'schema = 2\nname = "fabricated"\n',
        "created_unix_s": LAUNCHED,
        "versions": {"paceline": "0.2.0", "torch": "2.13.0", "pyspark": "3.5.9"},
        "host": {
            "name": "node0",
            "cpu_model": "Fabricated CPU @ 2.00GHz",
            "cores": 2,
            "memory_bytes": 16_000_000_000,
        },
        "trials": ids,
        "data": {c.workload: f"data/{c.workload}" for c in cases},
    }


def pair_of(run: RunFiles) -> tuple[TrialFiles, TrialFiles]:
    """Return the trial under MPI and the baseline."""
    found = {files.root.name: files for _, files in run.trials()}
    trial = next(files for name, files in found.items() if ".mpi." in name)
    return trial, next(files for name, files in found.items() if ".sequential." in name)


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file in place."""
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps(document))


def edit_rows(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each row of a file of JSON lines in place."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
