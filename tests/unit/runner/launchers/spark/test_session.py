"""A trial in a SparkContext that exists, and in a Spark that denies what is not public."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from paceline.base.errors import EnvironmentLacks
from paceline.runner.launchers.spark import session
from paceline.runner.launchers.spark.session import (
    count_slots,
    executors_of,
    explain_loss,
    open_session,
)


class FakeContext:
    """A context of a notebook: its settings, and what was done to it."""

    applicationId = "app-7"  # noqa: N815  (Spark's name)
    master = "spark://head:7077"

    def __init__(self, **settings: str) -> None:
        conf = {"spark.master": self.master, **{f"spark.{k}": v for k, v in settings.items()}}
        self.environment = {"PYTHONHASHSEED": "0"}
        self.tags: list[str] = []
        self.cancelled: list[str] = []
        self.getConf = lambda: SimpleNamespace(getAll=lambda: list(conf.items()))
        self.addJobTag = self.tags.append
        self.removeJobTag = self.tags.remove
        self.cancelJobsWithTag = self.cancelled.append


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes a context the active one."""

    def make(context):
        monkeypatch.setattr(session.SparkContext, "_active_spark_context", context)
        return context

    return make


def test_existing_context_is_used_and_left_as_it_was(use, make_job, capsys):
    context = use(FakeContext(**{"task.cpus": "1", "task.maxFailures": "4"}))
    with open_session(make_job(launcher="spark").trial) as opened:
        assert opened.context is context
        [tag] = context.tags
        assert context.environment["PACELINE_SPARK_JOB"] == tag  # fresh Python workers
        assert context.environment["OMP_NUM_THREADS"] == "1"
    assert (context.tags, context.cancelled) == ([], [])
    assert context.environment == {"PYTHONHASHSEED": "0"}
    [said] = capsys.readouterr().err.splitlines()
    assert "existing SparkContext (app-7)" in said
    assert "spark.task.maxFailures=1, spark.barrier.sync.timeout=" in said
    assert "spark.task.cpus" not in said
    assert "spark.app.name" not in said


def test_jobs_of_a_failed_trial_end_and_those_of_the_owner_go_on(use, make_job):
    context = use(FakeContext())

    def interrupted() -> None:
        with open_session(make_job(launcher="spark").trial):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    [cancelled] = context.cancelled
    assert cancelled.startswith("paceline-")
    assert context.tags == []
    assert context.environment == {"PYTHONHASHSEED": "0"}


def test_context_with_dynamic_allocation_is_refused(use, make_job):
    use(FakeContext(**{"dynamicAllocation.enabled": "true"}))
    with (
        pytest.raises(EnvironmentLacks, match="dynamicAllocation"),
        open_session(make_job(launcher="spark").trial),
    ):
        pass


@pytest.mark.parametrize("variable", ["SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE"])
def test_spark_connect_is_refused_before_a_jvm_starts(use, make_job, monkeypatch, variable):
    use(None)
    monkeypatch.setattr(session.SparkContext, "_ensure_initialized", pytest.fail)
    monkeypatch.setenv(variable, "sc://head")
    with (
        pytest.raises(EnvironmentLacks, match=r"Spark Connect .* has no SparkContext"),
        open_session(make_job(launcher="spark").trial),
    ):
        pass


class Denying:
    """A JVM in which only listed methods may be called."""

    def __getattr__(self, name: str) -> object:
        raise Py4JError(f"Method {name} is not whitelisted")


def test_what_spark_denies_is_done_without():
    assert count_slots(SimpleNamespace(_jsc=SimpleNamespace(sc=Denying))) is None
    assert count_slots(SimpleNamespace()) is None
    assert executors_of(SimpleNamespace(_jsc=SimpleNamespace(sc=Denying))) is None


def test_names_of_executors():
    names = SimpleNamespace(mkString=lambda blank: blank.join(("1", "2")))
    spark = SimpleNamespace(getExecutorIds=lambda: names)
    alive = executors_of(SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: spark)))
    assert alive is not None
    assert alive() == {"1", "2"}


def context_with_executors(master: str, *reasons: str | None) -> Any:
    """Return a context whose executors were removed for these reasons; None: it was not."""
    executors = [
        SimpleNamespace(
            removeReason=lambda reason=reason: SimpleNamespace(
                isDefined=lambda: reason is not None, get=lambda: reason
            )
        )
        for reason in reasons
    ]
    listed = SimpleNamespace(size=lambda: len(executors), apply=executors.__getitem__)
    store = SimpleNamespace(executorList=lambda _active_only: listed)
    spark = SimpleNamespace(statusStore=lambda: store)
    jsc = SimpleNamespace(sc=lambda: spark)
    return SimpleNamespace(_jsc=jsc, master=master, applicationId="application_1_0001")


UNKNOWN = context_with_executors("yarn", None)
KILLED = context_with_executors("yarn", None, "Killed")
DENIED = SimpleNamespace(_jsc=SimpleNamespace(sc=Denying), master="yarn")


@pytest.mark.parametrize(
    ("context", "reason", "found"),
    [
        (KILLED, None, "Spark lost the executor: Killed; look at the nodes"),
        (KILLED, "Gone", "Spark lost the executor: Gone; look at the nodes"),
        (UNKNOWN, None, "^look at the nodes .* -applicationId application_1_0001"),
        (context_with_executors("spark://head:7077", "Killed"), None, "the executor: Killed$"),
        (context_with_executors("spark://head:7077", None), None, "^$"),
        (context_with_executors("local[2]", "unused"), None, "^$"),
        (DENIED, None, "^$"),
    ],
)
def test_loss_of_an_executor_is_explained(context, reason, found, monkeypatch):
    monkeypatch.setattr(session, "_LOSS_S", 0.01)
    assert re.search(found, explain_loss(context, reason))


def test_why_spark_cannot_start_is_one_line(monkeypatch):
    text = "An error occurred while calling None.a.b.\n: org.YarnException: no such queue\n\tat x"

    def refuse(conf: object) -> None:
        raise Py4JError(text)

    monkeypatch.setattr(session, "SparkContext", refuse)
    found = r"could not start the application: org.YarnException: no such queue$"
    with pytest.raises(EnvironmentLacks, match=found):
        session._new_context({"spark.master": "spark://head:7077"}, 1.0)


def test_what_to_do_without_a_ticket_comes_before_the_message_of_hadoop(monkeypatch):
    text = "An error occurred while calling None.a.b.\n: java.io.IOException: Client cannot "

    def refuse(conf: object) -> None:
        raise Py4JError(f"{text}authenticate via:[TOKEN, KERBEROS]\n\tat x")

    monkeypatch.setattr(session, "SparkContext", refuse)
    found = (
        r"application: no valid Kerberos ticket: .*`kinit`.* \(java.io.IOException: Client .*\)$"
    )
    with pytest.raises(EnvironmentLacks, match=found):
        session._new_context({"spark.master": "spark://head:7077"}, 1.0)


class Conf(dict[str, str]):
    """Settings with the methods of a SparkConf."""

    set = dict.__setitem__
    setIfMissing = dict.setdefault  # noqa: N815  (Spark's name)


def test_application_is_not_started_again_without_its_driver():
    conf = Conf({"spark.master": "yarn"})
    with session._start_limit(conf, 60.0):
        assert conf["spark.yarn.maxAppAttempts"] == "1"
    of_the_site = Conf({"spark.master": "yarn", "spark.yarn.maxAppAttempts": "3"})
    with session._start_limit(of_the_site, 60.0):
        assert of_the_site["spark.yarn.maxAppAttempts"] == "3"
