"""A user id without a name and without a home, as `docker run --user 4242` gives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_AS_4242 = """
import os, sys
from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import default_cache_dir
from paceline.base.host.own_runs import is_own_run, remember_run
from paceline.base.host.spark import find_java_for_spark
from pathlib import Path
os.setgroups([]); os.setgid(4242); os.setuid(4242)
for call in (default_cache_dir, find_java_for_spark):
    try:
        call()
    except EnvironmentLacks as error:
        print(error)
remember_run(Path("/"))
print(is_own_run(Path("/")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_user_without_a_name_or_home_is_told_what_to_set() -> None:
    environment = {"PATH": os.environ["PATH"]}  # no HOME
    ended = subprocess.run(
        [sys.executable, "-c", _AS_4242], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    cache, spark, is_own = ended.stdout.splitlines()
    assert "user id 4242 in /etc/passwd; set PACELINE_CACHE to a folder" in cache
    assert "Spark: expected a name for user id 4242" in spark
    assert is_own == "False"
