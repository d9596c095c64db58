"""Copies of ordinary memory: large ones are shared out among a few threads, since one core cannot use what the memory
gives (on two cores two copy about twice as fast as one).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import sys
import threading

from streamrt import forks

PART_BYTES = 4 << 20
"""The least that a thread is woken for: that takes some tens of microseconds, the copy half a millisecond."""
MOST_THREADS = 4
THREADS = min(MOST_THREADS, len(os.sched_getaffinity(0)))

_helpers: concurrent.futures.ThreadPoolExecutor | None = None
_lock = threading.Lock()


def move(destination: int, source: int, nbytes: int) -> None:
    """Copies bytes from one address to another; the caller keeps both alive.  Does not touch the device.

    Blocks the host until all of them are copied, also when it is interrupted (Ctrl-C), which is raised after that:
    nobody writes there any more.
    """
    count = min(THREADS, nbytes // PART_BYTES)
    to, of, nbytes = int(destination), int(source), int(nbytes)  # NumPy's are none to ctypes
    if count < 2 or abs(to - of) < nbytes:  # where the two overlap the order counts
        ctypes.memmove(to, of, nbytes)
        return
    size = -(-nbytes // count)
    parts = [_Part(to + at, of + at, min(size, nbytes - at)) for at in range(0, nbytes, size)]
    interrupted: BaseException | None = None
    try:
        for _ in range(count - 1):
            _pool().submit(_help, parts)
    except RuntimeError:
        pass  # no thread can be had, or the interpreter is about to end: what nobody takes is copied here
    finally:
        while True:  # no call before the try, at which a signal could be heard
            try:
                for wait in (False, True):
                    for part in parts:
                        part.copy(wait)
                break
            except BaseException as error:  # noqa: BLE001 - raised below: until then the memory is written to
                interrupted = error
    if interrupted is not None:
        raise interrupted


class _Part:
    """A part of a copy, by whoever takes it first.  So a helper that comes late, also much later, finds nothing to do:
    a pool keeps what it was given when it could start no thread for that."""

    __slots__ = ("_bytes", "_copied", "_lock")

    def __init__(self, destination: int, source: int, nbytes: int) -> None:
        self._bytes = (destination, source, nbytes)
        self._copied = False
        self._lock = threading.RLock()  # may be kept by who is interrupted in here, and comes back

    def copy(self, wait: bool) -> None:
        """Copies it if nobody has; where somebody does, waits for that or leaves it to him."""
        if self._lock.acquire(wait):
            try:
                if not self._copied:
                    ctypes.memmove(*self._bytes)
                    self._copied = True
            finally:
                self._lock.release()


def _help(parts: list[_Part]) -> None:
    for part in parts:
        part.copy(False)


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = concurrent.futures.ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="streamrt-copy")
        return _helpers


forks.renew(sys.modules[__name__], _helpers=lambda: None, _lock=threading.Lock)
