"""Facts of a model that planning needs, derived from the model itself.

The model needs torch, which takes one to two seconds and 200 MB to import. Commands that only plan,
and the runner beside the trainings, must not carry that. So a short-lived process derives the
facts, only where a rule needs them. Those of our own models are kept in the cache folder, until the
source of the package or the version of Python or torch changes. The files on which a user's model
depends are not known, so its facts are derived in each command.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.base.host.machine import default_cache_dir
from paceline.base.host.messages import say
from paceline.base.host.programs import why_it_failed
from paceline.plan.spec.values import Target

# Classes for which facts hold; a data set with fewer classes has slightly fewer parameters.
CLASSES = 1000
_TIMEOUT_S = 120.0
_PACKAGE = Path(__file__).parents[2]


class ModelFacts(BaseModel):
    """Sizes are for `CLASSES` classes and fp32."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    parameters: int
    parameter_bytes: int
    split_points: tuple[int, ...]  # layers at which a pipeline stage may begin, ascending
    batch_norms: tuple[str, ...] = ()  # layers with batch statistics
    # those that cannot normalise a single sample, because it has one value for each channel
    batch_norms_of_several: tuple[str, ...] = ()
    optimizer: str = "SGD"  # class name
    clip_norm: float | None = None  # of the task
    # (first, last) layer of those that share a trained parameter
    tied_layers: tuple[tuple[int, int], ...] = ()
    target: Target | None = None  # of the task
    input_field: str = "image"
    target_field: str = "label"
    items: int | None = None  # samples of the task's own map-style data set
    unused_parameter: str | None = None  # one that gets no gradient from the model's output
    # why a pipeline cannot split the model, and why workers cannot update shards of parameters
    splitting_fault: str | None = None
    sharding_fault: str | None = None
    loss_fault: str | None = None  # why its loss cannot be used; None also if it is not known


@cache
def model_facts(
    implementation: str, options: str = "{}", data: str = "", samples: int = 0
) -> ModelFacts:
    """Return the facts of the model of a task; takes 1 to 2 s where they are not known yet.

    implementation: "module:Class" or "file.py:Class". options: those of the task, as JSON.
    data: path or URL of its data set, which shows what an input is; "" or a missing one: not known.
    samples: in the task's own data set, if that is synthetic; used where `data` is "".

    Raises EnvironmentLacks if the model cannot be built, TimedOut if that takes over 120 s.
    """
    words = [implementation, options, data, str(samples)]
    source = None if data or not implementation.startswith("paceline.") else _source_checksum()
    if source is None:
        return ModelFacts.model_validate_json(_derived(words))
    kept = (
        default_cache_dir() / "facts" / hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]
    )
    facts = _read(kept, source)
    if facts is None:
        facts = ModelFacts.model_validate_json(_derived(words))
        _keep(facts, kept, source)
    return facts


class _KeptFacts(BaseModel):
    """The file of a model in the cache folder."""

    source: str  # checksum of what the facts depend on
    facts: ModelFacts


@cache
def _source_checksum() -> str | None:
    """Return a checksum of all that facts of our own models depend on; None if it is not known."""
    files = sorted(_PACKAGE.rglob("*.py"))
    try:
        versions = f"{sys.version} {metadata.version('torch')}"
        contents = [file.read_bytes() for file in files]
    except (metadata.PackageNotFoundError, OSError):
        return None
    if not files:  # in an archive
        return None
    whole = hashlib.sha256(versions.encode())
    for file, content in zip(files, contents, strict=True):
        name = file.relative_to(_PACKAGE).as_posix()
        whole.update(f"{name} {len(content)} ".encode())
        whole.update(content)
    return whole.hexdigest()


def _read(kept: Path, source: str) -> ModelFacts | None:
    """Return facts that are still right; None without."""
    try:
        found = _KeptFacts.model_validate_json(kept.read_bytes())
    except (OSError, ValidationError):
        return None
    return found.facts if found.source == source else None


def _keep(facts: ModelFacts, kept: Path, source: str) -> None:
    """Write facts for later commands, which derive them again where this is not possible."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = _KeptFacts(source=source, facts=facts).model_dump_json()
        number, name = tempfile.mkstemp(dir=kept.parent, prefix=".", suffix=".part")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(kept)  # whole, also for a command that reads it now


def _derived(words: list[str]) -> str:
    """Return the facts as JSON, from a process that imports torch."""
    implementation = words[0]
    if sys.stderr.isatty():
        say(f"asking torch for the facts of model {implementation.rpartition(':')[2]}")
    command = [sys.executable, "-P", "-m", "paceline.train.workloads", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimedOut(
            f"model {implementation}: expected its facts within {_TIMEOUT_S:.0f} s, got none; "
            "is the machine overloaded?"
        ) from None
    if done.returncode != 0:
        raise EnvironmentLacks(
            f"model {implementation}: expected a model that can be built, got: "
            f"{why_it_failed(done)}"
        )
    return done.stdout
