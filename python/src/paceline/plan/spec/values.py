"""Types and words of spec values, and what they mean: rates, learning rates, names of data sets.

Light to import. Extensions add words of their own; the glossary explains all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.base.errors import UsageError

_MOST = 2**40  # of anything: samples, steps
PositiveInt = Annotated[int, Field(ge=1, le=_MOST)]
Whole = Annotated[int, Field(ge=0, le=_MOST)]
# Of nodes, ranks, threads, stages: a loop over so many ends in a second.
FewInt = Annotated[int, Field(ge=1, le=2**20)]
PositiveFloat = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False, strict=False)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
FILE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
FileName = Annotated[str, Field(pattern=FILE_NAME_PATTERN)]  # of a folder of a run directory
Count = FewInt | Literal["auto"]  # "auto": as the local strategy decides
FROM_LIST: Any = Field(strict=False)  # for tuples: TOML's arrays are lists

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
MatmulPrecision = Literal["highest", "high", "medium"]
MemoryFormat = Literal["contiguous", "channels_last"]
BatchNorm = Literal["global", "per-replica"]
ReadingMode = Literal["memory", "stream", "cold"]
BEST = "best"  # a local strategy that a search has to find first
# The trial that every speedup is relative to: one process, one thread, no launcher.
BASELINE = {"launcher": "local", "local_strategy": "sequential"}
DEFAULT_EPOCHS = 1


def is_baseline(
    launcher: str, local_strategy: str, arguments: tuple[str, ...], environment: Mapping[str, str]
) -> bool:
    """Return whether it is the sequential process that every speedup is relative to."""
    named = {"launcher": launcher, "local_strategy": local_strategy}
    return named == BASELINE and not (arguments or environment)


_DEEPEST = 64  # tables and lists in each other
_MOST_KEYS = 1000  # of a table
_MOST_INTEGER = 2**63  # TOML 1.0: integers have 64 bits
# A key of many parts, for which Python's parser takes a time that grows with their square.
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{_DEEPEST}}}"""
)


