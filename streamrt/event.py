"""Events: marks on a stream, with timing off, and the pool that their handles come from.

Creating and destroying a driver's event for every record costs more than the record, so handles are kept and lent:
`EventPool.lease` gives an `Event` whose handle goes back when the last reference is dropped.  That is safe at any time,
because a wait binds the record that was newest when it was enqueued: recording the handle again changes no wait.
A finaliser can run anywhere, also inside the pool's own code, so it only appends to a deque.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from streamrt import forks, hooks
from streamrt.device import Device, open_device
from streamrt.seconds import waitable


class Event:
    """A mark on a stream.  Timing is off.  A wait binds the record that is newest when it is called.

    `version` counts the records; an event that was never recorded is complete, and waiting for it orders nothing.
    """

    __slots__ = ("__weakref__", "device", "handle", "version")

    device: Device
    handle: int
    version: int

    def __init__(self, device: Device | str) -> None:
        """A new event of a handle of its own.  Does not block the host.  Prefer `EventPool.lease` in steady state."""
        self.device = open_device(device)
        self.version = 0
        self.handle = self.device.backend.create_event(self.device.index)

    def query(self) -> bool:
        """Whether the newest record is complete.  Does not block the host.

        Raises `DeviceError` after a failure, `CaptureError` if that record is part of a graph.
        """
        return self.version == 0 or self.device.backend.query_event(self.device.index, self.handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host, interruptibly, until the newest record is complete.  `TimeoutError` after that.

        Raises `CaptureError` if that record is part of a graph.
        """
        timeout = None if timeout is None else waitable(timeout)
        if hooks.listeners:
            hooks.emit(hooks.Synchronized("Event.synchronize"))
        if self.version and not self.device.backend.synchronize_event(self.device.index, self.handle, timeout):
            raise TimeoutError(f"{self!r} was not complete after {timeout} s")

    def require(self) -> None:
        """Plain code is about to read what is ready here: the host backend runs what that takes, a GPU nothing.

        Blocks the host on the host backend only.  Raises `CaptureError` if the newest record is part of a graph.
        """
        if self.version:
            self.device.backend.require(self.device.index, self.handle)

    def __reduce__(self) -> NoReturn:
        """An event is of this process, and has one owner.  Does not touch the device."""
        raise TypeError(
            f"{self!r} can be neither pickled nor copied: it is of this process; record one where it is used"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device} #{self.handle} v{self.version}>"

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self.device.backend.destroy_event(self.device.index, handle)


class LeasedEvent(Event):
    """An event whose handle belongs to a pool; made by `EventPool.lease` only."""

    __slots__ = ("_home",)

    def __init__(self, device: Device, handle: int, home: deque[int]) -> None:
        self.device, self.handle, self.version, self._home = device, handle, 0, home

    def __del__(self) -> None:
        self._home.append(self.handle)


@dataclass(frozen=True, slots=True)
class EventStatistics:
    """`created`: handles made so far; `free`: those nobody holds now."""

    created: int
    free: int


class EventPool:
    """The event handles of one device.  Thread-safe; handles live as long as the process."""

    def __init__(self, device: Device | str) -> None:
        """An empty pool; handles are made when they are first needed.  Does not touch the device."""
        self.device = open_device(device)
        self._free: deque[int] = deque()
        self._created = 0

    def lease(self) -> Event:
        """An event that was never recorded; its handle goes back when the event is dropped.  Does not block the host.

        Takes the handle that came back first, so that the driver has most likely long finished with it.
        """
        try:
            handle = self._free.popleft()
        except IndexError:
            handle = self.device.backend.create_event(self.device.index)
            self._created += 1
        return LeasedEvent(self.device, handle, self._free)

    def statistics(self) -> EventStatistics:
        """How many handles there are, and how many are free.  Does not touch the device."""
        return EventStatistics(self._created, len(self._free))


_pools: dict[Device, EventPool] = {}
_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock)


def event_pool(device: Device) -> EventPool:
    """The device's event pool, one for the process.  Does not block the host once the device is open."""
    pool = _pools.get(device)
    if pool is None:
        opened = open_device(device)
        with _lock:
            pool = _pools.setdefault(opened, EventPool(opened))
    return pool
