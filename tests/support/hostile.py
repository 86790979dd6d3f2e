"""Hostile run directories and specs: one seeded generator for the suite and for its whole form.

A case belongs to a kind of damage. The same kind and seed always give the same case. What a case
does depends on the directory only through its sorted files.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl

Edit = Callable[[Any], Any]  # of one value of a document
Words = tuple[str, ...]  # of a command

LIMIT_S = 30.0  # of a command
LONGEST_MESSAGE = 20_000

_DEEP = 200_000
_DIGITS = 5001  # Python converts at most 4,300
_SPARSE_BYTES = 1 << 42
_TERMINAL = (  # on which a terminal, a page or a spreadsheet would act
    "\x1b]0;owned\x07\x1b[2J", "\x9b31m", "a\rb\x00c", "line\nparts\n\n", "\u202efdp.exe", "\ud800",
    "<script>alert(1)</script>", "[bold]x[/] :boom:", "=cmd|' /C calc'!A0", "%s {0} {x}",
    "../../outside", "-rf", "x" * 70_000, "",
)  # fmt: skip
_OTHER_TYPES: tuple[Any, ...] = (
    None, True, "text", "-1", 3.5, [], {}, [1, [2]], {"a": {"b": 1}}, 0,
)  # fmt: skip
_HUGE: tuple[Any, ...] = (
    1e308, -1e308, 2**31, 2**63, -(2**63), 2**64, 10**400, -(10**400), 5e-324,
)  # fmt: skip
_NO_NUMBERS = (math.nan, math.inf, -math.inf)
_TOKENS = (
    b"null", b"-1", b"1e999", b"NaN", b"99999999999999999999", b"\xff\xfe", b"\x00", b'"', b"{",
    b"]", b"[[[[", b"../../etc/passwd", b"true", b"", b"__import__('os')",
)  # fmt: skip
_ODD_NAMES = (
    b"\x1b[31mred", b"line\nfeed", b"\xff\xfe\x80", b"-rf", b"a b;$(id)", b"..x", b"x" * 255,
    b"[bold]", b"%00", "\u202e\u4e2d".encode(), b"=1+1",
)  # fmt: skip


def damaged(content: bytes, drawn: random.Random) -> bytes:
    """Return other content: cut off, with other bytes, with another token, or with more bytes."""
    place, kind = drawn.randrange(len(content)), drawn.randrange(4)
    if kind == 0:
        return content[:place]
    if kind == 1:
        flipped = bytes([content[place] ^ (1 << drawn.randrange(8))])
        return content[:place] + flipped + content[place + 1 :]
    if kind == 2:
        end = min(len(content), place + drawn.randrange(1, 40))
        return content[:place] + drawn.choice(_TOKENS) + content[end:]
    return content[:place] + drawn.randbytes(drawn.randrange(1, 30)) + content[place:]


# --- values of documents -------------------------------------------------------------------------


def _leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value that is no container."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        if isinstance(value, dict | list) and value:
            yield from _leaves(value)
        else:
            yield document, key


def edited(document: Any, drawn: random.Random, edit: Edit, *, numbers_only: bool) -> Any:
    """Change one value of a document, or at times all; return it."""
    found = [
        (container, key)
        for container, key in _leaves(document)
        if not numbers_only or _is_number(container[key])
    ]
    if found:
        for container, key in found if drawn.random() < 0.25 else [drawn.choice(found)]:
            container[key] = edit(container[key])
    return document


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _edit_file(path: Path, drawn: random.Random, edit: Edit, *, numbers_only: bool = False) -> None:
    """Change a value of a file in its own format."""
    if path.suffix == ".parquet":
        _edit_parquet(path, drawn, edit, numbers_only=numbers_only)
        return
    lines = path.suffix == ".jsonl"
    documents = [
        json.loads(t) for t in (path.read_text().splitlines() if lines else [path.read_text()])
    ]
    if documents:
        place = drawn.randrange(len(documents))
        documents[place] = edited(documents[place], drawn, edit, numbers_only=numbers_only)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in documents))


def _edit_parquet(path: Path, drawn: random.Random, edit: Edit, *, numbers_only: bool) -> None:
    """Give a column of a Parquet file other values, perhaps of another type."""
    try:
        frame, metadata = pl.read_parquet(path), pl.read_parquet_metadata(path)
    except pl.exceptions.PolarsError:  # a data set's types
        path.write_bytes(damaged(path.read_bytes(), drawn))
        return
    names = [n for n, kind in frame.schema.items() if kind.is_numeric() or not numbers_only]
    if not names or frame.is_empty():
        return
    name = drawn.choice(names)
    old = frame[name].to_list()
    values = [edit(value) for value in old] if drawn.random() < 0.5 else [edit(old[0]), *old[1:]]
    words = pl.Series(name, [ascii(value)[:100] for value in values])
    try:
        column = pl.Series(name, values, strict=False)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        column = words
    if column.dtype == pl.Object:  # which Parquet does not have
        column = words
    kept = {key: value for key, value in metadata.items() if key.startswith("paceline")}
    frame.with_columns(column).write_parquet(path, metadata=kept)


def _is_document(path: Path) -> bool:
    return path.suffix in (".json", ".jsonl", ".parquet")


# --- damage of one file --------------------------------------------------------------------------


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _nested(path: Path, drawn: random.Random) -> None:
    begin, end = drawn.choice((("[", "]"), ('{"a":', "}")))
    deep = begin * _DEEP + "1" + end * _DEEP
    if path.suffix == ".json":
        try:
            known = json.loads(path.read_text())
        except ValueError:
            known = {}
        key = drawn.choice(sorted(known) or ["a"])
        path.write_text(json.dumps({**known, key: "DEEP"}).replace('"DEEP"', deep))
    else:
        path.write_text(f'{{"unix_s": 1.0, "a": {deep}}}\n')


def _long_number(path: Path, drawn: random.Random) -> None:
    mark = 123454321
    _edit_file(path, drawn, lambda _: mark)
    if path.suffix != ".parquet":
        path.write_text(path.read_text().replace(str(mark), "9" * _DIGITS))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, suppress(OSError):  # a path may be too long
        made.bind(str(path))
        return
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_SPARSE_BYTES)


def _duplicated_rows(path: Path, drawn: random.Random) -> None:
    del drawn
    if path.suffix == ".parquet":
        metadata = pl.read_parquet_metadata(path)
        kept = {key: value for key, value in metadata.items() if key.startswith("paceline")}
        frame = pl.read_parquet(path)
        pl.concat([frame, frame]).write_parquet(path, metadata=kept)
    else:
        path.write_bytes(path.read_bytes() * 2)


FileDamage = Callable[[Path, random.Random], object]
# Damage of a file with a value that can be changed; the others are of any file.
_OF_DOCUMENTS: dict[str, FileDamage] = {
    "another type": lambda p, d: _edit_file(p, d, lambda _: d.choice(_OTHER_TYPES)),
    "huge number": lambda p, d: _edit_file(p, d, lambda _: d.choice(_HUGE), numbers_only=True),
    "number of 5,001 digits": _long_number,
    "no number": lambda p, d: _edit_file(p, d, lambda _: d.choice(_NO_NUMBERS), numbers_only=True),
    "negative count": lambda p, d: _edit_file(
        p, d, lambda old: -abs(old or 0) - 1, numbers_only=True
    ),
    "text that a terminal or page acts on": lambda p, d: _edit_file(
        p, d, lambda _: d.choice(_TERMINAL)
    ),
    "deep nesting": _nested,
    "rows twice": _duplicated_rows,
}
_OF_FILES: dict[str, FileDamage] = {
    "random bytes": lambda p, d: p.write_bytes(damaged(p.read_bytes() or b"{}", d)),
    "cut off": lambda p, d: os.truncate(p, d.randrange(max(p.stat().st_size, 1))),
    "empty": lambda p, _: os.truncate(p, 0),
    "missing": lambda p, _: p.unlink(),
    "pipe": lambda p, _: _replace(p, os.mkfifo),
    "socket": lambda p, _: _replace(p, _socket),
    "link to /dev/zero": lambda p, _: _replace(p, lambda new: new.symlink_to("/dev/zero")),
    "link to nothing": lambda p, _: _replace(p, lambda new: new.symlink_to("nothing")),
    "link to itself": lambda p, _: _replace(p, lambda new: new.symlink_to(new.name)),
    "link out": lambda p, _: _replace(p, lambda new: new.symlink_to(_outside(p))),
    "folder in place of a file": lambda p, _: _replace(
        p, lambda new: (new / "x").mkdir(parents=True)
    ),
    "not readable": lambda p, _: p.chmod(0),
    "4 TiB without content": lambda p, _: _sparse(p),
}


def _outside(path: Path) -> Path:
    """Return the file beside the run directory that no command may change."""
    run = next(each for each in path.parents if each.name == RUN)
    return run.parent / OUTSIDE / "precious.txt"


# --- damage of a run directory -------------------------------------------------------------------

RUN, OUTSIDE = "run", "outside"  # names of the folders of a case
RunDamage = Callable[[Path, random.Random], object]


def _files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def _drawn_file(run: Path, drawn: random.Random, *, documents: bool) -> Path:
    """Draw a name of files and then one of them, so that rare files are drawn as often."""
    found = [path for path in _files(run) if not documents or _is_document(path)]
    name = drawn.choice(sorted({path.name for path in found}))
    return drawn.choice([path for path in found if path.name == name])


def _of_one_file(damage: FileDamage, *, documents: bool) -> RunDamage:
    return lambda run, drawn: damage(_drawn_file(run, drawn, documents=documents), drawn)


def _folder(run: Path, drawn: random.Random, *names: str) -> Path:
    found = [path for name in names for path in sorted(run.glob(name)) if path.is_dir()]
    return drawn.choice(found)


def _odd_name(run: Path, drawn: random.Random) -> None:
    """Add a copy of a trial, a rank or a host under an odd name."""
    folder = _folder(run, drawn, "trials/*", "trials/*/ranks/*", "trials/*/hosts/*")
    shutil.copytree(folder, folder.parent / os.fsdecode(drawn.choice(_ODD_NAMES)))


def _rank_twice(run: Path, drawn: random.Random) -> None:
    """Let two folders be of one rank, or one of a rank that the trial does not have."""
    rank = _folder(run, drawn, "trials/*/ranks/0")
    name = drawn.choice(("1", "7", "00", "-1", "\u0663", "9" * 30, "0.5", "4294967296"))
    shutil.copytree(rank, rank.parent / name, dirs_exist_ok=True)


def _other_version(run: Path, drawn: random.Random) -> None:
    key, name = drawn.choice((("schema", "manifest.json"), ("schema_version", "trial.json")))
    for path in run.rglob(name):
        document = json.loads(path.read_text())
        document[key] = drawn.choice((999, 0, -1, "2", 2.5, None, [2], True, 10**30))
        path.write_text(json.dumps(document))


def _folder_link(run: Path, drawn: random.Random) -> None:
    """Replace a folder by a link: to one above it, to one outside, to nothing."""
    folder = _folder(run, drawn, "trials", "trials/*", "trials/*/ranks", "trials/*/hosts/*")
    target = drawn.choice(
        (folder.parent, run.parent / OUTSIDE, Path("/"), Path("/proc/self"), folder)
    )
    shutil.rmtree(folder)
    folder.symlink_to(target, target_is_directory=True)


# Where commands write into a run directory.
_WRITTEN = (
    "report.html", ".lock", "comparison.json", "export", "monitor", "targets",
    "export/csv", "export/csv/rows.csv", "export/csv/.rows.csv", "export/parquet/.steps.parquet",
    "export/openmetrics/run.om", "export/perfetto",
)  # fmt: skip


def _link_where_commands_write(run: Path, drawn: random.Random) -> None:
    """Put a link to a file or folder outside where a command writes."""
    for name in drawn.sample(_WRITTEN, 4):
        path, outside = run / name, run.parent / OUTSIDE
        if any(parent.is_symlink() for parent in path.parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        is_file = "." in path.name
        path.symlink_to(outside / "precious.txt" if is_file else outside)


def _path_in_a_name(run: Path, drawn: random.Random) -> None:
    """Let a trial have an id, or another name, that leads out of the run directory."""
    key = drawn.choice(("id", "id", "experiment", "launcher", "transport", "interface"))
    outside = run.parent / OUTSIDE / "precious"
    value = drawn.choice((f"../../../../{OUTSIDE}/precious", str(outside), "..", "a/b", "\x00", ""))
    for path in run.glob("trials/*/trial.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


RUN_DAMAGE: dict[str, RunDamage] = {
    **{kind: _of_one_file(each, documents=True) for kind, each in _OF_DOCUMENTS.items()},
    **{kind: _of_one_file(each, documents=False) for kind, each in _OF_FILES.items()},
    "odd name of a folder": _odd_name,
    "rank twice, or one too many": _rank_twice,
    "another version": _other_version,
    "link in place of a folder": _folder_link,
    "link where commands write": _link_where_commands_write,
    "name that is a path": _path_in_a_name,
}


DATA_DAMAGE: dict[str, RunDamage] = {
    kind: RUN_DAMAGE[kind] for kind in (*_OF_DOCUMENTS, *_OF_FILES) if kind != "rows twice"
}


def hostile_run(source: Path, folder: Path, kind: str, seed: int) -> Path:
    """Return a damaged copy of a run directory, or of a data set, in a new folder, beside a file
    that is not its."""
    drawn = random.Random(f"{kind} {seed}")
    (folder / OUTSIDE).mkdir(parents=True)
    (folder / OUTSIDE / "precious.txt").write_text("precious\n")
    for name in ("data", "rules", "grafana", "csv"):  # folders that commands replace in their own
        (folder / OUTSIDE / name).mkdir()
        (folder / OUTSIDE / name / "rows.csv").write_text("precious\n")
    run = Path(shutil.copytree(source, folder / RUN))
    RUN_DAMAGE[kind](run, drawn)
    return run


# --- hostile specs -------------------------------------------------------------------------------

_SPEC = """schema = 2
name = "hostile"
[training]
max_steps = 4
global_batch = 16
image_size = 32
[[workloads]]
name = "tiny"
samples = 48
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""
# Values in place of one of the spec, in TOML.
_TOML_VALUES = {
    "another type": (
        "true", '"text"', "[]", "{}", "[1, [2]]", "1979-05-27", "07:32:00", "{ a = 1 }", '""',
    ),
    "huge number": (
        "9223372036854775807", "-9223372036854775808", "1e308", "1e-320", "9" * 40, "9" * _DIGITS,
        "0x" + "f" * _DIGITS, "1000000000", "0",
    ),
    "no number": ("nan", "inf", "-inf", "-nan"),
    "negative count": ("-1", "-0.5", "-1000000"),
    "text that a terminal or page acts on": tuple(
        json.dumps(text) for text in _TERMINAL if "\ud800" not in text
    ),
    "name that is a path": (
        '"../../outside"', '"/etc/passwd"', '"a/b"', '".."', '"nul\\u0000"', '"file:///etc"', '"s3://x/y"',
        '"/dev/zero"', '"-rf"', '"~"', '"http://u:p@h/"',
    ),
}  # fmt: skip
_TOML_TABLES = (
    '[spark.conf]\n"a.b" = {}\n', "[mpi]\narguments = [{}]\n", "[limits]\ntrial_s = {}\n",
    "[telemetry]\ninterval_s = {}\n", "[tune]\nstrategies = {}\n", "[unknown]\nkey = {}\n",
    "[checkpoint]\nevery_steps = {}\n", '[baseline]\n"\\u001b[31m" = {}\n',
)  # fmt: skip


