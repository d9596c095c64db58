"""epoll with a handler for each descriptor, whose interests any thread may change.

`selectors` keeps tables that are not made for that; the kernel's own table is.  Interests change with each call, and so
with the interpreter held: `epoll.modify` lets it go, and two threads would hand it to and fro for each link.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import select
import threading
import time
from collections.abc import Callable

Handler = Callable[[bool, bool], None]
"""Called with (readable, writable) on the thread that polls."""

LONGEST_SECONDS = 86_400.0  # epoll counts milliseconds in 31 bits
_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT
_BROKEN = select.EPOLLHUP | select.EPOLLERR
_MODIFY = 3  # EPOLL_CTL_MOD, which `select` does not name


class _Data(ctypes.Union):
    _fields_ = (("descriptor", ctypes.c_int), ("whole", ctypes.c_uint64))


class _Event(ctypes.Structure):
    """The kernel's ``struct epoll_event``, on x86-64 without a gap.  `select.epoll` reads a descriptor as its data."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", _Data))


@functools.cache
def _library() -> ctypes.PyDLL:
    """The system's library, called with the interpreter held."""
    return ctypes.PyDLL(None, use_errno=True)


class Poller:
    """What one agent's thread sleeps on."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._interests: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, descriptor: int, handler: Handler) -> None:
        """Calls the handler when the descriptor can be read; never once it is closed.  Does not block the host."""
        with self._lock:
            if self._epoll.closed:
                return
            self._epoll.register(descriptor, _READ)
            self._handlers[descriptor] = handler
            self._interests[descriptor] = _READ

    def want(self, descriptor: int, *, read: bool | None = None, write: bool | None = None) -> None:
        """Changes what is waited for; None leaves it.  Nothing for a descriptor that was removed.  Does not block."""
        with self._lock:
            now = self._interests.get(descriptor)
            if now is None:
                return
            wanted = now
            if read is not None:
                wanted = wanted | _READ if read else wanted & ~_READ
            if write is not None:
                wanted = wanted | _WRITE if write else wanted & ~_WRITE
            if wanted != now and not self._epoll.closed:
                self._interests[descriptor] = wanted
                event = _Event(wanted, _Data(descriptor))
                if _library().epoll_ctl(self._epoll.fileno(), _MODIFY, descriptor, ctypes.byref(event)) < 0:
                    raise OSError(ctypes.get_errno(), "what is polled could not be changed")

    def remove(self, descriptor: int) -> None:
        """Forgets a descriptor, before it is closed.  Idempotent.  Does not block the host."""
        with self._lock:
            if self._interests.pop(descriptor, None) is not None:
                del self._handlers[descriptor]
                if not self._epoll.closed:
                    self._epoll.unregister(descriptor)

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[tuple[Handler, bool, bool]]:
        """Blocks the host until something can be done, `timeout` seconds, or a day; what to call with what.

        Looks again and again for the first `spin` seconds (`patience`).
        """
        found = []
        if spin > 0.0 and timeout != 0.0:
            found = self._look(spin if timeout is None else min(spin, timeout))
        if not found:
            found = self._epoll.poll(None if timeout is None else min(timeout, LONGEST_SECONDS))
        with self._lock:
            return [
                (self._handlers[descriptor], bool(events & (_READ | _BROKEN)), bool(events & _WRITE))
                for descriptor, events in found
                if descriptor in self._handlers
            ]

    def _look(self, seconds: float) -> list[tuple[int, int]]:
        poll, over = self._epoll.poll, time.monotonic() + seconds
        while not (found := poll(0)) and time.monotonic() < over:
            pass
        return found

    def close(self) -> None:
        """Does not block the host.  Idempotent."""
        with self._lock:
            self._epoll.close()
