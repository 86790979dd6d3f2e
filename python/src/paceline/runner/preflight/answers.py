"""The answers of a probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A host as its probe sees it."""

    host: str  # its own name
    identity: str  # equal for two names of one host
    boot_id: str  # equal for parts of one machine
    address: str | None  # of the interface; None if it has none
    address_fault: str | None
    resolved: dict[str, str | None]  # addresses by the names of all hosts; None: unknown
    versions: dict[str, str]
    threads: dict[str, str]  # variables that choose numbers of threads
    cores: int
    cgroup_cores: float | None  # None: no limit
    cgroup_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address where a probe listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLink:
    """Short messages from one host to another, and the clock of the other one.

    latency_s: one way. offset_s: to add to the own time to get the other's, correct within
    +-offset_error_s.
    """

    latency_s: float
    offset_s: float
    offset_error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A long message from one host to another."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A shared folder as one host sees it, after every host has used it.

    appended, renamed: hosts whose changes arrived. excluded: the lock of the first host holds here;
    None if the file system has no locks.
    """

    appended: int
    renamed: int
    excluded: bool | None