def _in_place_of_a_value(values: Sequence[str]) -> Callable[[random.Random], bytes]:
    def made(drawn: random.Random) -> bytes:
        if drawn.random() < 0.3:
            return (_SPEC + drawn.choice(_TOML_TABLES).replace("{}", drawn.choice(values))).encode()
        lines = _SPEC.splitlines()
        place = drawn.choice([n for n, line in enumerate(lines) if "=" in line])
        lines[place] = f"{lines[place].partition('=')[0]}= {drawn.choice(values)}"
        return "\n".join(lines).encode()

    return made


def _nested_toml(drawn: random.Random) -> bytes:
    count = 20_000
    return drawn.choice((
        _SPEC + "x = " + "[" * count + "]" * count,
        _SPEC + "x = " + "{a=" * count + "1" + "}" * count,
        ".".join(["a"] * count) + " = 1\n" + _SPEC,
        _SPEC + "[" + ".".join(["a"] * count) + "]\n",
        _SPEC + "[[" + ".".join(["a"] * 2000) + "]]\n",
    )).encode()  # fmt: skip


def _large_toml(drawn: random.Random) -> bytes:
    trial = _SPEC.partition("[[trials]]")[2]
    return drawn.choice((
        _SPEC + "x = [" + "1," * 1_000_000 + "]\n",
        _SPEC + "".join(f"k{n} = {n}\n" for n in range(100_000)),
        _SPEC + f"[[trials]]{trial}" * 3_000,
        _SPEC.replace("hostile", "x" * 5_000_000),
        _SPEC + "# " + "x" * 20_000_000,
        _SPEC + '[[workloads]]\nname = "tiny"\n' * 2_000,
    )).encode()  # fmt: skip


