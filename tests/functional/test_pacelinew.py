"""The `pacelinew` script: its decisions against a fake Python and pip, and one real installation.

The fakes record what the script had done and make files as the real ones would; the script itself,
the shell, the file lock and the version checks are real.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_command
from tests.support.waiting import wait_for

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
THREE_AT_A_TIME = "-n|3|--dist|loadgroup|--no-loadscope-reorder"
COMMANDS = (
    "sh", "cat", "cksum", "cp", "dirname", "grep", "head", "mkdir", "mv", "printf", "readlink",
    "rm", "sed", "sleep", "tail", "touch",
)  # fmt: skip

# Stands for the interpreter on PATH: makes a fake environment, is the real Python otherwise.
BASE_PYTHON = """\
#!/bin/sh
[ "$1" = -I ] || { echo "a module of the caller could shadow the library's: $*" >&2; exit 99; }
case "$*" in
    "-I -m venv "*)
        echo venv >>"$FAKES/calls"
        mkdir -p "$4/bin"
        cp "$FAKES/env-python" "$4/bin/python"
        touch "$4/pyvenv.cfg" ;;
    *"import ensurepip"*) [ ! -e "$FAKES/no-ensurepip" ] ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

# Stands for .venv/bin/python. The last of pip's calls, the editable one, brings the programs.
ENV_PYTHON = """\
#!/bin/sh
[ "$1" = -I ] || { echo "a module of the caller could shadow the library's: $*" >&2; exit 99; }
case "$*" in
    "-I -m pip --version") exit 0 ;;
    "-I -m pip "*)
        shift 5
        echo "pip $*" >>"$FAKES/calls"
        echo "Collecting something"
        if [ -e "$FAKES/pip-waits" ]; then touch "$FAKES/pip-started"; sleep 30; fi
        if [ -e "$FAKES/pip-is-slow" ]; then sleep 0.2; fi
        if [ -e "$FAKES/pip-fails" ]; then echo "ERROR: no matching distribution"; exit 1; fi
        case "$*" in
            *" -e "*) cp "$FAKES"/programs/* "${0%/*}/" ;;
        esac ;;
    "-I -m compileall "*) echo compile >>"$FAKES/calls"; exit 1 ;;
    "-I -m paceline.runner.launchers.spark.class_archive") echo archive >>"$FAKES/calls"; exit 3 ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

PROGRAM = """\
#!/bin/sh
printf '%s|' "${0##*/}" "$@"
echo
case " $FAILING " in *" ${0##*/} "*) exit 7 ;; esac
"""

# Another version of Python, whose pip installs uv.
OTHER_PYTHON = """\
#!/bin/sh
case "$*" in
    "-I -m venv "*) mkdir -p "$4/bin"; cp "$FAKES/bin/python3" "$4/bin/python" ;;
    *" install -q uv") cp "$FAKES/uv" "${0%/*}/uv" ;;
    *platform*) echo 3.13.1 ;;
    *) exit 1 ;;
esac
"""

UV = """\
#!/bin/sh
case "$*" in
    "python find 3.11") echo "$FAKES/python-of-uv" ;;
    *) echo "uv $*" >>"$FAKES/calls" ;;
esac
"""

UNFIT_PYTHON = """\
#!/bin/sh
case "$*" in
    *platform*) echo 3.10.4 ;;
    *) exit 1 ;;
