"""A short switch interval while a thread calls or waits: how long a busy thread keeps the interpreter from it.

Whoever wants the interpreter back asks for it after the interval (5 ms unless somebody has set another), each time that
a call of the system or of the driver has let it go.  A call makes tens of these, and works for microseconds in between.
"""

from __future__ import annotations

import os
import sys
import threading

WAITING_SECONDS = 1e-4

_lock = threading.Lock()
_waiting = 0
_usual = 0.0


class responsive:
    """Inside a ``with`` the interval is short, for the whole process; the last one to leave sets it back.

    Does not touch the device.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _waiting, _usual
        with _lock:
            _waiting += 1
            if _waiting == 1:
                _usual = sys.getswitchinterval()
                if _usual > WAITING_SECONDS:
                    sys.setswitchinterval(WAITING_SECONDS)

    def __exit__(self, *error: object) -> None:
        global _waiting
        with _lock:
            _waiting -= 1
            if _waiting == 0 and _usual > WAITING_SECONDS and _is_ours(sys.getswitchinterval()):
                sys.setswitchinterval(_usual)


def _after_fork() -> None:
    """In a forked child: who waited is a thread of the parent's."""
    global _lock, _waiting
    _lock = threading.Lock()
    if _waiting and _usual > WAITING_SECONDS and _is_ours(sys.getswitchinterval()):
        sys.setswitchinterval(_usual)
    _waiting = 0


os.register_at_fork(after_in_child=_after_fork)


def _is_ours(interval: float) -> bool:
    """Whether it is what was set here, and nobody's choice since.  The interpreter keeps whole microseconds."""
    return abs(interval - WAITING_SECONDS) < 0.5e-6