def _damaged_toml(drawn: random.Random) -> bytes:
    return damaged(_SPEC.encode(), drawn)


def _other_encoding(drawn: random.Random) -> bytes:
    return drawn.choice((
        b"", b"\x00" * 100, b"\xef\xbb\xbf" + _SPEC.encode(), _SPEC.encode("utf-16"), b"\xff" * 50,
        _SPEC.replace("\n", "\r").encode(), b"\x7fELF" + bytes(60), b"PK\x03\x04", b"{}", b"<xml/>",
        _SPEC.encode() + b"\xc3", _SPEC.replace("hostile", "\u4e2d\u00e9").encode(),
    ))  # fmt: skip


def _other_spec_version(drawn: random.Random) -> bytes:
    value = drawn.choice(("999", "0", "-1", '"2"', "2.5", "true", "[2]", "1979-05-27", "9" * 30))
    return _SPEC.replace("schema = 2", f"schema = {value}").encode()


SPEC_CONTENT: dict[str, Callable[[random.Random], bytes]] = {
    **{kind: _in_place_of_a_value(values) for kind, values in _TOML_VALUES.items()},
    "deep nesting": _nested_toml,
    "large": _large_toml,
    "random bytes": _damaged_toml,
    "another encoding": _other_encoding,
    "another version": _other_spec_version,
}
SPEC_FILES = {kind: _OF_FILES[kind] for kind in (
    "pipe", "socket", "link to /dev/zero", "link to nothing", "link to itself",
    "folder in place of a file", "not readable", "4 TiB without content", "missing",
)}  # fmt: skip
SPEC_DAMAGE = (*SPEC_CONTENT, *SPEC_FILES)


