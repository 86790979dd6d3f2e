"""Extensions are found through entry points, and nothing else names them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import Field
from tests.support.specs import spec_text

from paceline.base.errors import PacelineWarning, UsageError
from paceline.plan.spec import extensions
from paceline.plan.spec.descriptors import KeyModel, OptionModel, StrategyDescriptor
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, ExtensionGroup
from paceline.plan.spec.loading import parse_spec
from paceline.plan.spec.placement import NodeCounts
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial

PACKAGE = Path(extensions.__file__).parents[2]
LIMIT_S = 60


class CarefulKeys(KeyModel):
    caution: int | None = Field(default=None, ge=1)


class CarefulOptions(OptionModel):
    caution: int = 3

    def name_parts(self, _placement):
        yield f"c{self.caution}"


class Careful(StrategyDescriptor):
    """A throw-away strategy of another package."""

    name = "careful"
    summary = "for this test"
    implementation = "nowhere:Careful"
    Keys = CarefulKeys
    Options = CarefulOptions

    def counts(self, request, cores):
        return NodeCounts(ranks=1, threads_per_rank=cores)

    def options(self, request, counts, replica_batch, transport):
        return CarefulOptions(caution=request.keys(CarefulKeys).caution or 3)


class Unfit:
    name = "unfit"


def point(name, value=f"{__name__}:Careful"):
    return EntryPoint(name, value, "paceline.strategies")


def group_of(*points):
    """The group with these entry points, each of a package of its own."""
    group = ExtensionGroup("paceline.strategies", StrategyDescriptor, "local_strategy")
    return group, [(each, f"package-{number}") for number, each in enumerate(points)]


@pytest.fixture
def installed(monkeypatch):
    """Make entry points look installed; returns the group that reads them."""

    def install(*points):
        group, found = group_of(*points)
        monkeypatch.setattr(extensions, "installed_points", lambda _: found)
        return group

    return install


@pytest.fixture
def careful(monkeypatch):
    """The strategy beside our own."""
    ours = dict(STRATEGIES._by_name)
    monkeypatch.setitem(STRATEGIES.__dict__, "_by_name", {**ours, "careful": Careful()})


SPEC = spec_text('launcher = "local"; local_strategy = "careful"', repeats=1)


@pytest.mark.usefixtures("careful")
def test_strategy_of_another_package_is_validated_planned_and_read_back():
    experiment = parse_spec(SPEC + "caution = 5\n", "mine.toml")
    (trial,) = [t for t in plan_trials(experiment, {"tiny": "data"}, 4) if not t.is_baseline]
    assert trial.configuration == "tiny.local.none.careful.n1r1t4.fp32.c5"
    assert trial.strategy_options == CarefulOptions(caution=5)
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


@pytest.mark.usefixtures("careful")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("caution = 0", "trials[2]: caution: input should be greater than or equal to 1, got 0"),
        ("stages = 2", 'stages: has no meaning for local_strategy "careful"; remove it, or use'),
        ("cautoin = 1", 'cautoin: no such key. Did you mean "caution"?'),
    ],
)
def test_keys_of_another_package_have_the_usual_messages(line, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        parse_spec(SPEC + line + "\n", "mine.toml")


def test_unknown_name_is_answered_with_the_known_ones_and_a_guess(installed):
    group = installed(point("careful"))
    with pytest.raises(UsageError, match=r'one of "careful", got "carefull"\. Did you mean'):
        group.get("carefull")


def test_broken_extension_is_a_warning_and_the_others_work(installed):
    group = installed(
        point("careful"),
        point("gone", "no_such_module:Gone"),
        point("unfit", f"{__name__}:Unfit"),
        point("renamed"),
    )
    with pytest.warns(PacelineWarning) as warned:
        assert group.names() == ("careful",)
    texts = [str(each.message) for each in warned]
    assert "ModuleNotFoundError: No module named 'no_such_module'" in texts[0]
    assert "expected a subclass of StrategyDescriptor" in texts[1]
    assert 'its name is "careful", expected "renamed"' in texts[2]


def test_two_packages_with_one_name_are_an_error_that_names_both(installed):
    group = installed(point("careful"), point("careful", f"{__name__}:Unfit"))
    with pytest.raises(UsageError, match="packages package-0 and package-1 both provide it"):
        group.names()


def test_missing_metadata_says_how_to_get_it(monkeypatch):
    group, _ = group_of()
    monkeypatch.setattr(extensions, "installed_points", lambda _: [])
    with pytest.raises(UsageError, match="install Paceline again"):
        group.names()


def test_entry_points_are_read_from_an_archive_on_the_path(tmp_path):
    import zipfile

    archive = tmp_path / "extra.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("extra-1.0.dist-info/METADATA", "Name: extra\nVersion: 1.0\n")
        lines = "[paceline.strategies]\ncareful = somewhere:Careful\n"
        file.writestr("extra-1.0.dist-info/entry_points.txt", lines)
    look = (
        "from paceline.plan.spec.extensions import installed_points as found\n"
        "print([(p.value, n) for p, n in found('paceline.strategies') if n == 'extra'])"
    )
    done = run_python(look, PYTHONPATH=str(archive))
    assert done == "[('somewhere:Careful', 'extra')]"


def run_python(code, **environment):
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LISTS = SimpleNamespace(
    strategies=("threads", "processes", "pipeline", "hybrid", "intraop"),
    transports=("gloo", "nccl", "spark-rounds"),
    launchers=("torchrun", "spark"),
)


@pytest.mark.parametrize("kind", vars(LISTS))
def test_no_file_lists_extensions_by_name(kind):
    names = getattr(LISTS, kind)
    listing = []
    for path in sorted(PACKAGE.rglob("*/*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.split("/")[1] in ("strategies", "transports", "launchers"):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if sum(f'"{name}"' in line for name in names) > 1:
                listing.append(f"{relative}:{number}")
    assert listing == []


def test_only_mpirun_waits_without_a_limit_for_ranks_that_do_not_start():
    assert [each.name for each in LAUNCHERS.all() if each.needs_start_limit] == ["mpi"]
