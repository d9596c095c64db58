"""Timelines: counters in shared memory that streams signal, and points on them that streams and hosts wait for.

A `Timeline` is the only writer of its word.  The next value and the call that enqueues its signal are taken under one
lock: two threads can never enqueue their signals in the other order than their values, which would let the word go
backwards.  Values may wrap; comparison is cyclic (`streamrt.segment.reached`).

*Signal before wait*: hand a point to a peer only after `signal` has returned, so that whoever waits for it waits for
something already enqueued that needs no host any more.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrt.seconds import waitable
from streamrt.segment import Word, reached

if TYPE_CHECKING:
    from streamrt.stream import Stream

_SPIN_SECONDS = 50e-6
_FIRST_SLEEP = 20e-6
_LONGEST_SLEEP = 1e-3


@dataclass(frozen=True, slots=True)
class Point:
    """A value that a word comes to when all work before it is done.  Immutable; holds no device resource."""

    word: Word
    value: int

    def reached(self) -> bool:
        """Whether the word is there, or was released because its writer is gone: then `lost` says so.

        Ask `reached` first and `lost` second: a release marks the loss before it moves the word.  Does not block the
        host, nor touch the device.
        """
        return reached(self.word.load(), self.value, self.word.bits)

    @property
    def lost(self) -> bool:
        """Whether the word was given up before it came to this value, so that what the point stands for never came.

        Does not block the host, nor touch the device.
        """
        word = self.word
        return word.lost and not reached(word.last_good, self.value, word.bits)

    def spin(self, timeout: float) -> bool:
        """Blocks the host until the word is there (True) or `timeout` seconds have passed (False); 0 asks once.

        Spins for 50 us, then sleeps between looks, 20 us at first and up to 1 ms, so that a long wait leaves the
        processor to others.  Does not touch the device.
        """
        timeout = waitable(timeout)
        load, value, bits = self.word.load, self.value, self.word.bits
        if reached(load(), value, bits):
            return True
        start = time.monotonic()
        end, calm = start + timeout, start + _SPIN_SECONDS
        pause = _FIRST_SLEEP
        while (now := time.monotonic()) < end:
            if now >= calm:
                time.sleep(min(pause, end - now))
                pause = min(pause * 2, _LONGEST_SLEEP)
            if reached(load(), value, bits):
                return True
        return reached(load(), value, bits)


class Timeline:
    """Signals the points of one word, in order.  Thread-safe; one timeline for one word, in one process."""

    def __init__(self, word: Word, start: int = 0) -> None:
        """Sets the word to `start`; the first signal is ``start + 1``.  Does not touch the device."""
        self.word = word
        self._lock = threading.Lock()
        self._value = start & self._mask
        word.store(start)

    @property
    def _mask(self) -> int:
        return (1 << self.word.bits) - 1

    @property
    def last(self) -> Point:
        """The newest point whose signal was enqueued (or the start, which is reached).  Does not block the host."""
        return Point(self.word, self._value)

    def signal(self, stream: Stream) -> Point:
        """Enqueues on `stream` the store of the next value, and returns its point.  Does not block the host.

        All earlier work of the stream is visible to whoever sees the value.  If the driver refuses, the value is not
        used up and the error is raised; `CaptureError` while the stream captures a graph.
        """
        with self._lock:
            value = (self._value + 1) & self._mask
            stream.device.backend.write_word(stream.device.index, stream.handle, self.word, value)
            self._value = value
        return Point(self.word, value)

    def signal_host(self) -> Point:
        """Stores the next value at once, from the host.  Does not touch the device.  Does not block the host.

        Only where no stream has a signal of this timeline still to run: it would take the word back to a lower value.
        """
        with self._lock:
            value = (self._value + 1) & self._mask
            self.word.store(value)
            self._value = value
        return Point(self.word, value)

    def __repr__(self) -> str:
        return f"<Timeline {self.word!r} next {(self._value + 1) & self._mask}>"
