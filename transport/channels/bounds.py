"""The ends of waits whose connection is over: no stream waits for a peer for ever.

What a peer had enqueued before the connection ended is still signalled while it lives.  So one thread, which is there
only while a stream waits for one, looks at it: when the process is gone, or its time is over, the words are marked and
released; and released again until the streams are past their waits, for a process that only stood still may write late.

Does not touch the device, but for events that it asks.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from streamrt import forks
from streamrt.segment import Segment
from transport.channels.words import retire

clock: Callable[[], float] = time.monotonic
FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.05


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


_kept: list[_Kept] = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _nobody() -> None:
    return None


forks.renew(sys.modules[__name__], _lock=threading.Lock, _kept=list, _thread=_nobody)


def keep(waits: Ending, bound: Bound, words: Segment, kinds: Iterable[str]) -> None:
    """Bounds the waits; gives the peer's `words`, which devices of these kinds have mapped, back after the last.

    Does not block the host.
    """
    global _thread
    kept = _Kept(waits, bound, words, tuple(kinds))
    if kept.over():
        kept.end()
        return
    with _lock:
        _kept.append(kept)
        if _thread is not None:
            return
        _thread = threading.Thread(target=_look, name="streamrt-bounds", daemon=True)
        try:
            _thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending: the next one that is kept tries again
            _thread = None


def kept() -> int:
    """Of how many connections that have ended streams still wait for the peer.  Does not touch the device."""
    with _lock:
        return len(_kept)


def _at_once() -> bool:
    return True


@atexit.register
def _let_go() -> None:
    """The process ends, and nobody uses what is waited for: no stream may hold the end up."""
    for entry in list(_kept):
        entry.waits.mark()
        entry.waits.release()


def look() -> bool:
    """Looks once at all that is kept; whether any is over.  Does not block the host."""
    with _lock:
        looked = list(_kept)
    done = [entry for entry in looked if entry.over()]
    for entry in done:
        entry.end()
    with _lock:
        for entry in done:
            _kept.remove(entry)
    return bool(done)


def _look() -> None:
    global _thread
    pause = FIRST_PAUSE_SECONDS
    try:
        while True:
            time.sleep(pause)
            pause = FIRST_PAUSE_SECONDS if look() else min(2 * pause, LONGEST_PAUSE_SECONDS)
            with _lock:
                if not _kept:
                    _thread = None
                    return
    except BaseException:
        with _lock:
            _thread = None
        raise
