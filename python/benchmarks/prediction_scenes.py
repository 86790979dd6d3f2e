"""The hosts, links and configurations of predictions.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab import FULL
from paceline.runner.lab import LabSettings

SPEC = """
schema = 2
name = "{name}"
seed = 1
repeats = {repeats}
[[workloads]]
name = "{workload}"
{keys}
samples = 256
global_batch = {batch}
max_steps = {steps}
epochs = {steps}
warmup_steps = 2
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trials}
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[telemetry]
interval_s = 0.5
[limits]
trial_s = 900
rendezvous_s = 120
collective_s = 300
"""
ONE_HOST = """[[trials]]
launcher = "local"
{strategy}
"""
SEVERAL_HOSTS = """[[trials]]
launcher = "mpi"
transport = "{transport}"
sufficient_factors = "{factors}"
{strategy}
nodes = {nodes}
"""


# On several hosts they do not follow from the cores of the first one.
_COUNTS = {
    "intraop": "threads_per_rank = 2",
    "threads": "replicas = 2\nthreads_per_rank = 2",
    "processes": "ranks_per_node = 2\nthreads_per_rank = 1",
    "pipeline": "stages = 2\nthreads_per_rank = 1",
}


def strategy_keys(strategy: str) -> str:
    """Return the keys of a trial with two cores on each host."""
    return f'local_strategy = "{strategy}"\n{_COUNTS.get(strategy, "")}'


@dataclass(frozen=True, kw_only=True)
class Workload:
    """keys: others of the workload in the spec."""

    name: str
    keys: str
    steps: int


@dataclass(frozen=True)
class Part:
    """Predictions from one calibration.

    batches: of one host, to calibrate; two hosts are calibrated with the first. predicted: hosts
    and global batch. links: rates at which they are predicted. strategies: the predicted ones.
    """

    workload: Workload
    factors: str
    links: tuple[str, ...]
    predicted: tuple[tuple[int, int], ...]
    batches: tuple[int, ...] = (64, 32, 16)
    strategies: tuple[str, ...] = ("sequential",)

    @property
    def name(self) -> str:
        return f"{self.workload.name}-{self.factors}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Hosts of a lab and what is predicted on them.

    calibrated: strategies of the calibration on one host. between: strategy of the calibration on
    two hosts.
    """

    hosts: LabSettings
    calibrated: tuple[str, ...]
    between: str
    parts: tuple[Part, ...]


_TINY = Workload(name="tiny", keys="image_size = 128", steps=24)
_ALEXNET = Workload(name="simple-big", keys="image_size = 224", steps=8)
_VGG16 = Workload(name="complex-small", keys="image_size = 64", steps=8)
_TASK = Path(__file__).with_name("sleeping_task.py")


def _sleeping(name: str, layers: int, width: int) -> Workload:
    options = f"{{ layers = {layers}, width = {width} }}"
    return Workload(name=name, keys=f'task = "{_TASK}:Sleeping"\noptions = {options}', steps=8)


_WIDE = _sleeping("wide", 6, 1024)  # 25 MB of gradients
_DEEP = _sleeping("deep", 24, 256)  # 6 MB
_BOTH = ("1gbit", "100mbit")
_TWO_BATCHES = ((2, 64), (2, 32))
_OTHERS = ("threads", "processes", "pipeline")
_MORE_HOSTS = ((3, 48), (4, 64))  # 16 samples on each
_BETWEEN = ("500mbit", "200mbit")  # neither calibrated nor tested before

# Without factors a step of AlexNet sends 228 MB, which take 18 s at 100 Mbit/s; VGG16's 0.5 GB.
SCENES = {
    "links": Scene(
        hosts=LabSettings(hosts=2, cores=1, slots=1),
        calibrated=(),
        between="sequential",
        parts=(
            Part(_TINY, "never", _BOTH, _TWO_BATCHES),
            Part(_ALEXNET, "never", ("1gbit",), _TWO_BATCHES),
            Part(_TINY, "always", _BOTH, _TWO_BATCHES),
            Part(_ALEXNET, "always", _BOTH, _TWO_BATCHES),
            Part(_VGG16, "always", _BOTH, ((2, 16), (2, 8)), (16, 8, 4)),
        ),
    ),
    "hosts": Scene(
        hosts=LabSettings(hosts=4, slots=1),  # they share the cores of the machine
        calibrated=(),
        between="sequential",
        parts=(
            Part(_WIDE, "never", _BOTH, _MORE_HOSTS, (32, 64, 16)),
            Part(_WIDE, "always", _BOTH, _MORE_HOSTS, (32, 64, 16)),
            Part(_DEEP, "never", _BOTH, _MORE_HOSTS, (32, 64, 16)),
        ),
    ),
    "strategies": Scene(
        hosts=LabSettings(hosts=2, slots=2),
        calibrated=("intraop", "threads", "processes", "pipeline"),
        between="intraop",
        parts=(
            Part(_WIDE, "never", (FULL, "1gbit"), ((2, 64),), (64, 32), _OTHERS),
            # which factors the stages of a pipeline send is not predicted
            Part(_WIDE, "always", _BOTH, ((2, 64),), (64, 32), _OTHERS[:2]),
        ),
    ),
    "new": Scene(
        hosts=LabSettings(hosts=2, cores=1, slots=1),
        calibrated=(),
        between="sequential",
        parts=(
            Part(_TINY, "never", _BETWEEN, ((2, 64), (2, 48))),
            Part(_TINY, "always", _BETWEEN, ((2, 64), (2, 48))),
            Part(_ALEXNET, "always", _BETWEEN, ((2, 64), (2, 48))),
            Part(_VGG16, "always", _BETWEEN, ((2, 16), (2, 12)), (16, 8, 4)),
        ),
    ),
}
