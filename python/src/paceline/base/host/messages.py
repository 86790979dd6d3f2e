"""Messages on standard error: of the command line, and of job scripts."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from paceline.base.errors import PacelineWarning

# All control characters but tab and newline: a terminal acts on them (ECMA-48: C0, DEL, C1). So it
# does on marks of the direction, by which a name can look like another one (Unicode TR 36).
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {
    number: None
    for number in (*range(32), *range(127, 160), *_DIRECTIONS)
    if chr(number) not in "\t\n"
}


def printable(text: str) -> str:
    """Return a text, which may come from a file of somebody else, without control characters."""
    return text.translate(_CONTROLS)


def say(text: str) -> None:
    """Print a message beside the output, at once."""
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning of Paceline's, in place of `warnings.showwarning`.

    Those of libraries do not help the user; python -W error still shows them.
    """
    del filename, lineno, file, line  # ours are about the machine, not about a line of code
    if issubclass(category, PacelineWarning):
        say(f"warning: {message}")


# --- advice on what Hadoop says where a valid Kerberos ticket or delegation token is missing -----

_ADVICE = {
    r"Client cannot authenticate via|No valid credentials provided|GSS initiate failed"
    r"|issued only with kerberos": "no valid Kerberos ticket: get one with `kinit`. Hadoop "
    "finds tickets in files only (KRB5CCNAME=FILE:PATH, see `klist`)",
    r"SIMPLE authentication is not enabled": "the cluster demands Kerberos: set HADOOP_CONF_DIR to "
    "the folder with its core-site.xml, and get a ticket with `kinit`",
    r"Can't get Kerberos realm|Cannot locate default realm": "Java finds no realm: it reads "
    "/etc/krb5.conf, or the file of -Djava.security.krb5.conf (spark.driver.extraJavaOptions and "
    "spark.executor.extraJavaOptions), but not KRB5_CONFIG",
    r"can't be found in cache|[Tt]oken.* is expired": "the delegation token is no longer valid: "
    "get a new one, or name a keytab (spark.kerberos.keytab and spark.kerberos.principal in "
    "[spark.conf])",
}


def kerberos_advice(message: str) -> str | None:
    """Return what to do about a message of Hadoop; None if it is not about Kerberos."""
    return next((advice for signs, advice in _ADVICE.items() if re.search(signs, message)), None)
