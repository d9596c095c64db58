"""Memory that was exported over a connection that has ended: kept until the peer has unmapped it, or is gone.

Freeing memory that another process maps is undefined.  So one thread, which is there only while something is kept,
looks at the words that peers write when they unmap.  What a frozen process has mapped stays.

Standard library only.  Does not touch the device, but for the owners that it drops.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from streamrt import forks

FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 1.0

_Kept = tuple[object, Callable[[], bool], Callable[[], object]]
_kept: list[_Kept] = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _nobody() -> None:
    return None


forks.renew(sys.modules[__name__], _lock=threading.Lock, _kept=list, _thread=_nobody)


def keep(memory: object, over: Callable[[], bool], dropped: Callable[[], object]) -> None:
    """Keeps `memory` until `over()`, then drops it and calls `dropped`.  Does not block the host."""
    global _thread
    if over():
        del memory
        dropped()
        return
    with _lock:
        _kept.append((memory, over, dropped))
        if _thread is not None:
            return
        _thread = threading.Thread(target=_look, name="streamrt-retired", daemon=True)
        try:
            _thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending: the next one that is kept tries again
            _thread = None


def kept() -> int:
    """How many pieces of memory wait for their peers.  Does not touch the device."""
    with _lock:
        return len(_kept)


def _look() -> None:
    global _thread
    pause = FIRST_PAUSE_SECONDS
    try:
        while True:
            time.sleep(pause)
            pause = FIRST_PAUSE_SECONDS if _drop() else min(2 * pause, LONGEST_PAUSE_SECONDS)
            with _lock:
                if not _kept:
                    _thread = None
                    return
    except BaseException:
        with _lock:
            _thread = None
        raise


def _drop() -> bool:
    """Drops what nobody maps any more; whether there was any."""
    with _lock:
        looked = list(_kept)
    done = [entry for entry in looked if entry[1]()]
    with _lock:
        for entry in done:
            _kept.remove(entry)
    for _, _, dropped in done:
        dropped()
    return bool(done)
