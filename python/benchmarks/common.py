"""Common parts of all benchmarks: raw values, ratios within one run, medians with intervals."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.base.host.machine import machine_facts, package_versions
from paceline.base.host.programs import repository_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ABSOLUTE_FOLDER = re.compile(r"(?<![^=:,])/(?:[^\s/]+/)*")  # at the beginning of a word or value


def documented_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the text of a module, as it stands."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def write_results(path: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write raw values and conclusions with what they are worthless without."""
    document = {
        "benchmark": name,
        # folders of the machine do not belong in results
        "command": " ".join(["python", *(_ABSOLUTE_FOLDER.sub("", word) for word in sys.argv)]),
        "date": time.strftime("%Y-%m-%d"),
        "host": {k: v for k, v in machine_facts().items() if k != "host"},
        "versions": package_versions(),
        "git": repository_state(Path(__file__).parent),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"raw values: {path}", file=sys.stderr)


def median_interval(values: Sequence[float], seed: int = 1) -> dict[str, float]:
    """Median with a 95 % bootstrap percentile interval (Efron, Tibshirani 1993, ch. 13)."""
    data = np.asarray(values)
    generator = np.random.default_rng(seed)
    draws = np.median(generator.choice(data, size=(2000, len(data))), axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"median": statistics.median(values), "low": float(low), "high": float(high)}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Interval of the ratio ours/theirs over pairs that ran next to each other."""
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def call(argv: Sequence[str], environment: Mapping[str, str], limit_s: float, log: Path) -> float:
    """Run `argv` to its end and return its start (unix seconds). Raises if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started_unix_s = time.time()
    with log.open("w") as output:
        subprocess.run(
            list(argv),
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            check=True,
        )
    return started_unix_s


def made_dataset(folder: Path, preset: str, images: int, limit_s: float) -> Path:
    """Synthesise images and ingest them, in processes of their own; return the data set."""
    source, dataset = folder / "images", folder / "dataset"
    synth = ["synth", source, "--preset", preset, "--images", images]
    for words in (synth, ["ingest", source, dataset]):
        command = [sys.executable, "-m", "paceline.cli", "data", *map(str, words)]
        subprocess.run(command, check=True, timeout=limit_s, stdout=sys.stderr)
    return dataset


def shown(name: str, interval: Mapping[str, float], unit: str = "") -> None:
    print(
        f"{name:<58} {interval['median']:8.3f} [{interval['low']:.3f}, {interval['high']:.3f}] "
        f"{unit}"
    )
