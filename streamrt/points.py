"""Ready points: when a value's arrays are there, by device, and what it takes to use them.

Points are recorded where a value is completed and waited for where it is used; between the two no stream is held up.
A stream that waits is also a *use* of the arrays' memory (`streamrt.buffers`), so they may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from streamrt import hooks
from streamrt.buffers import buffer_uses, drain, hold, memory_uses, much_to_drain
from streamrt.device import Device, StreamKey
from streamrt.errors import ArrayError, CaptureError, PlacementError
from streamrt.event import Event
from streamrt.guard import current_streams
from streamrt.libraries import Library, library_of
from streamrt.libraries.nesting import find_arrays
from streamrt.pool import stream_pool
from streamrt.seconds import remaining
from streamrt.stream import Stream

WAIT_EDGE = "future.wait"
JOINED = ("jax", "numba")  # their arrays are ready at an event or on a stream of their own, not on a current stream


class _Array(NamedTuple):
    """An array of a value; `address` is 0 where it is not known, as for what cannot travel but can be waited for."""

    array: Any
    library: Library
    device: Device
    address: int
    nbytes: int

    @classmethod
    def of(cls, array: Any) -> _Array | None:
        library = library_of(array)
        if library is None:
            return None
        try:
            info = library.describe(array)
        except ArrayError:  # a tensor that requires grad, for instance
            return cls(array, library, library.device_of(array), 0, 0)
        address = info.address
        return cls(array, library, info.device if address else library.device_of(array), address, info.nbytes)


def note_uses(value: object, stream: Stream, *, owner: Stream | None) -> None:
    """Keeps the memory of a value's arrays on the stream's device, and of all views of them, until what `stream` does
    with it is complete.

    It was allocated on `owner`, as far as that is known; see `streamrt.memory.use`.  Does not block the host.
    """
    for array in find_arrays(value):
        found = _Array.of(array)
        if found is None or found.device is not stream.device:
            continue
        if not memory_uses(found.address, stream):
            hold(found.library.retain(found.array, stream), stream, nbytes=found.nbytes, owner=owner)
    drain(bound=True)


class ReadyPoints:
    """The events of a value, by device, and its arrays."""

    __slots__ = ("arrays", "events", "on_host", "recorded")

    def __init__(self) -> None:
        """No array, no event: a value that is ready.  Does not touch the device."""
        self.arrays: list[_Array] = []
        self.events: dict[Device, list[Event]] = {}
        self.recorded: set[StreamKey] = set()
        self.on_host = False  # plain code can touch some of the memory, so that showing it is a host access

    @classmethod
    def of(cls, value: object, streams: Iterable[Stream] | None, allowed: frozenset[Device] | None) -> ReadyPoints:
        """Finds the arrays of a value and enqueues, per device, a record on the streams on which it was completed.

        These are `streams` where they are given for the device, else the calling thread's current ones.  Arrays of
        libraries with no current stream are joined on a leased stream.  Does not block the host.  Raises
        `PlacementError`, naming both sets, when the value is on a device outside `allowed`; `CaptureError` when one of
        the streams captures a graph; whatever the search of the value raises.
        """
        points = cls()
        used: dict[Device, None] = {}
        for array in find_arrays(value):
            found = _Array.of(array)
            if found is not None and found.device.has_streams:
                points.arrays.append(found)
                used[found.device] = None
        given: dict[Device, list[Stream]] = {}
        for stream in streams or ():
            given.setdefault(stream.device, []).append(stream)
        if allowed is not None and not allowed.issuperset(used):
            raise misplaced(used, allowed)
        for device in used | given:
            points._record(device, given.get(device) or current_streams(device))
        if much_to_drain():
            drain()
        return points

    def _record(self, device: Device, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if stream.capturing:
                raise CaptureError(
                    f"{stream!r} captures a graph, and a future cannot be part of one; complete it after it"
                )
        events = self.events.setdefault(device, [])
        for stream in streams:
            events.append(stream.record())
            self.recorded.add(stream.key)
        joined = []
        for found in self.arrays:
            if found.device is device:
                for stream in streams:
                    buffer_uses(found.address, stream)
                if found.library.name in JOINED:
                    joined.append(found)
        if joined:
            with stream_pool(device, "caller").lease() as lease:
                for found in joined:
                    found.library.join(found.array, lease.stream)
                events.append(lease.stream.record())
        self.on_host |= device.kind == "host"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the value.  Does not touch the device."""
        return tuple(self.events)

    def order(self) -> None:
        """Enqueues waits on the calling thread's current streams of each device.  Does not block the host."""
        for device in self.events:
            for stream in current_streams(device):
                self.order_on(stream)

    def order_on(self, stream: Stream) -> None:
        """Enqueues on `stream` waits for what is ready on its device, and notes the use.  Does not block the host."""
        device = stream.device
        for event in self.events.get(device, ()):
            stream.wait(event, edge=WAIT_EDGE)
        if stream.key in self.recorded:
            return
        for found in self.arrays:
            if found.device is device and not buffer_uses(found.address, stream):
                hold(found.array, stream, nbytes=found.nbytes)

    def require(self, deadline: float | None = None) -> None:
        """Before plain code touches the value.  Blocks the host on the host backend only, which runs what it takes.

        Raises `TimeoutError` at the deadline (of `time.monotonic`).
        """
        if WAIT_EDGE in hooks.dropped:
            return
        for device, events in self.events.items():
            if device.kind != "host":
                continue
            for event in events:
                if deadline is None:
                    event.require()
                elif not device.backend.synchronize_event(device.index, event.handle, remaining(deadline)):
                    raise TimeoutError(f"the value was not ready on {device} in time")

    def host_ready(self) -> bool:
        """Whether plain code may touch what is on the host backend.  Does not block the host."""
        if WAIT_EDGE in hooks.dropped:
            return True
        for device, events in self.events.items():
            if device.kind == "host":
                for event in events:
                    if not event.query():
                        return False
        return True

    def query(self) -> bool:
        """Whether the value is there.  Does not block the host."""
        for events in self.events.values():
            for event in events:
                if not event.query():
                    return False
        return True

    def synchronize(self, deadline: float | None) -> None:
        """Blocks the host until the value is there.  Raises `TimeoutError` at the deadline."""
        for events in self.events.values():
            for event in events:
                event.synchronize(None if deadline is None else remaining(deadline))


NO_POINTS = ReadyPoints()
"""Of all values that are ready; never changed."""


def names(devices: Iterable[Device]) -> str:
    """A set of devices as messages show it.  Does not touch the device."""
    return "{" + ", ".join(sorted(map(str, devices))) + "}"


def misplaced(used: Iterable[Device], allowed: Iterable[Device]) -> PlacementError:
    """The error of a value on a device that its future does not allow.  Does not touch the device."""
    return PlacementError(
        f"the value is on {names(used)}, and this future allows {names(allowed)} only; move the value, or name all its "
        "devices in devices="
    )