def hostile_spec(folder: Path, kind: str, seed: int) -> Path:
    """Return a hostile spec in a folder."""
    drawn = random.Random(f"{kind} {seed}")
    path = folder / "spec.toml"
    path.write_bytes(SPEC_CONTENT[kind](drawn) if kind in SPEC_CONTENT else _SPEC.encode())
    if kind in SPEC_FILES:
        SPEC_FILES[kind](path, drawn)
    return path


# --- results of the whole form -------------------------------------------------------------------


def record(
    results: Path,
    subject: str,
    kind: str,
    seed: int,
    codes: Sequence[int],
    seconds: Sequence[float],
    faults: Sequence[str],
) -> None:
    """Add a case with the exit codes and times of its commands, and what they did wrong."""
    row = {"subject": subject, "kind": kind, "seed": seed, "codes": codes, "seconds": seconds,
           "faults": faults}  # fmt: skip
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


# --- permissions that also hold for root ---------------------------------------------------------

_CAPABILITY_VERSION = 0x20080522  # man 2 capget: version 3
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def permissions_of_a_user() -> Iterator[None]:
    """Let permissions of files hold for this thread, also if it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    effective = data[0]
    data[0] = effective & ~_OVERRIDES
    libc.capset(header, data)
    try:
        yield
    finally:
        data[0] = effective
        libc.capset(header, data)
