"""Static check of a pickle: which names it would import, without running it.

Petastorm keeps a data set's schema as a pickle and runs it when the data set is opened; its own
guard allows whole modules, `builtins` with `eval` among them (uber/petastorm#741). Here every name
must be in an exact list, and a pickle that computes names instead of stating them is refused.
"""

from __future__ import annotations

import pickletools
from typing import Any

from paceline.errors import UntrustedDataError

_NUMPY_SCALARS = (
    "bool_", "bytes_", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "str_", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
_SPARK_TYPES = (
    "BinaryType", "BooleanType", "ByteType", "DoubleType", "FloatType", "IntegerType", "LongType",
    "ShortType", "StringType",
)  # fmt: skip

# What a Petastorm schema of plain columns, arrays and images needs: classes without side effects.
SCHEMA_NAMES: frozenset[tuple[str, str]] = frozenset(
    {
        ("petastorm.unischema", "Unischema"),
        ("petastorm.unischema", "UnischemaField"),
        ("petastorm.codecs", "CompressedImageCodec"),
        ("petastorm.codecs", "CompressedNdarrayCodec"),
        ("petastorm.codecs", "NdarrayCodec"),
        ("petastorm.codecs", "ScalarCodec"),
        ("collections", "OrderedDict"),
        *(("numpy", name) for name in _NUMPY_SCALARS),
        *(("pyspark.sql.types", name) for name in _SPARK_TYPES),
    }
)

# Petastorm rewrites these module names in the bytes before it loads them: what was checked would
# not be what is loaded (petastorm/etl/legacy.py).
_REWRITTEN = (b"av.experimental.deepdrive", b"av.ml.dataset_toolkit")

_MARK = object()
_UNKNOWN = object()
_FORBIDDEN = {"INST", "OBJ", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}


def check_pickle(data: bytes, allowed: frozenset[tuple[str, str]], what: str) -> None:
    """Return if `data` imports only `allowed` (module, name) pairs.

    Raises UntrustedDataError naming the first import that is not allowed, or the reason why the
    imports cannot be told.
    """
    for legacy in _REWRITTEN:
        if legacy in data:
            raise _untrusted(what, f"the legacy name {legacy.decode()}, which is rewritten")
    for module, name in imported_names(data, what):
        if (module, name) not in allowed:
            raise _untrusted(what, f"{module}.{name}")


def imported_names(data: bytes, what: str) -> list[tuple[str, str]]:
    """All (module, name) pairs a pickle would import, in order; nothing of it is executed.

    The pickle machine's stack and memo are followed with unknown values for all but strings.
    Raises UntrustedDataError if it is malformed or a name is not a constant string.
    """
    machine = _Machine(what)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode, argument)
    except UntrustedDataError:
        raise
    except Exception as error:  # noqa: BLE001  (genops raises almost anything on odd bytes)
        raise _untrusted(what, f"a malformed pickle ({error})") from None
    return machine.names


def _untrusted(what: str, found: str) -> UntrustedDataError:
    return UntrustedDataError(
        f"{what}: its schema is a Python pickle, and opening it would use {found}, which no "
        "schema needs: code of whoever made the data set would run. Make the data set anew from "
        "its photos with `paceline data ingest`, or pass trust if you know its maker"
    )


class _Machine:
    """The stack and memo of the pickle machine, with constants for strings only."""

    def __init__(self, what: str) -> None:
        self.names: list[tuple[str, str]] = []
        self._what = what
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def step(self, opcode: Any, argument: Any) -> None:
        name = opcode.name
        if name in _FORBIDDEN:
            raise _untrusted(self._what, f"the pickle instruction {name}")
        if name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            self.names.append((module, attribute))
            self._stack.append(_UNKNOWN)
        elif name == "STACK_GLOBAL":
            attribute_value, module_value = self._stack.pop(), self._stack.pop()
            if not (isinstance(module_value, str) and isinstance(attribute_value, str)):
                raise _untrusted(self._what, "a name that the pickle computes")
            self.names.append((module_value, attribute_value))
            self._stack.append(_UNKNOWN)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[int(argument)])
        elif name == "DUP":
            self._stack.append(self._stack[-1])
        elif name == "MARK":
            self._stack.append(_MARK)
        else:
            self._generic(opcode, argument)

    def _generic(self, opcode: Any, argument: Any) -> None:
        """Any other instruction: what it takes and leaves is in pickletools' tables."""
        before = opcode.stack_before
        if pickletools.markobject in before:
            while self._stack.pop() is not _MARK:
                continue
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            if self._stack.pop() is _MARK and opcode.name != "POP":
                raise ValueError("mark where a value is expected")
        text = isinstance(argument, str) and opcode.name.endswith(("UNICODE", "UNICODE8", "STRING"))
        for _ in opcode.stack_after:
            self._stack.append(argument if text else _UNKNOWN)
