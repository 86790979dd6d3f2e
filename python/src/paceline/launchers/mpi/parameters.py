"""The names of Open MPI's MCA parameters. mpirun ignores unknown ones without a message."""

from __future__ import annotations

import difflib
import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LIMIT_S = 20.0
# a line is mca:btl:tcp:param:btl_tcp_links:value:1
_PARAMETER = re.compile(r"^mca:[^:]*:[^:]*:param:([^:]+):value:", re.MULTILINE)


@cache
def known_parameters(mpirun: Path) -> frozenset[str] | None:
    """Return all names that the Open MPI of this mpirun knows; None if it cannot list them."""
    program = mpirun.parent / "ompi_info"
    try:
        output = subprocess.run(
            [str(program), "--all", "--parsable"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(_PARAMETER.findall(output)) or None


def unknown_parameters(names: Iterable[str], mpirun: Path) -> str | None:
    """Return a message about the unknown ones of `names`; None if all are known."""
    known = known_parameters(mpirun)
    unknown = [] if known is None else [name for name in names if name not in known]
    if known is None or not unknown:
        return None
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    hint = f", did you mean {', '.join(near)}?" if near else ";"
    return (
        f"the Open MPI of {mpirun} has no parameter {', '.join(unknown)}{hint} "
        "`ompi_info --all` lists them"
    )
