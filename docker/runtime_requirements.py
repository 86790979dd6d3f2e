"""Prints what pyproject.toml asks for to run, one requirement a line: for `pip install -r`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
sys.stdout.writelines(f"{requirement}\n" for requirement in project["dependencies"])
