"""Versions that ranks on several hosts must share: they decide what is computed and sent.

Other differences, such as that of NumPy or of a release of Python, are stated in the report.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import torch

from paceline.errors import EnvironmentLacks
from paceline.version import __version__


def own_versions() -> str:
    """Return the versions of this rank, for `check_versions` on every rank."""
    return json.dumps({"Paceline": __version__, "torch": torch.__version__})


def check_versions(hosts: Sequence[str], versions: Sequence[str]) -> None:
    """Raise EnvironmentLacks if the hosts have different versions. hosts, versions: by rank."""
    found: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for host, text in zip(hosts, versions, strict=True):
        for name, version in json.loads(text).items():
            found[name][version][host] = None
    differing = [
        f"{name} {', '.join(f'{version} on {_listed(on)}' for version, on in values.items())}"
        for name, values in found.items()
        if len(values) > 1
    ]
    if differing:
        raise EnvironmentLacks(
            f"expected equal versions on all hosts, found {'; '.join(differing)}; install the same "
            "environment at the same path on every host (`paceline doctor` compares several hosts)"
        )


def _listed(hosts: dict[str, None]) -> str:
    return " and ".join(hosts)
