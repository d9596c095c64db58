"""Streams: thin, hashable names for a backend's queues.

A `Stream` is *owned* (destroyed with the object) or *borrowed* (somebody else's, whose owner is kept alive).  Two
streams are equal when they are one queue of the driver, whatever object or number names it.

Verbs: *record* and *wait* order on the device and never block the host; *query* asks; *synchronize* blocks the host.
Every wait can be named (`edge=`), so that a test can take the edge away (`streamrt.testing.without`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from streamrt import hooks
from streamrt.device import Device, StreamKey, open_device
from streamrt.errors import PlacementError, UnavailableError
from streamrt.event import Event, event_pool
from streamrt.seconds import waitable

if TYPE_CHECKING:
    from streamrt.timeline import Point

__all__ = ["Event", "Stream"]


class Stream:
    """An in-order queue of a device.

    `Stream(device)` makes a new non-blocking stream and owns it; `Stream.borrow` names one that exists.
    """

    __slots__ = ("__weakref__", "_end", "_events", "device", "handle", "key", "natives", "owned", "owner")

    device: Device
    handle: int
    key: StreamKey
    natives: dict[str, Any] | None
    """Of a stream that lasts as long as the process: the libraries' own objects for it, by library."""
    owned: bool
    owner: object

    def __init__(self, device: Device | str, *, priority: int = 0) -> None:
        opened = open_device(device)
        if not opened.has_streams:
            raise PlacementError("cpu has no streams; use 'host:0' or 'cuda:0'")
        self._set(opened, opened.backend.create_stream(opened.index, priority), owned=True, owner=None)
        self._end = _End(opened, self.handle)

    def _set(self, device: Device, handle: int, *, owned: bool, owner: object, key: StreamKey | None = None) -> None:
        self.device, self.handle, self.owned, self.owner, self.natives = device, handle, owned, owner, None
        self.key = device.backend.stream_key(device.index, handle) if key is None else key
        self._events = event_pool(device)

    @classmethod
    def borrow(cls, handle: Any, device: Device | str, *, owner: object = None) -> Stream:
        """Names an existing stream: an integer handle, or any object with ``__cuda_stream__`` (kept alive).

        Does not touch the device.  The caller says which device it is on, since the protocol carries none.
        """
        if not isinstance(handle, int):
            protocol = getattr(handle, "__cuda_stream__", None)
            if protocol is None:
                raise UnavailableError(f"{type(handle).__name__} is no stream: it has no __cuda_stream__")
            version, number = protocol()
            if version != 0 or not isinstance(number, int):
                raise UnavailableError(f"__cuda_stream__ version {version!r} is not known here; version 0 is")
            handle, owner = number, handle
        opened = open_device(device)
        if owner is None:
            return _named(opened, handle, opened.backend.stream_key(opened.index, handle))
        stream = cls.__new__(cls)
        stream._set(opened, handle, owned=False, owner=owner)
        return stream

    @property
    def lasting(self) -> bool:
        """Whether it is there for as long as the process, as those of the pools are.  Does not touch the device."""
        return self.natives is not None

    @property
    def backend_name(self) -> str:
        """The kind of the device, ``"host"`` or ``"cuda"``.  Does not touch the device."""
        return self.device.kind

    def record(self, event: Event | None = None) -> Event:
        """Enqueues on this stream a record of `event` (one of the device's pool by default) and returns it."""
        device = self.device
        if event is None:
            event = self._events.lease()
        elif event.device is not device:
            raise PlacementError(f"{event!r} belongs to {event.device}; record it on a stream of that device")
        event.version += 1
        device.backend.record_event(device.index, event.handle, self.handle)
        if hooks.listeners:
            hooks.emit(hooks.Recorded(self.key, id(event), event.version))
        return event

    def wait(self, other: Event | Stream | Point, *, edge: str = "") -> None:
        """Enqueues on this stream a wait for an event, for all that is on another stream now, or for a point.

        Waiting for oneself, or for an event that was never recorded, enqueues nothing.  Does not block the host.

        Raises `CaptureError` where a stream that captures a graph would wait for work outside of the capture.  One that
        is outside and waits for work inside becomes part of it.
        """
        if edge and edge in hooks.dropped:
            return
        if isinstance(other, Stream):
            if other.key == self.key:
                return
            other = other.record()
        if isinstance(other, Event):
            if other.version == 0:
                return
            self.device.backend.wait_event(self.device.index, self.handle, other.handle)
            if hooks.listeners:
                hooks.emit(hooks.Waited(self.key, id(other), other.version, edge))
            return
        if not (hasattr(other, "word") and hasattr(other, "value")):
            raise TypeError(f"{other!r} is nothing to wait for; give a Stream (see Stream.borrow), an Event or a Point")
        self.device.backend.wait_word(self.device.index, self.handle, other.word, other.value)
        if hooks.listeners:
            hooks.emit(hooks.Waited(self.key, other.word.address, other.value, edge))

    def wait_by(self, event: Event, other: Stream, *, edge: str = "") -> None:
        """`wait` for all that is on `other`, a stream of the same device, by an event of it that is kept for that.

        Enqueues on `other` a record and on this stream a wait for it.  Does not block the host.
        """
        device = self.device
        if hooks.listeners or hooks.dropped or event.device is not device:
            self.wait(other.record(event), edge=edge)
            return
        event.version += 1
        device.backend.order(device.index, event.handle, other.handle, self.handle)

    def query(self) -> bool:
        """Whether all work on this stream is done.  Does not block the host.

        Raises `DeviceError` after a failure, `CaptureError` while it captures a graph.
        """
        return self.device.backend.query_stream(self.device.index, self.handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host, interruptibly, until all work on it is done.  Raises `TimeoutError`, `DeviceError`,
        `CaptureError` while it captures a graph.
        """
        timeout = None if timeout is None else waitable(timeout)
        if hooks.listeners:
            hooks.emit(hooks.Synchronized("Stream.synchronize"))
        if not self.device.backend.synchronize_stream(self.device.index, self.handle, timeout):
            raise TimeoutError(f"{self!r} was not done after {timeout} s")

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueues on this stream a copy of `nbytes` between two addresses; the caller keeps both alive till then."""
        if nbytes:
            self.device.backend.copy(self.device.index, self.handle, destination, source, nbytes)
            if hooks.listeners:
                hooks.emit(hooks.Copied(self.key, destination, source, nbytes))

    def upload(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueues on this stream a copy of pinned memory to its device, by a copy engine for an even number of bytes,
        however few.  The caller keeps both alive till then.  Does not block the host."""
        if nbytes:
            self.device.backend.upload(self.device.index, self.handle, destination, source, nbytes)
            if hooks.listeners:
                hooks.emit(hooks.Copied(self.key, destination, source, nbytes))

    def zero(self, address: int, nbytes: int) -> None:
        """Enqueues on this stream that `nbytes` at an address of its device become zero; the caller keeps them."""
        if nbytes:
            self.device.backend.zero(self.device.index, self.handle, address, nbytes)
            if hooks.listeners:
                hooks.emit(hooks.Launched(self.key, "zero", (), ((address, nbytes),)))

    def launch(
        self, function: Callable[..., Any], *args: Any, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """Enqueues on this stream what `function(*args)` does; `reads` and `writes` are the arrays that it touches.

        On a GPU the function runs now, with this stream current, and what it launches is enqueued.  On the host backend
        the function itself is queued and runs when its turn comes: under the schedule "eager", the default, that is at
        once, on this thread, where nothing is to be waited for (see `streamrt.testing.schedules`).  Does not block the
        host otherwise.  An error of the function fails the stream, as a kernel's does: its next use tells.
        """
        if not callable(function):
            raise TypeError(f"{function!r} is no function; launch(function, *args, reads=..., writes=...)")
        backend = self.device.backend
        backend.launch(self.device.index, self.handle, function, args, reads, writes)

    @property
    def capturing(self) -> bool:
        """Whether this stream is capturing a graph.  Does not block the host."""
        return self.device.backend.capturing(self.device.index, self.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol, version 0: any library that knows it can use this stream."""
        if self.device.kind != "cuda":
            raise UnavailableError(f"{self!r} is no CUDA stream")
        return (0, self.handle)

    def __reduce__(self) -> NoReturn:
        """A stream is of this process, and has one owner.  Does not touch the device."""
        raise TypeError(
            f"{self!r} can be neither pickled nor copied: it is of this process; make one where it is used, or ask for "
            "streamrt.current_stream(device) there"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<Stream {self.device} #{self.handle:#x} {'owned' if self.owned else 'borrowed'}>"


@functools.lru_cache(maxsize=1024)
def _named(device: Device, handle: int, key: StreamKey) -> Stream:
    """A stream that nobody keeps alive by this name: one object will do for all who borrow it.

    The key tells apart what one handle names in each thread.
    """
    stream = Stream.__new__(Stream)
    stream._set(device, handle, owned=False, owner=None, key=key)
    return stream


class _End:
    """Destroys an owned stream, together with which it is dropped; borrowed ones are made and dropped all the time."""

    __slots__ = ("device", "handle")

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle

    def __del__(self) -> None:
        self.device.backend.destroy_stream(self.device.index, self.handle)
