"""An alarm that wakes a poller after a time: a timer of the system with a descriptor (Linux's timerfd).

Setting it is one call of the system, which keeps the interpreter: callers do it, between two calls.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


@functools.cache
def _library() -> Any:
    """The system's library, called with the interpreter held; None where it has no such timers."""
    library = ctypes.PyDLL(None, use_errno=True)
    return library if hasattr(library, "timerfd_create") and hasattr(library, "timerfd_settime") else None


class Alarm:
    """One alarm, which rings some seconds after `set` by making its descriptor readable."""

    def __init__(self) -> None:
        """Does not block the host.  Raises `OSError` where there are no such timers, or no descriptor is left."""
        library = _library()
        if library is None:
            raise OSError("this system has no timers with descriptors")
        descriptor: int = library.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer could be made")
        self._descriptor = descriptor
        self._time = _Itimerspec()
        self._seconds = 0.0  # which that says; most often the same again
        self._settime = library.timerfd_settime

    def fileno(self) -> int:
        """The descriptor to poll; -1 once it is closed."""
        return self._descriptor

    def set(self, seconds: float) -> None:
        """Rings once, so much later (more than 0); one that was set before and has not rung rings then instead.

        By one thread at a time.  Does not block the host.
        """
        if seconds != self._seconds:
            whole, part = divmod(max(1, round(seconds * _NANOSECONDS)), _NANOSECONDS)
            self._time.value = _Timespec(whole, part)
            self._seconds = seconds
        self._settime(self._descriptor, 0, ctypes.byref(self._time), None)

    def silence(self) -> None:
        """It has rung: its descriptor can be read no more.  Does not block the host."""
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # it was set again meanwhile

    def close(self) -> None:
        """Does not block the host.  Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
