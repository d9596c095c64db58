"""A short switch interval while a thread calls or waits: how long a busy thread keeps the interpreter from it.

Whoever wants the interpreter back asks for it after the interval (5 ms unless somebody has set another), each time that
a call of the system or of the driver has let it go.  A call makes tens of these, and works for microseconds in between.
"""

from __future__ import annotations

import sys
import threading

from streamrt import forks

SHORT_SECONDS = 5e-5

_lock = threading.Lock()
_waiting = 0
_usual = 0.0


class responsive:
    """Inside a ``with`` the interval is short, for the whole process; the last one to leave sets it back.

    Does not touch the device.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        begin()

    def __exit__(self, *error: object) -> None:
        end()


def begin() -> None:
    """The interval is short until as many have called `end`.  Does not touch the device."""
    global _waiting, _usual
    with _lock:
        _waiting += 1
        if _waiting == 1:
            _usual = sys.getswitchinterval()
            if _usual > SHORT_SECONDS:
                sys.setswitchinterval(SHORT_SECONDS)


def end() -> None:
    """Who has called `begin` does not want it any more.  Does not touch the device."""
    global _waiting
    with _lock:
        _waiting -= 1
        if _waiting == 0:
            _set_back()


def _set_back() -> None:
    """Nobody waits any more: as it was, unless it is somebody's choice since."""
    if _usual > SHORT_SECONDS and abs(sys.getswitchinterval() - SHORT_SECONDS) < 0.5e-6:  # it keeps whole microseconds
        sys.setswitchinterval(_usual)


def _nobody_waits() -> int:
    """In a forked child: who waited is a thread of the parent's."""
    if _waiting:
        _set_back()
    return 0


forks.renew(sys.modules[__name__], _lock=threading.Lock, _waiting=_nobody_waits)
