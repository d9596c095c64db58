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

    Blocks the host until all of them are copied, also when it is interrupted (Ctrl-C), which is raised after that.
    """
    parts = min(THREADS, nbytes // PART_BYTES)
    if parts < 2 or abs(destination - source) < nbytes:  # where the two overlap the order counts
        ctypes.memmove(destination, source, nbytes)
        return
    size = -(-nbytes // parts)
    others = []
    begin = size
    try:
        while begin < nbytes:
            length = min(size, nbytes - begin)
            others.append(_pool().submit(ctypes.memmove, destination + begin, source + begin, length))
            begin += length
    except RuntimeError:  # no thread can be had, or the interpreter is about to end: the rest is copied here
        ctypes.memmove(destination + begin, source + begin, nbytes - begin)
    try:
        ctypes.memmove(destination, source, size)
    finally:
        _wait(others)


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = concurrent.futures.ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="streamrt-copy")
        return _helpers


def _wait(parts: list[concurrent.futures.Future[int]]) -> None:
    interrupted: BaseException | None = None
    while True:
        try:
            concurrent.futures.wait(parts)
            break
        except BaseException as error:  # noqa: BLE001 - raised below: until then the memory is written to
            interrupted = error
    if interrupted is not None:
        raise interrupted


forks.renew(sys.modules[__name__], _helpers=lambda: None, _lock=threading.Lock)
