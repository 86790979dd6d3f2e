"""Texts of small specs: a workload with its baseline, and what a test adds.

Lines may be separated by "; ".
"""

from __future__ import annotations

import json

BASELINE = 'launcher = "local"; local_strategy = "sequential"'


def spec_text(
    *trials: str, workload: str = 'name = "tiny"', tables: str = "", **keys: object
) -> str:
    """Return a spec with a baseline and other trials, whose text can go on with the last of them.

    trials, workload: keys of the entries; tables: further tables; keys: those of the top level.
    """
    # other processes of the machine that runs the tests add no trials
    top = {"schema": 2, "name": "mine", "measure_again": False, **keys}
    parts = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    parts += [tables, f"[[workloads]]; {workload}"]
    return _lines(*filter(None, parts)) + trials_text(BASELINE, *trials)


def trials_text(*trials: str) -> str:
    """Return entries of [[trials]]."""
    return "".join(_lines("[[trials]]", each) for each in trials)


def _lines(*parts: str) -> str:
    return "; ".join(parts).replace("; ", "\n") + "\n"
