"""Print the runtime requirements of pyproject.toml for `pip install -r`, one per line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
sys.stdout.writelines(f"{requirement}\n" for requirement in project["dependencies"])
