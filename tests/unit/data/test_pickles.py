"""A pickle that would run anything but a schema's classes is refused, and none of it runs."""

from __future__ import annotations

import builtins
import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from paceline.data.dataset import open_dataset
from paceline.data.ingest_schema import SCHEMA
from paceline.data.pickles import SCHEMA_NAMES, check_pickle, imported_names
from paceline.data.reading import open_feed
from paceline.errors import UntrustedDataError
from paceline.plan.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


PROTO = b"\x80\x04"
CALL = text("touch /nonexistent") + b"\x85R."  # TUPLE1 REDUCE STOP
MEMOIZE, POP, DUP, STACK_GLOBAL = b"\x94", b"0", b"2", b"\x93"

HANDMADE = {
    "names fetched from the memo": PROTO
    + text("os") + MEMOIZE + POP + text("system") + MEMOIZE + POP
    + text("numpy") + text("int64") + STACK_GLOBAL + POP
    + b"h\x00h\x01" + STACK_GLOBAL + CALL,
    "memo slot written twice": PROTO
    + text("numpy") + b"q\x07" + POP + text("os") + b"q\x07" + POP
    + b"h\x07" + text("system") + STACK_GLOBAL + CALL,
    "long memo slots": PROTO
    + text("os") + b"r\x00\x01\x00\x00" + POP + b"j\x00\x01\x00\x00"
    + text("system") + STACK_GLOBAL + CALL,
    "decoy popped before the import": PROTO
    + text("os") + text("system") + text("int64") + POP + STACK_GLOBAL + CALL,
    "decoys thrown away with a mark": PROTO
    + text("os") + text("system") + b"(" + text("numpy") + text("int64") + b"1"
    + STACK_GLOBAL + CALL,
    "module duplicated": PROTO
    + text("os") + DUP + POP + text("system") + STACK_GLOBAL + CALL,
    "text memo slots": b"Vos\np3\n0g3\nVsystem\n" + STACK_GLOBAL + CALL,
    "name computed by an allowed class": PROTO
    + text("numpy") + text("str_") + STACK_GLOBAL + text("os") + b"\x85R"
    + text("system") + STACK_GLOBAL + CALL,
    "attribute of an allowed class": PROTO
    + text("petastorm.unischema") + text("Unischema.__init__.__globals__") + STACK_GLOBAL + b".",
    "INST instruction": b"(S'touch /nonexistent'\nios\nsystem\n.",
    "OBJ instruction": b"(cos\nsystem\nS'touch /nonexistent'\no.",
    "extension registry": b"\x82\x01.",
    "persistent id": b"Pid\n.",
    "names that Petastorm rewrites": b"\n(cav.ml.dataset_toolkit.unischema\nUnischema\n.",
    "GLOBAL of a Python 2 name": b"c__builtin__\neval\n(S'1'\ntR.",
    "bytes after nothing": b"",
    "not a pickle": b"\xff\xfe\xfd",
    "mark taken for a value": PROTO + b"(" + STACK_GLOBAL + b".",
    "empty stack": PROTO + STACK_GLOBAL + b".",
    "unknown memo slot": PROTO + b"h\x05" + text("system") + STACK_GLOBAL + b".",
}  # fmt: skip


@pytest.mark.parametrize("data", HANDMADE.values(), ids=HANDMADE.keys())
def test_a_handmade_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(UntrustedDataError):
        check_pickle(data, SCHEMA_NAMES, "data set")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (builtins.eval, "builtins.eval"),
        (builtins.getattr, "builtins.getattr"),
        (os.system, "posix.system"),
        (shutil.rmtree, "shutil.rmtree"),
    ],
)
def test_a_call_hidden_in_a_real_schema_is_named(
    function: Callable[..., Any], name: str, protocol: int
) -> None:
    data = pickle.dumps([SCHEMA, {"deep": (1, Calls(function, "1"))}], protocol)
    spoken = name.replace("builtins", "__builtin__") if protocol == 2 else name
    with pytest.raises(UntrustedDataError, match=rf"{spoken}, which no"):
        check_pickle(data, SCHEMA_NAMES, "data set")


def test_petastorms_own_guard_lets_eval_through(tmp_path: Path) -> None:
    """Why we have ours (uber/petastorm#741); if this fails, Petastorm has been mended."""
    from petastorm.etl.legacy import restricted_loads

    mark = tmp_path / "executed"
    restricted_loads(pickle.dumps(Calls(builtins.eval, f"open({str(mark)!r}, 'w')")))
    assert mark.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_schema_that_ingest_writes_passes(protocol: int) -> None:
    data = pickle.dumps(SCHEMA, protocol)
    check_pickle(data, SCHEMA_NAMES, "data set")
    assert ("petastorm.unischema", "Unischema") in imported_names(data, "data set")


def test_opening_and_reading_a_malicious_data_set_executes_nothing(
    dataset_of_rows: Any, replace_schema_pickle: Any, tmp_path: Path
) -> None:
    made = dataset_of_rows(3, 3)
    mark = tmp_path / "executed"
    attack = pickle.dumps([SCHEMA, Calls(builtins.eval, f"open({str(mark)!r}, 'w')")])
    replace_schema_pickle(made.path, attack)
    with pytest.raises(UntrustedDataError, match=r"builtins\.eval"):
        open_dataset(made.path)
    # Even when trusted: the feed gives Petastorm files, for which it reads no pickle.
    trusted = open_dataset(made.path, trust=True)
    schedule = Schedule(row_group_rows=(3, 3), seed=0, global_batch=6, epochs=1)
    with open_feed(trusted, schedule, mode="stream", image_size=16, rank=0, world_size=1) as feed:
        assert [len(batch.sample_ids) for batch in feed] == [6]
    assert not mark.exists()
