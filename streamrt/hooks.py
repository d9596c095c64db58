"""The one instrumentation seam of the runtime.

A producer writes ``if hooks.listeners: hooks.emit(hooks.Waited(...))``: one branch when nobody listens.
Records are frozen and hold plain values, so an observer (the sanitizer, a trace, `streamrt.testing`) can keep them.
`dropped` names the ordering edges that `streamrt.testing.without` removes: a race test shows with it that it can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event was recorded on a stream; `version` counts the event's records."""

    stream: tuple[Any, ...]
    event: int
    version: int


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream waits for an event's version, or for a word to reach a value (`event` is then the word's address)."""

    stream: tuple[Any, ...]
    event: int
    version: int
    edge: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """A stream will store `value` into the word at `address`."""

    stream: tuple[Any, ...]
    address: int
    value: int


@dataclass(frozen=True, slots=True)
class Synchronized:
    """The host blocked (or was about to) until a device had done something; `what` names the call."""

    what: str


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy was enqueued on a stream; addresses are of this process."""

    stream: tuple[Any, ...]
    destination: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A function was launched on a stream with the byte extents that it reads and writes."""

    stream: tuple[Any, ...]
    name: str
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Allocated:
    """Device memory was taken from the backend, ordered on a stream."""

    device: str
    address: int
    nbytes: int
    stream: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Freed:
    """Device memory went back to the backend."""

    device: str
    address: int
    nbytes: int


Record = Recorded | Waited | Signalled | Synchronized | Copied | Launched | Allocated | Freed

listeners: tuple[Callable[[Record], None], ...] = ()
dropped: frozenset[str] = frozenset()


def emit(record: Record) -> None:
    """Hands a record to every listener, on the calling thread.  Does not touch the device."""
    for listener in listeners:
        listener(record)


def listen(listener: Callable[[Record], None]) -> Callable[[], None]:
    """Adds a listener and returns the function that removes it.  Does not touch the device."""
    global listeners
    listeners = (*listeners, listener)

    def remove() -> None:
        global listeners
        listeners = tuple(other for other in listeners if other is not listener)

    return remove
