"""Print the requirements of pyproject.toml, those of all launchers and data sets included, by line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
groups = [project["dependencies"], *(extras[name] for name in ("mpi", "petastorm", "spark"))]
sys.stdout.writelines(f"{requirement}\n" for group in groups for requirement in group)
