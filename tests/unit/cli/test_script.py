"""`paceline run --script`: options become a spec, and mistakes a message."""

from __future__ import annotations

import pytest

from paceline.cli import main
from paceline.cli.main import _parser
from paceline.cli.script import script_experiment, split_arguments
from paceline.errors import UsageError
from paceline.spec.loading import check_spec


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", "utf-8")
    return "train.py"


def parsed(*words: str):
    own, arguments = split_arguments(["run", *words])
    found = _parser().parse_args(own)
    found.script_arguments = arguments
    return found


def pairs(*words: str) -> list[tuple[str, str | None, str]]:
    spec = script_experiment(parsed(*words))
    assert spec is not None
    check_spec(spec, "spec")
    return [(t["launcher"], t.get("transport"), t["local_strategy"]) for t in spec["trials"]]


def test_the_default_is_baseline_all_threads_and_torchrun(script):
    assert pairs("--script", script) == [
        ("local", None, "sequential"),
        ("local", None, "intraop"),
        ("torchrun", "gloo", "processes"),
    ]


def test_impossible_pairs_are_left_out(script):
    found = pairs("--script", script, "--launcher", "torchrun,mpi,spark", "--transport", "gloo,mpi",
                  "--local-strategy", "processes", "--ranks", "2")  # fmt: skip
    assert found == [
        ("local", None, "sequential"),
        ("torchrun", "gloo", "processes"),
        ("mpi", "gloo", "processes"),
        ("spark", "gloo", "processes"),
        ("mpi", "mpi", "processes"),
        ("spark", "mpi", "processes"),
    ]


def test_words_after_the_dashes_belong_to_the_script(script):
    spec = script_experiment(parsed("--script", script, "--max-steps", "5", "--", "--out", "x"))
    assert spec is not None
    assert spec["workloads"] == [
        {"script": "train.py", "arguments": ["--out", "x"], "max_steps": 5}
    ]
    assert split_arguments(["compare", "--", "-x"]) == (["compare", "--", "-x"], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--script", "none.py"], "--script none.py: expected a Python file, found none"),
        (["a.toml", "--script", "train.py"], "expected SPEC or --script, got both"),
        (["a.toml", "--ranks", "2", "--", "-x"], "--ranks, `-- -x`: only with --script"),
        ([], "expected SPEC (a TOML file"),
    ],
)
def test_wrong_use_is_one_message(script, words, message):
    with pytest.raises(UsageError) as caught:
        script_experiment(parsed(*words))
    assert message in str(caught.value)


def test_arguments_without_dashes_get_a_hint(script, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--script", script, "--epochs", "3"])
    assert caught.value.code == 2
    assert "arguments of the script follow `--`" in capsys.readouterr().err
