"""Mutation testing: change one line of a package at a time, and see whether its unit tests fail.

    ./pacelinew mutate [PACKAGE ...] [--count N] [--seed N] [--limit-s SECONDS]

Cosmic Ray makes the mutants. They are written into a copy of the package, which the tests import
instead of the checkout. The same seed samples the same mutants of the same code.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "python" / "src"
_LEFT_OUT = (
    "VariableReplacer", "VariableInserter",  # need the names of variables
    "ExceptionReplacer",  # fails at names with a dot
    "ReplaceComparisonOperator_Is_Eq", "ReplaceComparisonOperator_IsNot_NotEq",  # same with None
)  # fmt: skip
_END_S = 10.0
_LONGEST_LINE = 90
_SHOWN_LINES = 30  # of tests that fail without a change
_STARTED_IN_S = 30.0  # imports of a test process on a busy machine


@dataclass(frozen=True, slots=True)
class Package:
    """Modules that are mutated, and the tests that have to notice; paths of pathlib's glob."""

    modules: tuple[str, ...]  # below python/src/paceline
    tests: tuple[str, ...]  # below tests


PACKAGES = {
    # `spec` checks what users write, `plan` what follows from it: their tests are not apart.
    "plan": Package(("plan/trials/*.py",), ("unit/plan",)),
    "statistics": Package(("analysis/statistics/*.py",), ("unit/analysis/statistics",)),
    # What all strategies share is tested by training with them, too.
    "training": Package(
        ("train/training/*.py",), ("unit/train/training", "unit/train/strategies"),
    ),
    "records": Package(("measure/records/*.py",), ("unit/measure/records",)),
    "spec": Package(("plan/spec/*.py",), ("unit/plan",)),
    "telemetry": Package(
        tuple(f"measure/telemetry/{name}.py" for name in (
            "gpus", "host_reading", "kernel", "processes", "rank_finder", "training",
        )),
        ("unit/measure/telemetry",),
    ),
    "reduction": Package(
        (
            "collectives/node/*.py",
            "collectives/message_schedules.py",
            "collectives/buffers.py",
            "collectives/shared_memory.py",
            "train/transports/compression.py",
        ),
        ("unit/collectives", "unit/train/transports"),
    ),
    # Sums over several nodes need several processes.
    "strategies/reduction": Package(
        ("train/strategies/reduction/*.py",),
        ("unit/train/strategies", "contract/test_factors.py", "contract/test_zero.py"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    operator: str
    code: str  # of the whole file

    def change(self) -> str:
        """Return the first line that differs, before and after."""
        lines = (self.path.read_text("utf-8").splitlines(), self.code.splitlines())
        for before, after in zip(*lines, strict=False):
            if before != after:
                return f"{before.strip()[:_LONGEST_LINE]}  ->  {after.strip()[:_LONGEST_LINE]}"
        return "lines at the end"


def sample(package: Package, count: int, seed: int) -> list[Mutant]:
    """Return mutants of different places, drawn from all places of the package."""
    draw = random.Random(seed)  # noqa: S311  (a sample, not a secret)
    files = sorted(path for glob in package.modules for path in (SOURCE / "paceline").glob(glob))
    places: dict[tuple[Path, int, int], list[tuple[str, int]]] = {}
    for path in files:
        for line, column, operator, occurrence in _positions(path):
            places.setdefault((path, line, column), []).append((operator, occurrence))
    found: list[Mutant] = []
    for path, line, column in draw.sample(sorted(places), len(places)):
        if len(found) == count:
            break
        operator, occurrence = draw.choice(places[path, line, column])
        code = mutate_code(path.read_text("utf-8"), OperatorProvider()[operator](), occurrence)
        if code is not None and _runs_differently(path.read_text("utf-8"), code):
            found.append(Mutant(path, line, operator, code))
    return found


def _positions(path: Path) -> Iterator[tuple[int, int, str, int]]:
    nodes = list(ast_nodes(get_ast(path.read_text("utf-8"))))
    for name in OperatorProvider():
        if name in _LEFT_OUT:
            continue
        operator = OperatorProvider()[name]()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(starts):
            yield line, column, name, occurrence


def _runs_differently(before: str, after: str) -> bool:
    """Return whether a mutant compiles, and changes more than type annotations."""
    try:
        return _without_types(before) != _without_types(after)
    except SyntaxError:
        return False


def _without_types(code: str) -> str:
    return ast.dump(_WithoutTypes().visit(ast.parse(code)))


class _WithoutTypes(ast.NodeTransformer):
    """Remove annotations, imports for them, and the options of dataclasses."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


class Copy:
    """A copy of the package, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self._source = folder / "src"
        self.output = folder / "output"  # of the last tests
        # Tests need one, for a compiled device; the checkout.s knows which tests failed last.
        self._cache = folder / "cache"
        shutil.copytree(SOURCE, self._source, symlinks=False)

    def run(self, tests: Sequence[str], limit_s: float) -> int | None:
        """Return pytest's exit status; None if it did not end within the limit."""
        words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "python" / "pyproject.toml")]
        words += ["--rootdir", str(ROOT), "-n", "0", "-x", "-q", "-o", f"cache_dir={self._cache}"]
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                [*words, *(str(ROOT / "tests" / each) for each in tests)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(self._source)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what its tests have started, too
            process.wait(timeout=_END_S)

    def write(self, path: Path, code: str) -> None:
        copied = self._source / path.relative_to(SOURCE)
        copied.write_text(code, "utf-8")
        # It may have the size and, within a second, the time of the code before.
        for compiled in (copied.parent / "__pycache__").glob(f"{copied.stem}.*.pyc"):
            compiled.unlink()


def check(name: str, package: Package, options: argparse.Namespace, copy: Copy) -> tuple[int, int]:
    """Test mutants of a package; return how many were caught, and how many there were."""
    began_s = time.monotonic()
    status = copy.run(package.tests, options.limit_s)
    if status != 0:
        lines = copy.output.read_text("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
        why = "fail" if status else f"do not end within {options.limit_s:g} s (--limit-s)"
        message = f"mutate: without a change the tests of {name} {why}; see above"
        sys.exit("\n".join([*lines, message]))
    limit_s = min(options.limit_s, _STARTED_IN_S + 3 * (time.monotonic() - began_s))
    mutants = sample(package, options.count, options.seed)
    caught = 0
    for mutant in mutants:
        copy.write(mutant.path, mutant.code)
        status = copy.run([*_nearest(mutant, package), *package.tests], limit_s)
        copy.write(mutant.path, mutant.path.read_text("utf-8"))
        result = {0: "SURVIVED", None: "caught (time)"}.get(status, "caught")
        caught += status != 0
        place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
        print(f"{result:13} {place}  {mutant.operator}: {mutant.change()}", flush=True)
    print(f"{name}: {caught} of {len(mutants)} mutants caught", flush=True)
    return caught, len(mutants)


def _nearest(mutant: Mutant, package: Package) -> list[str]:
    """Return the test file with the module's name, which runs first: it notices most changes."""
    name = f"test_{mutant.path.stem}.py"
    found = (path for tests in package.tests for path in (ROOT / "tests" / tests).rglob(name))
    return [str(path) for path in found]


def main() -> None:
    parser = argparse.ArgumentParser(prog="pacelinew mutate", description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--count", type=int, default=15, help="mutants of each package (15)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of a test run (600)")
    options = parser.parse_args()
    unknown = [name for name in options.packages if name not in PACKAGES]
    if unknown:
        parser.error(f"expected packages of {', '.join(PACKAGES)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="paceline-mutants-") as folder:
        copy = Copy(Path(folder))
        results = [
            check(name, PACKAGES[name], options, copy) for name in options.packages or PACKAGES
        ]
    caught, all_of_them = (sum(numbers) for numbers in zip(*results, strict=True))
    print(f"{caught} of {all_of_them} mutants caught")


if __name__ == "__main__":
    main()
