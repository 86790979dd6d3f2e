"""Count the words that people wrote in README files and documentation.

python python/tools/words.py [--limit N]

Counted are sentences, headings and tables of every page but CHANGELOG.md. Not counted are code
blocks, comments, targets of links, words without a letter or digit, and what a program writes:
result tables, metrics, help of the commands, features of back ends. With --limit it fails if there
are more words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    *("*.md", "docs/**/*.md", "examples/**/*.md", "docker/**/*.md", "monitoring/**/*.md"),
    *("python/*.md", "python/collectives/*.md", "python/src/**/*.md", "python/tools/**/*.md"),
)
LEFT_OUT = {ROOT / "CHANGELOG.md"}
# Written by python/benchmarks/result_tables.py, records/metrics/docs_page.py, tools/cli_page.py and
# tests/contract/test_features.py.
_GENERATED = re.compile(
    r"<!-- table: \w+ -->.*?<!-- end -->"
    r"|<!-- tables: .*?<!-- end of tables -->"
    r"|<!-- help of .*?<!-- end of the help -->"
    r"|<!-- features: .*?<!-- end of features -->",
    re.DOTALL,
)
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)")
_WORD = re.compile(r"[^\s|]*\w[^\s|]*")


def words(page: str) -> int:
    """Return how many words of a page people wrote."""
    for left_out in (_GENERATED, _CODE, _COMMENT):
        page = left_out.sub("", page)
    return len(_WORD.findall(_TARGET.sub("]", page)))


def words_of_pages() -> dict[str, int]:
    """Return the words of each page, by its path in the repository."""
    pages = {page for place in PLACES for page in ROOT.glob(place)} - LEFT_OUT
    found = {page: page.relative_to(ROOT) for page in sorted(pages)}
    return {
        str(path): words(page.read_text("utf-8"))
        for page, path in found.items()
        if not any(part.startswith(".") for part in path.parts)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, help="fail if there are more words")
    limit = parser.parse_args().limit
    counted = words_of_pages()
    folders: Counter[str] = Counter()
    for path, count in counted.items():
        folders[str(Path(path).parent)] += count
        print(f"{count:6,} {path}")
    print(*(f"{count:6,} {folder}/" for folder, count in folders.items()), sep="\n")
    total = folders.total()
    print(f"{total:6,} words by hand")
    if limit is not None and total > limit:
        sys.exit(f"expected at most {limit:,} words, found {total:,}: one home for each fact")


if __name__ == "__main__":
    main()
