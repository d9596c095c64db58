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
_wanting: set[object] = set()
_usual = 0.0


class responsive:
    """Inside a ``with`` the interval is short, for the whole process; the last one to leave sets it back.

    Does not touch the device.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        keep_short(self, True)

    def __exit__(self, *error: object) -> None:
        keep_short(self, False)


def keep_short(who: object, wanted: bool) -> None:
    """Says whether someone wants the interval to be short, for as long as he does not say otherwise.  Idempotent.

    Does not touch the device.
    """
    global _usual
    with _lock:
        was = bool(_wanting)
        (_wanting.add if wanted else _wanting.discard)(who)
        if bool(_wanting) == was:
            return
        if was:
            _set_back()
            return
        now = sys.getswitchinterval()
        if not (_usual and _is_short(now)):  # else somebody has put back what he found while it was ours
            _usual = now
        if _usual > SHORT_SECONDS:
            sys.setswitchinterval(SHORT_SECONDS)


def _set_back() -> None:
    """Nobody waits any more: as it was, unless it is somebody's choice since."""
    if _usual > SHORT_SECONDS and _is_short(sys.getswitchinterval()):
        sys.setswitchinterval(_usual)


def _is_short(seconds: float) -> bool:
    """Whether an interval is ours: it is kept in whole microseconds, and each time that it is put back may lose one."""
    return abs(seconds - SHORT_SECONDS) < 2.5e-6


def _nobody() -> set[object]:
    """In a forked child: who waited is a thread of the parent's."""
    if _wanting:
        _set_back()
    return set()


forks.renew(sys.modules[__name__], _lock=threading.Lock, _wanting=_nobody)
