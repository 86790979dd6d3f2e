"""Hook of mkdocs.yml: which pages the documentation's site has, and in which order.

The site has the paths of the repository, so relative links hold in it as they do on GitHub. It
contains docs/, the README as its first page, and every file to which a page links. Navigation
follows the folders of docs/, in the order of the links in docs/README.md.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import paceline

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
INDEX = "docs/README.md"
API = "docs/reference/api.md"  # from docstrings; not a file of the repository
PUBLIC_MODULES = ("paceline.distributed", "paceline.base.errors")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the site, and set the navigation."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    in_docs = [f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir]
    uris = _with_linked([HOME, *in_docs])
    config.nav = _navigation([uri for uri in uris if uri.endswith(".md")])
    ours = [File(uri, str(ROOT), config.site_dir, config.use_directory_urls) for uri in uris]
    return Files([*theme, *ours, File.generated(config, API, content=_api_page())])


def _with_linked(uris: list[str]) -> list[str]:
    """Append the files outside of docs/ to which pages link, directly or through such a file."""
    found = dict.fromkeys(uris)
    waiting = [uri for uri in found if uri.endswith(".md")]
    while waiting:
        for target in _links(waiting.pop()):
            if target not in found and (ROOT / target).is_file():
                found[target] = None
                waiting += [target] if target.endswith(".md") else []
    return list(found)


def _links(page: str) -> Iterator[str]:
    """Yield the targets of a page's relative links, as paths in the repository."""
    text = _FENCED.sub("", (ROOT / page).read_text("utf-8"))
    for target in _LINK.findall(text):
        if "://" not in target:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _navigation(pages: list[str]) -> list[str | dict[str, list[str]]]:
    """Group the pages by their folder in docs/; those outside of docs/ come last."""
    rank = {page: position for position, page in enumerate(_links(INDEX))}
    groups: dict[str, list[str]] = {}
    for page in sorted({*pages, API} - {HOME}, key=lambda page: (rank.get(page, len(rank)), page)):
        parts = page.split("/")
        heading = parts[1].capitalize() if parts[0] == "docs" and len(parts) > 2 else "Project"
        groups.setdefault(heading, []).append(page)
    project = groups.pop("Project", [])
    return [HOME, *({heading: pages} for heading, pages in groups.items()), {"Project": project}]


def _api_page() -> str:
    names = [f"paceline.{name}" for name in paceline.__all__ if not name.startswith("_")]
    objects = "\n\n".join(f"::: {name}" for name in (*sorted(names), *PUBLIC_MODULES))
    return f"# Python API from docstrings\n\n{objects}\n"
