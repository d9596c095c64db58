"""Staging: the reference path, through pinned host memory and the link's own messages.

Out: device to pinned on the leased stream, chunk by chunk, a few chunks ahead of the link; the agent queries each
chunk's event and hands the chunk to the link.  In: the payload is put into a pinned chunk, and pinned to device is
enqueued on the receiver's leased stream.  So copies and the wire overlap, and no thread waits for either.

Ordinary memory (``cpu``) needs neither pinned memory nor events: its snapshot is sent as it lies.
"""

from __future__ import annotations

import collections
import ctypes

import numpy as np

from streamrt import memory
from streamrt.event import Event
from streamrt.stream import Stream
from streamrt.views import view_of
from transport.channels import Chunk
from transport.pinned import MAX_CHUNK_BYTES, PinnedChunk, pinned_pool

PLAIN_CHUNK_BYTES = 4 << 20  # of ordinary memory, where nothing has to overlap with the wire but the wire
CHUNK_BYTES = 1 << 20  # one large ZeroMQ message is several times slower than many of 0.5 to 4 MiB (bench/links.py)
AHEAD = 4  # chunks between the device and the link: one copying, one ready, two being written


class HostSender:
    """Sends ordinary memory: `view` is the snapshot's bytes."""

    def __init__(self, view: memoryview, holder: object) -> None:
        self._view = view
        self._holder = holder
        self._offset = 0

    @property
    def ready(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._offset >= len(self._view)

    def advance(self) -> Chunk | None:
        if self.finished:
            return None
        offset = self._offset
        self._offset = min(offset + PLAIN_CHUNK_BYTES, len(self._view))
        return offset, self._view[offset : self._offset]

    def abandon(self) -> None:
        """Nothing is enqueued.  Does not touch the device."""


class DeviceSender:
    """Sends device memory at `address`; `stream` is leased and already waits for the snapshot."""

    def __init__(self, address: int, nbytes: int, stream: Stream, holder: object) -> None:
        self._address = address
        self._nbytes = nbytes
        self._stream = stream
        self._holder = holder
        self._copied = 0
        self._in_flight: collections.deque[tuple[int, PinnedChunk, Event]] = collections.deque()
        self._fill()

    @property
    def ready(self) -> bool:
        try:
            return self._in_flight[0][2].query()
        except IndexError:
            return True  # another thread has taken the last one

    @property
    def finished(self) -> bool:
        return self._copied >= self._nbytes and not self._in_flight

    def _fill(self) -> None:
        pool = pinned_pool(self._stream.device.backend)
        while self._copied < self._nbytes and len(self._in_flight) < AHEAD:
            size = min(CHUNK_BYTES, self._nbytes - self._copied)
            chunk = pool.take(size)
            self._stream.copy(chunk.address, self._address + self._copied, size)
            self._in_flight.append((self._copied, chunk, self._stream.record()))
            self._copied += size

    def advance(self) -> Chunk | None:
        if not self._in_flight or not self._in_flight[0][2].query():
            return None
        offset, chunk, _ = self._in_flight.popleft()
        self._fill()
        return offset, chunk.view

    def abandon(self) -> None:
        """Keeps the chunks that the device has yet to write out of the pool until it has.  Does not block the host."""
        while self._in_flight:
            _, chunk, copied = self._in_flight.popleft()
            memory.hold_until([chunk], copied, self._stream)


class HostReceiver:
    """Receives into ordinary memory at `address`; `holder` keeps it."""

    def __init__(self, address: int, nbytes: int, holder: object) -> None:
        self._address = address
        self._nbytes = nbytes
        self._holder = holder
        self._reached = 0

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """Where a payload may be received in place: past all that came, as an honest sender's next chunk is.

        What repeats a range is looked at before it is anywhere near memory that a function may be reading by then.
        Does not block the host.
        """
        if offset < self._reached or offset + nbytes > self._nbytes:
            return None
        self._reached = offset + nbytes
        return view_of(self._address + offset, nbytes, self._holder)

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        self._reached = max(self._reached, offset + len(payload))
        source = _pointer(payload)
        if source != self._address + offset:
            ctypes.memmove(self._address + offset, source, len(payload))

    @property
    def drained(self) -> bool:
        return True

    def abandon(self) -> None:
        """Nothing is enqueued.  Does not touch the device."""


class DeviceReceiver:
    """Receives into device memory at `address`; pulls are enqueued on `stream`, which is leased."""

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        self._address = address
        self._nbytes = nbytes
        self._stream = stream
        self._reserved: dict[int, PinnedChunk] = {}
        self._reached = 0
        self._in_flight: collections.deque[tuple[PinnedChunk, Event]] = collections.deque()

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """Where a payload may be received in place.  Does not block the host but for the first use of pinned memory."""
        if offset < self._reached or offset + nbytes > self._nbytes or nbytes > MAX_CHUNK_BYTES:
            return None
        self._reached = offset + nbytes
        chunk = pinned_pool(self._stream.device.backend).take(nbytes)
        self._reserved[chunk.address] = chunk
        return chunk.view

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        source, size = _pointer(payload), len(payload)
        self._reached = max(self._reached, offset + size)
        chunk = self._reserved.pop(source, None)
        if chunk is not None:
            self._copy(offset, chunk, size)
            return
        for start in range(0, size, MAX_CHUNK_BYTES):
            part = min(MAX_CHUNK_BYTES, size - start)
            chunk = pinned_pool(self._stream.device.backend).take(part)
            ctypes.memmove(chunk.address, source + start, part)
            self._copy(offset + start, chunk, part)

    def _copy(self, offset: int, chunk: PinnedChunk, nbytes: int) -> None:
        self._stream.copy(self._address + offset, chunk.address, nbytes)
        self._in_flight.append((chunk, self._stream.record()))

    @property
    def drained(self) -> bool:
        """Whether every copy has run, so that the pinned chunks may be reused.  Does not block the host."""
        while self._in_flight and self._in_flight[0][1].query():
            self._in_flight.popleft()
        return not self._in_flight

    def abandon(self) -> None:
        """Keeps the chunks that the device has yet to read out of the pool until it has.  Does not block the host."""
        while self._in_flight:
            chunk, copied = self._in_flight.popleft()
            memory.hold_until([chunk], copied, self._stream)


def _pointer(payload: memoryview | bytes) -> int:
    return int(np.frombuffer(payload, np.uint8).__array_interface__["data"][0])
