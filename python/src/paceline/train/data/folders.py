"""Class folders: which files of an image folder are images, and how they are named.

Each folder directly in the image folder is a class with the folder's name. Every regular file in
it, at any depth, is one of its images and must be a JPEG or PNG, whatever its suffix. Only texts
and tables (`readme.txt`, `labels.csv`) are left out and reported. Ignored are names that begin with
a dot (also macOS's `._NAME`), `Thumbs.db`, `desktop.ini` and the folder `__MACOSX`. Files directly
in the image folder belong to no class and are ignored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import DataError

_JUNK = frozenset({"thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db", "icon\r"})
_NO_IMAGES = (".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".html", ".yaml", ".yml", ".log")
_LAYOUT = "expected IMAGES/CLASS/IMAGE.jpg with a folder for each of two or more classes"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The path of an image relative to the image folder, and its class index."""

    path: str
    label: int


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Sorted class names, and all images sorted by (class, path).

    others: paths of texts and tables in the class folders, which are left out.
    """

    root: Path
    classes: tuple[str, ...]
    images: tuple[ImageFile, ...]
    others: tuple[str, ...] = ()


def scan(root: Path) -> ImageFolder:
    """List the images of `root`.

    Raises DataError naming every class folder without an image, and a folder that cannot be read.
    """
    if not root.is_dir():
        what = "it is not a folder" if root.exists() else "it does not exist"
        raise DataError(f"{root}: {_LAYOUT}, but {what}; `paceline data synth` makes an example")
    classes = _class_names(root)
    if len(classes) < 2:
        found = f"only the class {classes[0]!r}" if classes else "no class folder"
        raise DataError(f"{root}: {_LAYOUT}, found {found}")
    files = [(label, path) for label, name in enumerate(classes) for path in _files(root, name)]
    images = [ImageFile(path, label) for label, path in files if not _is_other(path)]
    used = {image.label for image in images}
    empty = [name for label, name in enumerate(classes) if label not in used]
    if empty:
        raise DataError(
            f"{root}: class folder{'s' if len(empty) > 1 else ''} without an image: "
            f"{', '.join(map(repr, empty))}; add images or remove the folder"
        )
    others = tuple(path for _, path in files if _is_other(path))
    return ImageFolder(root.resolve(), tuple(classes), tuple(images), others)


def _class_names(root: Path) -> list[str]:
    try:
        return sorted(e.name for e in root.iterdir() if e.is_dir() and not is_junk(e.name))
    except OSError as error:
        raise _unreadable(error) from None


def _is_other(path: str) -> bool:
    """Return whether a file is a text or a table by its suffix."""
    return path.casefold().endswith(_NO_IMAGES)


def _unreadable(error: OSError) -> DataError:
    return DataError(
        f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading it, or "
        "remove it"
    )


def is_junk(name: str) -> bool:
    """Return whether a file or folder of this name is ignored."""
    return name.startswith(".") or name.casefold() in _JUNK


def printable(path: str) -> str:
    """Return `path` as valid text: bytes that are not UTF-8 become \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _files(root: Path, name: str) -> list[str]:
    def stop(error: OSError) -> None:
        raise _unreadable(error)

    found = []
    for folder, folders, files in os.walk(root / name, onerror=stop):
        folders[:] = [f for f in folders if not is_junk(f)]
        for file in files:
            full = os.path.join(folder, file)  # noqa: PTH118  (names need not be valid text)
            if not is_junk(file) and os.path.isfile(full):  # noqa: PTH113
                found.append(os.path.relpath(full, root))
    return sorted(found)
