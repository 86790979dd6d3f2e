"""Tables of the terminal break ids after dots and texts between words; ids are short."""

from __future__ import annotations

import pytest
from tests.support.terminal import shown

from paceline.show.report.section import Column, Table, terminal_table
from paceline.show.report.wording import short_ids

LONG = "torchrun.gloo.processes.n1r2t1.bn-per-replica"


def lines(table: Table[tuple[str, str]], width: int) -> list[str]:
    return [line.rstrip() for line in shown(terminal_table(table), width).splitlines()]


def test_an_id_is_broken_only_after_a_dot() -> None:
    columns: list[Column[tuple[str, str]]] = [
        Column("trial", lambda row: row[0], "id"),
        Column("ms", lambda row: row[1]),
    ]
    table = Table(columns=columns, items=[(LONG, "123456"), ("local.none", "1")])
    for width in range(24, 60):
        found = lines(table, width)
        assert max(map(len, found)) <= width
        parts = [line.split()[0] for line in found[1:-1]]
        assert "".join(parts) == LONG
        assert all(part.endswith(".") for part in parts[:-1])


def test_texts_share_the_room_and_keep_their_words_whole() -> None:
    columns: list[Column[tuple[str, str]]] = [
        Column("short", lambda row: row[0], "text"),
        Column("", lambda row: row[1], "text"),
    ]
    table = Table(
        columns=columns,
        items=[("undecided", "the difference between both configurations may be chance")],
    )
    words = {word for item in table.items for text in item for word in text.split()}
    for width in range(26, 70):
        found = lines(table, width)
        assert max(map(len, found)) <= width
        assert {word for line in found[1:] for word in line.split()} == words


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        (["w.mpi.mpi.a.fp32.k", "w.mpi.gloo.b.fp32"], ["mpi.a.k", "gloo.b"]),
        (["w.mpi.fp32", "w.mpi.fp32.sharded"], ["fp32", "fp32.sharded"]),
        (["w.a.r0", "w.a.r1"], ["r0", "r1"]),
        (["w.a.x.fp32.r0", "w.b.x.fp32.s.r0"], ["a", "b.s"]),
        (["w.a.fp32.r0", "w.a.fp32.s.r0"], ["fp32", "fp32.s"]),
        (["w.a.r0"], ["w.a.r0"]),
        ([], []),
    ],
)
def test_ids_keep_what_distinguishes_them(ids: list[str], short: list[str]) -> None:
    assert list(short_ids(ids).values()) == short
