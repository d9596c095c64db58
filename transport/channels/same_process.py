"""Both ends in one process: the snapshot itself is handed over, under the same rules as between processes.

A handle of CUDA IPC cannot be opened by the process that made it, and nothing has to leave it: the receiver's leased
stream waits for the snapshot's events and copies once more only where the device differs.  The callee gets memory of
its own in any case, so what it writes never shows at the caller (pytorch#50674).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

from streamrt import memory
from streamrt.device import CPU, Device
from streamrt.errors import LifetimeError
from streamrt.event import Event, event_pool
from streamrt.stream import Stream
from transport.channels import Chunk, Source
from transport.lend import Lent

_numbers = itertools.count(1)
_handed: dict[int, tuple[Source, object]] = {}
_lock = threading.Lock()


class HandOver:
    """The sending half: one descriptor, the number under which the snapshot waits."""

    def __init__(self, snapshot: Source) -> None:
        self._snapshot: Source | None = snapshot

    @property
    def finished(self) -> bool:
        return self._snapshot is None

    def advance(self) -> Chunk | None:
        if self._snapshot is None:
            return None
        number = next(_numbers)
        with _lock:
            _handed[number] = (self._snapshot, _reader(self._snapshot))
        self._snapshot = None
        return 0, number.to_bytes(8, "little")

    def abandon(self) -> None:
        """Nothing is enqueued.  Does not touch the device."""


class Taker:
    """The receiving half, and the memory that it receives into."""

    def __init__(self, device: Device, nbytes: int, stream: Stream | None) -> None:
        self.device = device
        self._nbytes = nbytes
        self._stream = stream
        self._memory: Any = None
        self._reading: object = None  # what must stay as it is until the copy has run
        self._copied: Event | None = None

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """None: what comes is a descriptor.  Does not touch the device."""
        return None

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        with _lock:
            handed = _handed.pop(int.from_bytes(bytes(payload), "little"), None)
        if handed is None:
            raise LifetimeError("the sender has given up what it handed over, or it was taken already")
        snapshot, reader = handed
        source = snapshot.info.device
        if self._stream is not None:
            if snapshot.event is not None:
                self._stream.wait(snapshot.event, edge="pull.wait")
            self._memory = memory.allocate(self.device, self._nbytes, self._stream)
            self._stream.copy(self._memory.address, snapshot.info.address, self._nbytes)
            snapshot.buffer.use(self._stream)
            if reader is not None or not source.has_streams:
                # Lent memory may be written again, and no stream holds ordinary memory: the transfer holds both.
                self._reading = (snapshot, reader)
                self._copied = self._stream.record(event_pool(self.device).lease())
        elif source == CPU:
            self._memory = memory.allocate(CPU, self._nbytes)  # a copy: what is lent is the caller's own
            ctypes.memmove(self._memory.address, snapshot.info.address, self._nbytes)
        else:
            raise LifetimeError(f"same_process cannot bring {source} to cpu; staging does")

    @property
    def address(self) -> int:
        return int(self._memory.address)

    def holder(self) -> object:
        """What keeps the memory alive.  Does not touch the device."""
        return self._memory.holder()

    @property
    def drained(self) -> bool:
        if self._copied is not None and self._copied.query():
            self._reading = self._copied = None
        return self._copied is None

    def abandon(self) -> None:
        """Keeps what the copy has yet to read until it has.  Does not block the host."""
        if self._copied is not None and self._stream is not None:
            memory.hold_until([self._reading], self._copied, self._stream)
            self._reading = self._copied = None


def _reader(snapshot: Source) -> object:
    return snapshot.reader() if isinstance(snapshot, Lent) else None


def taken(descriptor: bytes) -> bool:
    """Whether nobody can take what was handed over under the descriptor any more.  Does not touch the device."""
    return int.from_bytes(descriptor, "little") not in _handed


def discard(descriptor: memoryview | bytes) -> None:
    """Nobody will take what was handed over under the descriptor.  Does not touch the device.  Idempotent."""
    with _lock:
        _handed.pop(int.from_bytes(bytes(descriptor), "little"), None)