esac
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@dataclass
class Checkout:
    """A checkout with fakes beside it."""

    root: Path
    fakes: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def start(
        self,
        *arguments: str,
        script: Path | None = None,
        cwd: Path | None = None,
        shell: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*shell, str(script or self.root / "pacelinew"), *arguments],
            cwd=cwd or self.fakes,
            env={
                "PATH": str(self.fakes / "bin"),
                "FAKES": str(self.fakes),
                "REAL_PYTHON": sys.executable,
                **self.extra,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*arguments, **options))

    def calls(self) -> list[str]:
        file = self.fakes / "calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def forget_calls(self) -> None:
        (self.fakes / "calls").unlink(missing_ok=True)

    def switch(self, name: str, *, on: bool = True) -> None:
        if on:
            (self.fakes / name).touch()
        else:
            (self.fakes / name).unlink()


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root, fakes = tmp_path / "my check-out", tmp_path / "fakes"
    (root / "python").mkdir(parents=True)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "pacelinew", root / "pacelinew")
    (root / "python" / "requirements.lock").write_text(
        "# comment\nnumpy==1.26.4\nsetuptools==84.2.1\nwheel==0.48.0\n", encoding="utf-8"
    )
    (root / "python" / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    write_program(fakes / "bin" / "python3.11", BASE_PYTHON)
    write_program(fakes / "env-python", ENV_PYTHON)
    for name in ("paceline", "pytest", "ruff", "mypy", "lint-imports", "mkdocs"):
        write_program(fakes / "programs" / name, PROGRAM)
    for command in COMMANDS:
        found = shutil.which(command)
        assert found, f"this test needs {command}"
        (fakes / "bin" / command).symlink_to(found)
    return Checkout(root, fakes)


FULL_INSTALLATION = [
    "venv",
    "pip install --no-compile setuptools==84.2.1 wheel==0.48.0",
    "pip install --no-compile --no-build-isolation -r {root}/python/requirements.lock",
    "pip install --no-compile --no-deps --no-build-isolation -e {root}/python",
    # the failure of these two is no failure of the installation
    "compile",
    "archive",
]


def full_installation(checkout: Checkout) -> list[str]:
    return [call.format(root=checkout.root) for call in FULL_INSTALLATION]


SHELLS = [
    (path, *words)
    for name, *words in (["dash"], ["bash"], ["ksh"], ["zsh"], ["busybox", "sh"])
    if (path := shutil.which(name))
]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: Path(shell[0]).name)
def test_first_start_installs_the_lock_then_runs_paceline(
    checkout: Checkout, shell: Sequence[str]
) -> None:
    done = checkout.run("doctor", shell=shell)
    assert (done.returncode, done.stdout) == (0, "paceline|doctor|\n"), done.stderr
    assert checkout.calls() == full_installation(checkout)
    assert "installing into .venv" in done.stderr


def test_arguments_and_exit_code_pass_through_unchanged(checkout: Checkout) -> None:
    checkout.extra["FAILING"] = "paceline"
    done = checkout.run("run", "my spec.toml", "", "*", "--out=a b", "$HOME")
    assert done.stdout == "paceline|run|my spec.toml||*|--out=a b|$HOME|\n"
    assert done.returncode == 7


def test_no_argument_reaches_paceline_as_none(checkout: Checkout) -> None:
    assert checkout.run().stdout == "paceline|\n"


def test_second_start_installs_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.forget_calls()
    done = checkout.run("doctor")
    assert (checkout.calls(), done.stderr, done.returncode) == ([], "", 0)


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_changed_requirements_are_installed_into_the_same_environment(
    checkout: Checkout, name: str
) -> None:
    checkout.run("setup")
    checkout.forget_calls()
    with (checkout.root / "python" / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert checkout.run("setup").returncode == 0
    assert checkout.calls() == full_installation(checkout)[1:]


def test_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.forget_calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("elsewhere"))
    done = checkout.run("setup")
    assert "moved" in done.stderr
    assert checkout.calls() == full_installation(checkout)


def test_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.forget_calls()
    python = checkout.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.11")
    assert checkout.run("doctor").returncode == 0
    assert checkout.calls() == full_installation(checkout)


def test_killed_installation_is_started_afresh(checkout: Checkout) -> None:
    checkout.switch("pip-waits")
    process = checkout.start("setup")
    wait_for((checkout.fakes / "pip-started").exists, LIMIT_S, "pip")
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    checkout.switch("pip-waits", on=False)
    checkout.forget_calls()
    (checkout.venv / "left over").touch()
    done = checkout.run("doctor")
    assert "cut short" in done.stderr
    assert (done.returncode, done.stdout) == (0, "paceline|doctor|\n")
    assert checkout.calls() == full_installation(checkout)
    assert not (checkout.venv / "left over").exists()


def test_failing_pip_ends_with_3_and_shows_its_reason(checkout: Checkout) -> None:
    checkout.switch("pip-fails")
    failed = checkout.run("doctor")
    assert (failed.returncode, failed.stdout) == (3, "")
    assert "no matching distribution" in failed.stderr
    assert str(checkout.venv / ".pacelinew.log") in failed.stderr
    checkout.switch("pip-fails", on=False)
    assert checkout.run("doctor").returncode == 0


