"""A script runs as under Python, and its end becomes one message with file and line."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest
from tests.support.trials import rank_context

from paceline.base.errors import RankFailed, UsageError
from paceline.plan.trials.trial import Script, StoreAddress
from paceline.train.rank.script.program import (
    EnoughSteps,
    failure_of,
    run_script,
    torchrun_variables,
)


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a script's process may change."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(Path.cwd())


def script(folder: Path, text: str, *arguments: str) -> Script:
    path = folder / "train.py"
    path.write_text(text, "utf-8")
    return Script(path=str(path), arguments=arguments, directory=str(folder), samples_per_step=None)


def test_it_runs_as_main_with_its_arguments_folder_and_directory(tmp_path, capsys):
    (tmp_path / "helper_of_script.py").write_text("VALUE = 7\n", "utf-8")
    text = (
        "import os, sys\n"
        "from helper_of_script import VALUE\n"
        "print(__name__, VALUE, sys.argv[1:], os.getcwd() == sys.path[0])\n"
    )
    run_script(script(tmp_path, text, "--lr", "0.1"))
    assert capsys.readouterr().out == "__main__ 7 ['--lr', '0.1'] True\n"


def test_a_module_runs_as_with_python_m(tmp_path, capsys):
    package = tmp_path / "package_of_script"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    (package / "config.py").write_text("VALUE = 7\n", "utf-8")
    text = "import sys\nfrom .config import VALUE\nprint(__name__, __package__, VALUE, sys.argv)\n"
    (package / "train.py").write_text(text, "utf-8")
    given = Script(
        path=str(package / "train.py"),
        module="package_of_script.train",
        arguments=("--lr", "0.1"),
        directory=str(tmp_path),
        samples_per_step=None,
    )
    run_script(given)
    assert capsys.readouterr().out == (
        f"__main__ package_of_script 7 {[given.path, '--lr', '0.1']}\n"
    )
    as_file = given.model_copy(update={"module": None})
    with pytest.raises(ImportError) as caught:
        run_script(as_file)
    assert "`paceline run -m PACKAGE.MODULE`" in str(failure_of(as_file, caught.value))


def test_an_exception_names_the_last_line_of_the_users_code(tmp_path, capsys):
    text = "def f():\n    return int('x')\n\nf()\n"
    given = script(tmp_path, text)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        run_script(given)
    error = failure_of(given, caught.value)
    assert isinstance(error, RankFailed)
    assert str(error) == (
        f"{given.path}, line 2: ValueError: invalid literal for int() with base 10: 'x' "
        "(stack trace in the rank's log)"
    )
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert "runpy" not in printed
    assert "int('x')" in printed


def test_the_stack_is_written_where_the_script_replaces_print_and_stderr(
    tmp_path, monkeypatch, capsys
):
    text = (
        "import builtins, io, sys\n"
        "sys.stderr = io.StringIO()\n"
        "builtins.print = lambda *a, **n: None\n"
        "int('x')\n"
    )
    monkeypatch.setattr(builtins, "print", print)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(ValueError, match="invalid literal"):
        run_script(script(tmp_path, text))
    assert "int('x')" in capsys.readouterr().err


def test_what_a_script_has_put_in_the_place_of_print_ends_with_it(tmp_path, capsys):
    text = "import builtins\nbuiltins.print = lambda *words: None\n"
    assert run_script(script(tmp_path, text))
    print("said", flush=True)
    assert capsys.readouterr().out == "said\n"


def test_an_error_of_ours_has_no_stack(tmp_path, capsys):
    text = "from paceline.base.errors import UsageError\nraise UsageError('no process group')\n"
    with pytest.raises(UsageError):
        run_script(script(tmp_path, text))
    assert capsys.readouterr().err == ""


def test_a_syntax_error_names_its_line(tmp_path):
    given = script(tmp_path, "x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as caught:
        run_script(given)
    assert str(failure_of(given, caught.value)).startswith(f"{given.path}, line 2: SyntaxError: ")


def test_an_error_of_ours_stays_as_it_is(tmp_path):
    error = UsageError("no process group")
    assert failure_of(script(tmp_path, ""), error) is error


@pytest.mark.parametrize("end", ["", "0", "None"])
def test_a_good_exit_status_is_a_good_end(tmp_path, end):
    run_script(script(tmp_path, f"import sys; sys.exit({end})"))


@pytest.mark.parametrize(
    ("end", "reason"),
    [("3", "it ended with exit status 3"), ("'no data'", "it ended with: no data")],
)
def test_another_exit_status_is_a_failure(tmp_path, end, reason):
    given = script(tmp_path, f"import sys\nsys.exit({end})")
    with pytest.raises(RankFailed) as caught:
        run_script(given)
    assert str(caught.value) == f"{given.path}, line 2: {reason}"


def test_enough_steps_end_the_script_although_it_catches_exceptions(tmp_path, monkeypatch):
    text = (
        "from paceline.train.rank.script.program import EnoughSteps\n"
        "try:\n    raise EnoughSteps\nexcept Exception:\n    raise SystemExit(9)\n"
    )
    run_script(script(tmp_path, text))
    assert issubclass(EnoughSteps, BaseException)


class _Trial:
    id = "train.mpi.gloo"

    class placement:  # noqa: N801
        nodes = 2


def test_a_rank_of_several_uses_the_store_of_rank_0():
    address = StoreAddress(host="10.0.0.1", port=4711, secret="")
    found = torchrun_variables(
        _Trial(), rank_context(3, 4, local_rank=1, ranks_on_node=2, node_index=1, store=address)
    )
    assert found == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "train.mpi.gloo", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def test_a_single_rank_has_no_store():
    found = torchrun_variables(_Trial(), rank_context())
    assert (found["MASTER_PORT"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("0", "False")
