"""Run a script as Python would, and say where it failed."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from paceline.base.errors import PacelineError, RankFailed
from paceline.plan.trials.trial import RankContext

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Script, Trial


# Modules of scripts that have ended. They are not freed before the process ends: models that are
# freed after the process group may wait for it, and nothing is left to do then.
_ended: list[ModuleType] = []


class EnoughSteps(BaseException):
    """Ends a script after `max_steps`. Not an Exception, because scripts catch those."""


def run_script(script: Script, more: Sequence[str] = ()) -> bool:
    """Run the script as `__main__`, with its arguments, in its directory.

    more: arguments of the trial, after those of the script. Return whether it ended by itself, not
    by `EnoughSteps`. Raises whatever the script raises, after its stack trace was printed;
    RankFailed if it ends with an exit status other than 0.
    """
    os.chdir(script.directory)
    sys.argv = [script.path, *script.arguments, *more]
    own = Path(script.path).resolve().parent
    folder = script.directory if script.module is not None else str(own)
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]).is_dir():
        sys.path[0] = folder
    else:  # the first entry is one of PYTHONPATH, or an archive with this package
        sys.path.insert(0, folder)
    log, own_print = sys.stderr, builtins.print  # the script may replace them
    try:
        _run_as_main(script)
    except EnoughSteps:
        return False
    except SystemExit as end:
        _check_exit_status(script, end, log)
    except PacelineError:  # its message says all
        raise
    except Exception as error:
        _write_stack(script, error, log)
        raise
    finally:
        builtins.print = own_print  # that of a script may know no `file`
    return True


def _run_as_main(script: Script) -> None:
    module = ModuleType("__main__")
    module.__file__ = script.path
    before = sys.modules["__main__"]
    try:
        if script.module is not None:
            module.__spec__ = spec = _spec_of(script.module)
            module.__package__ = spec.parent
        sys.modules["__main__"] = module
        code = compile(Path(script.path).read_bytes(), script.path, "exec", dont_inherit=True)
        exec(code, vars(module))  # noqa: S102  (the user asks for it)
    finally:
        sys.modules["__main__"] = before
        _ended.append(module)


def _spec_of(name: str) -> ModuleSpec:
    """Return the spec of a module, or of the `__main__` of a package; imports its parents."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return spec


def failure_of(script: Script, error: Exception) -> PacelineError:
    """Return the error of a rank whose script ended with `error`: file, line and message."""
    if isinstance(error, PacelineError):
        return error
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
    advice = ""
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        advice = "; run it as a module, as `python -m` does: `paceline run -m PACKAGE.MODULE`"
    return RankFailed(f"{_place(script, error)}: {what}{advice} (stack trace in the rank's log)")


def _check_exit_status(script: Script, end: SystemExit, log: TextIO) -> None:
    """Raise RankFailed unless the script has ended well; Python prints a text and exits with 1."""
    if end.code in (None, 0):
        return
    if isinstance(end.code, int):
        reason = f"it ended with exit status {end.code}"
    else:
        log.write(f"{end.code}\n")
        reason = f"it ended with: {end.code}"
    raise RankFailed(f"{_place(script, end)}: {reason}")


def _write_stack(script: Script, error: Exception, log: TextIO) -> None:
    """Write the stack as Python would, without the frames above the script.

    It is written, not printed: scripts replace `print` on all ranks but the first.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script.path:
        trace = trace.tb_next
    log.write("".join(traceback.format_exception(type(error), error, trace)))
    log.flush()


def _place(script: Script, error: BaseException) -> str:
    """Return the file and the line where the error left the user's own code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    folder = Path(script.path).parent if script.module is None else Path(script.directory)
    places = [
        f"{frame.filename}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return places[-1] if places else script.path


def torchrun_variables(trial: Trial, context: RankContext) -> dict[str, str]:
    """Return what torchrun would set for this rank (torch/distributed/run.py, "Environment
    Variables").

    A store that the script opens with MASTER_ADDR and MASTER_PORT connects to Paceline's. A single
    rank has none, and port 0 lets it open one of its own.
    """
    address = context.store
    variables = {
        "RANK": context.rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_WORLD_SIZE": context.ranks_on_node,
        "GROUP_RANK": context.node_index,
        "GROUP_WORLD_SIZE": trial.placement.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": context.rank,
        "ROLE_WORLD_SIZE": context.world_size,
        "MASTER_ADDR": "127.0.0.1" if address is None else address.host,
        "MASTER_PORT": 0 if address is None else address.port,
        "TORCHELASTIC_RUN_ID": trial.id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": address is not None,  # a store listens already
    }
    return {name: str(value) for name, value in variables.items()}