def toml_document(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError for other text, and for what no spec has: deep nesting,
    thousands of keys, numbers of more than 64 bits, and the character 0, which no path can have."""
    too_deep = ValueError(f"expected at most {_DEEPEST} tables and lists in each other")
    if _LONG_KEY.search(text) is not None:
        raise too_deep
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise too_deep from None
    left: list[tuple[int, str, Any]] = [(1, "", document)]
    while left:
        depth, place, value = left.pop()
        if depth > _DEEPEST:
            raise too_deep
        if isinstance(value, dict):
            if len(value) > _MOST_KEYS:
                raise ValueError(f"expected at most {_MOST_KEYS} keys in a table, got {len(value)}")
            left += ((depth + 1, key, inner) for key, inner in value.items())
        elif isinstance(value, list):
            left += ((depth + 1, place, inner) for inner in value)
        if isinstance(value, int) and not -_MOST_INTEGER <= value < _MOST_INTEGER:
            raise ValueError(f"{place}: expected an integer of at most 64 bits")
        if "\0" in place or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"{place!r}: expected text without the character 0")
    return document


_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg]?)(?:bit|bps|bit/s|b/s)")
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def bits_per_s(rate: str, option: str = "bandwidth") -> float:
    """Parse a rate such as `1gbit`, `1 Gbit/s` or `1gbps`.

    option: its name in messages. Raises UsageError for others, and below 64 kbit.
    """
    found = _RATE.fullmatch(rate.strip().lower())
    bits = float(found[1]) * _BITS[found[2]] if found else 0.0
    if bits < 64e3:
        raise UsageError(
            f'{option}: expected a rate such as "1gbit" or "100 Mbit/s" of at least 64kbit, '
            f"got {rate!r}"
        )
    return bits


LearningRateScaling = Literal["none", "linear", "sqrt"]
_EXPONENTS: dict[LearningRateScaling, float] = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
# Keys of [training] and [[workloads]] beside `learning_rate`.
LEARNING_RATE_KEYS = ("learning_rate_scaling", "reference_batch", "learning_rate_warmup_steps")


def scaled_learning_rate(
    learning_rate: float, scaling: LearningRateScaling, global_batch: int, reference_batch: int
) -> float:
    """Return the rate for a global batch.

    learning_rate: for `reference_batch` samples. Linear: in proportion to the batch (Goyal et al.,
    arXiv:1706.02677); sqrt: to its square root (Krizhevsky, arXiv:1404.5997).
    """
    factor: float = (global_batch / reference_batch) ** _EXPONENTS[scaling]
    return learning_rate * factor


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the factor of the rate in `step` (from 0): it grows linearly to 1 in `warmup_steps`.

    Step s of a warm-up of n steps has the factor (s + 1) / n.
    """
    return min(1.0, (step + 1) / max(1, warmup_steps))


def training_steps(samples: int, global_batch: int, epochs: int, max_steps: int | None) -> int:
    """Return the steps of a training; the last batch of an epoch may be smaller."""
    whole = -(-samples // global_batch) * epochs
    return whole if max_steps is None else min(whole, max_steps)


REMOTE_SCHEMES = ("s3", "gs", "hdfs")
_URL_RESERVED = "#?;"


def is_remote(name: str) -> bool:
    """Return whether the name is a URL of a remote place."""
    return name.partition("://")[0] in REMOTE_SCHEMES and "://" in name


def local_path(path: str | Path) -> Path:
    """Return the local folder that a path or file:// URL names.

    Raises UsageError for another scheme, and for characters that Petastorm would cut off because
    it reads paths as URLs.
    """
    text = str(path)
    parts = urlsplit(text)
    if "://" in text and parts.scheme == "file":
        text = unquote(parts.path)
    elif "://" in text:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password
        raise UsageError(
            f"{place}: expected a folder that every node sees, or a URL that begins with file://, "
            f"{', '.join(f'{scheme}://' for scheme in REMOTE_SCHEMES)}, got {parts.scheme}://; "
            "copy the data set to such a place first"
        )
    if any(character in text for character in _URL_RESERVED):
        raise UsageError(
            f"{text}: the path of a data set must not contain any of {' '.join(_URL_RESERVED)} "
            "(Petastorm reads paths as URLs); choose another folder"
        )
    return Path(text).absolute()


def absolute_name(name: str | Path) -> str:
    """Return a URL unchanged, and a path as an absolute path."""
    return str(name) if "://" in str(name) else str(Path(name).resolve())


# --- tables of a spec that the training reads, too: [checkpoint], [failures] and targets ---------


class SpecTable(BaseModel):
    """A table of a spec: no unknown keys, and no value is converted silently.

    Like those of other models, its validator is built when it is first used: ranks and sidecars
    read few of the tables.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class CheckpointSettings(SpecTable):
    """[checkpoint]: a checkpoint every so many steps.

    keep: keep the newest checkpoints of a trial that has ended well.
    """

    every_steps: PositiveInt
    keep: bool = False


FailureKind = Literal["rank", "executor", "host"]


class FailureSettings(SpecTable):
    """[failures]: a part of each trial gets SIGKILL at random times, drawn from the seed.

    mean_s: mean of the exponential time from a step of all ranks to the next failure; the times
    and ranks are the same in every trial of a repeat. count: failures of a trial. kinds: what is
    killed, in turn: a rank, the executor that holds it, or all processes of its host in a lab,
    whose link is down for host_down_s seconds. A trial skips kinds that it does not have.
    """

    mean_s: PositiveFloat
    count: PositiveInt = 1
    kinds: tuple[FailureKind, ...] = Field(default=("rank",), min_length=1, strict=False)
    host_down_s: PositiveFloat = 5.0


# Values of [training] and [[workloads]] that belong to evaluations; the first one enables them.
EVALUATION_KEYS = ("held_out_samples", "evaluate_every_steps", "evaluate_every_epochs", "target")
Bound = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class Target(SpecTable):
    """A bound of a metric of `Task.evaluate`: `{ metric = "accuracy", at_least = 0.9 }`."""

    metric: Annotated[str, Field(min_length=1)]
    at_least: Bound | None = None
    at_most: Bound | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("target: expected either at_least or at_most")
        return self

    def reached(self, value: float) -> bool:
        """Return whether a value of the metric meets the target; NaN does not."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def words(self) -> str:
        """The target for a sentence, for example `accuracy of at least 0.9`."""
        if self.at_least is not None:
            return f"{self.metric} of at least {self.at_least:g}"
        return f"{self.metric} of at most {self.at_most:g}"
