"""The ends of waits whose connection is over: no stream waits for a peer for ever.

What a peer had enqueued before the connection ended is still signalled while it lives.  So one thread, which is there
only while a stream waits for one, looks at it: when the process is gone, or its time is over, the words are marked and
released; and released again until the streams are past their waits, for a process that only stood still may write late.

Does not touch the device, but for events that it asks.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from streamrt.segment import Segment
from transport.channels.keeper import Keeper
from transport.channels.words import retire

clock: Callable[[], float] = time.monotonic


class Ending(Protocol):
    """The waits of a connection that has ended."""

    def collect(self) -> bool:
        """Whether a stream still waits."""

    def mark(self) -> None:
        """Marks what was not reached."""

    def release(self) -> None:
        """Lets the streams go on that wait for what is marked."""

    def end(self) -> None:
        """None waits any more."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How long waits may last: while the peer's process is not `gone`, and until `deadline` of `clock`."""

    gone: Callable[[], bool]
    deadline: float


@dataclass(slots=True)
class _Kept:
    waits: Ending
    bound: Bound
    words: Segment
    kinds: tuple[str, ...]

    def over(self) -> bool:
        """Looks at it: whether every stream is past its waits."""
        if not self.waits.collect():
            return True
        if self.bound.gone() or clock() > self.bound.deadline:
            self.waits.mark()
        self.waits.release()  # what is marked, also by others
        return False

    def end(self) -> None:
        """Lets go of the words."""
        self.waits.end()
        retire(self.words, self.kinds, _at_once)


keeper: Keeper[_Kept] = Keeper("streamrt-bounds", _Kept.over, _Kept.end, first=0.002, longest=0.05)


def keep(waits: Ending, bound: Bound, words: Segment, kinds: Iterable[str]) -> None:
    """Bounds the waits; gives the peer's `words`, which devices of these kinds have mapped, back after the last.

    Does not block the host.
    """
    keeper.keep(_Kept(waits, bound, words, tuple(kinds)))


def kept() -> int:
    """Of how many connections that have ended streams still wait for the peer.  Does not touch the device."""
    return len(keeper)


def _at_once() -> bool:
    return True


@atexit.register
def _let_go() -> None:
    """The process ends, and nobody uses what is waited for: no stream may hold the end up."""
    for entry in list(keeper.entries):
        entry.waits.mark()
        entry.waits.release()
