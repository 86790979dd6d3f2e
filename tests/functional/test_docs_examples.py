"""The commands of the documentation that start no trial, run as they stand."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.functional.cli_runs import SMALL, cli_in
from tests.support.documentation import EARLIER, PAGES, ROOT, commands_in_blocks
from tests.support.outputs import compare_outputs, shown_outputs, without_places
from tests.unit.analysis import fabricate

from paceline.base.errors import ExitCode

pytestmark = pytest.mark.functional

READING = (
    "compare", "explain", "export", "list", "plan", "predict", "profile", "render",
    "report",
)  # fmt: skip
STARTING_TRIALS = {"--measure"}
_A_RUN = re.compile(r"RUN_A|RUN_DIR|DIR|runs/[\w-]+")


def _examples() -> list[tuple[str, ...]]:
    """Return every command of a code block that reads, and starts no trial."""
    found = {
        tuple(words[1:])
        for page in {*PAGES} - EARLIER
        for words in commands_in_blocks(page)
        if words[1:2] and words[1] in READING and not STARTING_TRIALS.intersection(words)
    }
    return sorted(found)


@pytest.fixture(scope="module")
def examples(cache, tmp_path_factory):
    """Return the command line in a folder with two runs of several configurations."""
    folder = tmp_path_factory.mktemp("examples")
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, fabricate.MPI, fabricate.MPI_GLOO]
    for name, time_scale in (("a", 1.0), ("b", 1.01)):
        case = fabricate.Case(time_scale=time_scale)
        fabricate.make_run(folder / "runs" / name, ways, cases=[case], repeats=3, jitter=0.01)
    cli = cli_in(cache, folder)
    assert cli.main("compare", "runs/a", "--save-reference", "reference.json").returncode == 0
    return cli


@pytest.mark.parametrize("words", _examples(), ids=" ".join)
def test_an_example(examples, words):
    [trial, *_] = sorted((examples.cwd / "runs/a/trials").glob("*mpi*"))
    values = {
        "RUN_B": "runs/b", "SPEC": "spec.toml", "FORMAT": "csv",
        "A": "*.sequential.*", "B": "*.mpi.*", "ID": trial.name, "TRIAL_ID": trial.name,
    }  # fmt: skip
    given = ["runs/a" if _A_RUN.fullmatch(word) else values.get(word, word) for word in words]
    for name in given:
        if name.endswith(".toml"):
            (examples.cwd / name).write_text(SMALL, "utf-8")
    done = examples.main(*given)
    # both runs have one host, so there is no measured link
    needs_link = words[0] == "predict" and "--link" not in words
    needs_repeats = "--fail-slower" in words  # three of them cannot show 3 %
    expected = ExitCode.NOT_COMPARABLE if needs_link or needs_repeats else ExitCode.OK
    assert done.returncode == expected, done.stderr
    assert ("--allow-undecided" in done.stdout + done.stderr) == needs_repeats


@pytest.mark.parametrize("name", ["explain", "predict"])
def test_a_page_shows_what_a_command_prints_of_the_first_run(examples, name):
    page = ROOT / f"docs/how-to/{name}.md"
    found = {}
    for commands in shown_outputs(page):
        done = examples.main(*shlex.split(commands.replace("runs/example", "runs/a"))[1:])
        assert done.returncode == ExitCode.OK, done.stderr
        output = done.stdout.replace("runs/a", "runs/example")
        found[commands] = without_places(output, examples.cwd)
    assert found
    compare_outputs(page, found, exact=True)
