"""Which values hold a secret. A spec is copied to the run directory and to the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

# Names of secrets: the default of spark.redaction.regex (Spark 3.5,
# core/.../internal/config/package.scala), keys of storage accounts and services, other passwords.
_SECRET = re.compile(
    r"(?i)secret|passwo?r?d|passphrase|token|credentials?$|authori[sz]ation|bearer|cookie|jaas"
    r"|connection[._-]?string|(^|[._-])(pass|pwd|auth|dsn|sas)([._-]|$)|(^|[._-])key$"
    r"|(access|account|api|client|encryption|master|private|shared|signing|storage)[._-]?key(?!provider)"
)
# Values that hold a secret under any name: the password of a URL, of a connection string, of JAAS
# or of a Java option, the signature of a shared access, a private key, and tokens of services.
_SECRET_VALUE = re.compile(
    r"(?i)://[^/\s@]*:[^/\s@]+@|(secret|passwo?r?d|pwd|token|key|[?&]sig)\s*=\s*[^\s;&]{4,}"
    r"|-----BEGIN|\b(bearer|basic)\s+\S{8,}"
    r"|\b(?-i:(AKIA|ASIA)[0-9A-Z]{16}|(gh[opsu]|hf|glpat|xox[abp]|sk)[_-]\w{16,}|eyJ[\w-]{10,}\.)"
)
_NAMES_A_FILE = re.compile(r"(?i)(file|dir|path|application_credentials)$")
_SWITCHES = ("", "true", "false")

# Anything may be a variable or a property of Hadoop, so these are recorded only if name or value is
# known to be harmless.
_OPEN = re.compile(
    r"^spark\.(hadoop|executorEnv|yarn\.appMasterEnv|kubernetes\.driverEnv)\.(?P<name>.+)"
)
_HARMLESS_NAME = re.compile(
    r"^(CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|KMP|LC|LD|MALLOC|MKL|NCCL|NUMEXPR|NVIDIA|OMP|OMPI|OPENBLAS|PMIX"
    r"|PACELINE|PRTE|PSM2?|PYTHON|PYTORCH|SLURM|TF|TORCH|TORCHINDUCTOR|TRITON|UCC|UCX|XLA)_"
    r"|^(HOME|LANG|PATH|PYTHON\w*|TMPDIR|TZ|USER)$"
    r"|(?i:[._](algorithm|bucket|class|codec|defaultfs|endpoint|group|hosts?|impl|mode|nameservices"
    r"|policy|principal|project|protocol|provider|proxy|region|type|user|version)s?)$"
)
# Numbers with units, paths, files, URLs without a query, names of Java's classes, and short words.
_HARMLESS_VALUE = re.compile(
    r"[\d.,:\s-]+\s?[a-zA-Z%]{0,3}|[.~]{0,2}/[^=]*|(file:)?[\w./+-]+\.(conf|jar|json|log|properties|xml)"
    r"|[a-z][a-z\d+]*://[^?@\s]*|[a-z]+(\.[A-Za-z_]\w*){2,}|.{0,11}"
)
# Options of pyarrow's file systems that hold a secret.
_URL_OPTIONS = ("access_key", "secret_key", "session_token")


def is_secret(name: str, value: str) -> bool:
    """Return whether the name of a setting or its value says that the value is a secret."""
    if value.lower() in _SWITCHES:
        return False
    if _SECRET_VALUE.search(value) is not None:
        return True
    return _SECRET.search(name) is not None and _NAMES_A_FILE.search(name) is None


def without_secrets(text: str) -> str:
    """Return the text, for a record, without the secrets in options of Java (`-DNAME=VALUE`)."""
    return _JAVA_OPTION.sub(_shown_option, text)


_JAVA_OPTION = re.compile(r"-D([\w.-]+)=(\S+)")


def _shown_option(option: re.Match[str]) -> str:
    name, value = option.groups()
    return f"-D{name}=(hidden)" if is_secret(name, value) else option[0]


def _is_harmless(name: str, value: str) -> bool:
    """Return whether the value of a variable or a property of Hadoop can be recorded."""
    return (
        _HARMLESS_NAME.search(name) is not None
        or _NAMES_A_FILE.search(name) is not None
        or _HARMLESS_VALUE.fullmatch(value) is not None
    )


def holds_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or an option that holds a secret."""
    parts = urlsplit(url)
    is_hdfs_user = parts.scheme == "hdfs" and parts.password is None
    has_user = "@" in parts.netloc and not is_hdfs_user
    return has_user or any(name in _URL_OPTIONS for name, _ in parse_qsl(parts.query))


def unrecorded_settings(tables: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the place of each setting that must not be recorded, and whether it is a secret.

    Otherwise its name may be any, and nothing says that its value is harmless.
    """
    for place, name, value, is_open in _settings(tables):
        if is_secret(name, value):
            yield place, True
        elif is_open and not _is_harmless(name, value):
            yield place, False


def _settings(
    table: Mapping[str, Any], where: str = "", *, is_open: bool = False
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield place, name and value of each text, and whether its name may be any.

    NAME=VALUE in a list is a setting as well, after options of mpirun such as `-x` that of a
    variable. So are the properties of Java (`-DNAME=VALUE`) in a text.
    """
    for name, value in table.items():
        place = f"{where}{name}"
        if isinstance(value, str):
            family = _OPEN.match(name)
            own = name if family is None else family["name"]
            yield place, own, value, is_open or family is not None
            for option in _JAVA_OPTION.finditer(value):
                yield place, option[1], option[2], True
            for given, text in _variables(value, ";") if name == _VARIABLE_LIST else ():
                yield place, given, text, True
        elif isinstance(value, Mapping):
            yield from _settings(value, f"{place}.", is_open=name == "environment")
        elif isinstance(value, Iterable):
            yield from _in_list(value, place)


def _in_list(entries: Iterable[Any], place: str) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the same of NAME=VALUE in a list."""
    before: Any = ""
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            between = ";" if before == _VARIABLE_LIST else ""
            for name, text in _variables(entry, between):
                yield f"{place}[{number}]", name, text, before in _OF_VARIABLES
        before = entry


# What precedes variables among the arguments of an mpirun, and the parameter that lists them.
_VARIABLE_LIST = "mca_base_env_list"
_OF_VARIABLES = ("-x", "--x", _VARIABLE_LIST)


def _variables(text: str, between: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of NAME=VALUE, or of several that have `between` between them."""
    for part in text.split(between) if between else [text]:
        name, equals, value = part.partition("=")
        if equals:
            yield name, value
