"""Values that hold a secret are refused: a spec is copied to the run directory and to the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from paceline.spec.models import Experiment

# The default of spark.redaction.regex (Spark 3.5, core/.../internal/config/package.scala), keys of
# storage accounts and of services, and other words for a password.
_SECRET = re.compile(
    r"(?i)secret|password|token|access[._-]?key|account[._-]?key(?!provider)|api[._-]?key|passwd|passphrase"
    r"|credentials?$|(^|[._-])(pass|pwd)$"
)
_NAMES_A_FILE = re.compile(r"(?i)(file|dir|path|application_credentials)$")
_SWITCHES = ("", "true", "false")
# Options of pyarrow's file systems that hold a secret.
_URL_OPTIONS = ("access_key", "secret_key", "session_token")


def is_secret(name: str, value: str) -> bool:
    """Return whether a setting's name says that its value is a secret."""
    if _NAMES_A_FILE.search(name) or value.lower() in _SWITCHES:
        return False
    return _SECRET.search(name) is not None


def holds_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or an option that holds a secret."""
    parts = urlsplit(url)
    is_hdfs_user = parts.scheme in ("hdfs", "webhdfs") and parts.password is None
    has_user = "@" in parts.netloc and not is_hdfs_user
    return has_user or any(name in _URL_OPTIONS for name, _ in parse_qsl(parts.query))


def secret_faults(experiment: Experiment) -> Iterator[str]:
    """Yield why a spec must not hold a value; the value itself is not repeated."""
    for place, workload in enumerate(experiment.workloads, start=1):
        if workload.data is not None and holds_secret(workload.data):
            yield (
                f"workloads[{place}].data: a URL must not contain a secret, because it is written "
                "to the run directory; expected a URL without user, password and keys: set the "
                "variables of the storage instead (AWS_SECRET_ACCESS_KEY, "
                "GOOGLE_APPLICATION_CREDENTIALS)"
            )
    tables = dict(experiment.model_extra or {})
    for place, trial in enumerate(experiment.trials, start=1):
        own = {"arguments": trial.arguments, "environment": trial.environment}
        tables[f"trials[{place}]"] = {**own, **(trial.model_extra or {})}
    for where, name, value in _settings(tables):
        if is_secret(name, value):
            yield (
                f"{where}: a spec must not contain a secret, because it is written to the run "
                "directory and to every node; remove it, and set it where Paceline does not read "
                "it: spark-defaults.conf in the folder $SPARK_CONF_DIR, or an environment variable"
            )


def _settings(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield place, name and value of each text; NAME=VALUE in a list is one as well."""
    for name, value in table.items():
        place = f"{where}{name}"
        if isinstance(value, str):
            yield place, name, value
        elif isinstance(value, Mapping):
            yield from _settings(value, f"{place}.")
        elif isinstance(value, Iterable):
            for number, entry in enumerate(value):
                if isinstance(entry, str) and "=" in entry:
                    given, _, text = entry.partition("=")
                    yield f"{place}[{number}]", given, text