def test_simultaneous_first_starts_install_once_and_all_run(checkout: Checkout) -> None:
    checkout.switch("pip-is-slow")
    processes = [checkout.start("doctor", str(number)) for number in range(4)]
    finished = [finish(process) for process in processes]
    assert [done.returncode for done in finished] == [0] * 4, finished
    assert [done.stdout for done in finished] == [f"paceline|doctor|{n}|\n" for n in range(4)]
    assert checkout.calls() == full_installation(checkout)


def test_waiting_for_another_installation_has_a_limit(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    checkout.extra["PACELINE_SETUP_WAIT_S"] = "0"
    with (checkout.venv / ".pacelinew.mutex").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        done = checkout.run("doctor")
    assert done.returncode == 3
    assert "another pacelinew" in done.stderr
    assert checkout.calls() == []


def test_without_python_311_ends_with_3_and_names_what_there_is(checkout: Checkout) -> None:
    (checkout.fakes / "bin" / "python3.11").unlink()
    write_program(checkout.fakes / "bin" / "python3", UNFIT_PYTHON)
    done = checkout.run("doctor")
    assert done.returncode == 3
    assert "python3.11: not found, python3: 3.10.4" in done.stderr
    assert "PACELINE_PYTHON" in done.stderr
    assert not checkout.venv.exists()


@pytest.mark.parametrize("is_on_path", [True, False])
def test_uv_brings_python_311_where_the_system_has_none(
    checkout: Checkout, is_on_path: bool
) -> None:
    (checkout.fakes / "bin" / "python3.11").rename(checkout.fakes / "python-of-uv")
    if is_on_path:
        write_program(checkout.fakes / "bin" / "uv", UV)
    else:
        write_program(checkout.fakes / "bin" / "python3", OTHER_PYTHON)
        write_program(checkout.fakes / "uv", UV)
    done = checkout.run("doctor")
    assert (done.returncode, done.stdout) == (0, "paceline|doctor|\n"), done.stderr
    assert "no Python 3.11 on PATH; uv brings one" in done.stderr
    assert checkout.calls() == ["uv python install -q 3.11", *full_installation(checkout)]


def test_shim_that_cannot_run_is_passed_over_for_python3(checkout: Checkout) -> None:
    (checkout.fakes / "bin" / "python3.11").rename(checkout.fakes / "bin" / "python3")
    write_program(checkout.fakes / "bin" / "python3.11", "#!/bin/sh\nexit 127\n")
    assert checkout.run("doctor").returncode == 0


def test_paceline_python_is_taken_before_path(checkout: Checkout) -> None:
    chosen = checkout.fakes / "chosen python"
    (checkout.fakes / "bin" / "python3.11").rename(chosen)
    checkout.extra["PACELINE_PYTHON"] = str(chosen)
    assert checkout.run("doctor").returncode == 0


@pytest.mark.parametrize(
    ("given", "found"), [("unfit", "3.10.4"), ("/no/such/python", "not found")]
)
def test_unfit_paceline_python_is_not_replaced_by_another(
    checkout: Checkout, given: str, found: str
) -> None:
    write_program(checkout.fakes / "bin" / "unfit", UNFIT_PYTHON)
    checkout.extra["PACELINE_PYTHON"] = given
    done = checkout.run("doctor")
    assert done.returncode == 3
    assert f"got '{given}' ({found})" in done.stderr
    assert checkout.calls() == []


def test_python_without_ensurepip_ends_with_3_and_says_what_to_install(checkout: Checkout) -> None:
    checkout.switch("no-ensurepip")
    done = checkout.run("doctor")
    assert done.returncode == 3
    assert "apt install python3.11-venv" in done.stderr


def test_working_environment_of_unknown_origin_is_kept_and_completed(checkout: Checkout) -> None:
    write_program(checkout.venv / "bin" / "python", ENV_PYTHON)
    (checkout.venv / "pyvenv.cfg").touch()
    (checkout.venv / "mine").touch()
    assert checkout.run("doctor").returncode == 0
    assert checkout.calls() == full_installation(checkout)[1:]
    assert (checkout.venv / "mine").exists()


def test_unfit_environment_of_unknown_origin_is_refused_and_left_alone(checkout: Checkout) -> None:
    write_program(checkout.venv / "bin" / "python", UNFIT_PYTHON)
    (checkout.venv / "pyvenv.cfg").touch()
    done = checkout.run("doctor")
    assert done.returncode == 3
    assert "pacelinew did not create it" in done.stderr
    assert (checkout.venv / "bin" / "python").exists()
    assert checkout.calls() == []


def test_works_through_symlinks_from_another_directory(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "inner").symlink_to(Path("..") / checkout.root.name / "pacelinew")
    outer = tmp_path / "pl"
    outer.symlink_to(tmp_path / "bin" / "inner")
    done = checkout.run("doctor", script=outer, cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, "paceline|doctor|\n"), done.stderr
    assert checkout.venv.is_dir()


def test_callers_pythonpath_does_not_reach_paceline(checkout: Checkout, tmp_path: Path) -> None:
    checkout.extra["PYTHONPATH"] = str(tmp_path)
    write_program(checkout.fakes / "programs" / "paceline", '#!/bin/sh\necho "[$PYTHONPATH]"\n')
    done = checkout.run("doctor")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


A_TEST = "tests/test_a.py::test_b[1]"
OWN_NUMBERS = ["-n", "4"], ["-n0"], ["--numprocesses=3"], ["--pdb"], ["-s"], ["--collect-only"]


@pytest.mark.parametrize(
    ("words", "three", "path"),
    [
        (["-q", "-m", "slow"], True, False),
        ([A_TEST], True, True),
        *((words, False, False) for words in OWN_NUMBERS),
    ],
)
def test_test_runs_the_whole_suite_three_at_a_time_unless_words_say_otherwise(
    checkout: Checkout, words: list[str], three: bool, path: bool
) -> None:
    config = checkout.root / "python" / "pyproject.toml"
    (checkout.root / "slow").mkdir()  # exists, but is -m's value and no path
    (checkout.root / "tests" / "test_a.py").touch()
    done = checkout.run("test", *words, cwd=checkout.root)
    expected = ["pytest", "-c", config, "--rootdir", checkout.root]
    expected += [THREE_AT_A_TIME] if three else []
    expected += [*words] if path else [*words, checkout.root / "tests"]
    assert done.stdout == "|".join(map(str, expected)) + "|\n"


def test_check_runs_every_step_and_fails_if_one_does(checkout: Checkout) -> None:
    checkout.extra["FAILING"] = "mypy"
    done = checkout.run("check")
    tools = [line.split("|")[0] for line in done.stdout.splitlines()]
    assert (tools[0], tools[-1]) == ("ruff", "mkdocs")
    assert set(tools) == {"ruff", "mypy", "lint-imports", "mkdocs"}
    assert done.stdout.splitlines()[-1] == "mkdocs|build|--strict|-f|../mkdocs.yml|"
    assert done.returncode == 1
    assert "failed: mypy src benchmarks tools, mypy ../tests" in done.stderr
    checkout.extra["FAILING"] = ""
    assert checkout.run("check").returncode == 0


def test_docs_serves_on_loopback_or_builds_and_refuses_dead_links(checkout: Checkout) -> None:
    config = checkout.root / "mkdocs.yml"
    served = checkout.run("docs", "--open").stdout
    assert served == f"mkdocs|serve|--dev-addr|127.0.0.1:8000|--open|-f|{config}|\n"
    assert checkout.run("docs", "--build").stdout == f"mkdocs|build|--strict|-f|{config}|\n"
    assert checkout.run("docs", "--build", "extra").returncode == 2


@pytest.mark.parametrize("verb", ["setup", "check"])
def test_argument_after_a_verb_that_takes_none_is_wrong_usage(
    checkout: Checkout, verb: str
) -> None:
    done = checkout.run(verb, "extra")
    assert done.returncode == 2
    assert "'extra'" in done.stderr


@pytest.mark.needs("fresh-install")
@pytest.mark.timeout(1800)
def test_fresh_copy_installs_and_runs_with_an_empty_environment(tmp_path: Path) -> None:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = run_command(words, LIMIT_S, cwd=ROOT)
    listed.check_returncode()
    copy = tmp_path / "fresh copy"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    env = {"HOME": os.environ["HOME"], "PATH": "/usr/bin:/bin"}
    command = [copy / "pacelinew", "plan", "quickstart", "--json"]
    done = run_command(command, 1700, env=env, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("{", "["))
