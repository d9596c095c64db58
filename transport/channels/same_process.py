"""Both ends in one process: the snapshot itself is handed over, under the same rules as between processes.

A handle of CUDA IPC cannot be opened by the process that made it, and nothing has to leave it: the receiver's leased
stream waits for the snapshot's events and copies once more only where the device differs.  The callee gets memory of
its own in any case, so what it writes never shows at the caller (pytorch#50674).

A descriptor gives access to this process's memory, so it is worth nothing by itself: it can only be taken by the end
for which it was made (`transport.channels.ends`), and by a buffer of the same size and source.
"""

from __future__ import annotations

import secrets
import sys
import threading
from typing import Any

from streamrt import forks, memory
from streamrt.device import CPU, Device
from streamrt.errors import LifetimeError
from streamrt.event import Event
from streamrt.moves import move
from streamrt.stream import Stream
from transport.channels import Chunk, Source
from transport.lend import Lent

_DESCRIPTOR_BYTES = 16
_handed: dict[bytes, tuple[str, Source, object]] = {}  # for which end, what, and what keeps it from being written
_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock, _handed=dict)


class HandOver:
    """The sending half: one descriptor, random, under which the snapshot waits for the end whose token is `to`."""

    def __init__(self, snapshot: Source, to: str) -> None:
        self._snapshot: Source | None = snapshot
        self._to = to

    @property
    def ready(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._snapshot is None

    def advance(self) -> Chunk | None:
        if self._snapshot is None:
            return None
        descriptor = secrets.token_bytes(_DESCRIPTOR_BYTES)
        with _lock:
            _handed[descriptor] = (self._to, self._snapshot, _reader(self._snapshot))
        self._snapshot = None
        return 0, descriptor

    def abandon(self) -> None:
        """Nothing is enqueued.  Does not touch the device."""


class Taker:
    """The receiving half of the end whose token is `end`, and the memory that it receives into.

    `source` is the device that the message's header names.
    """

    def __init__(self, device: Device, nbytes: int, stream: Stream | None, end: str, source: Device) -> None:
        self.device = device
        self._end = end
        self._source = source
        self._nbytes = nbytes
        self._stream = stream
        self._memory: Any = None
        self._reading: object = None  # what must stay as it is until the copy has run
        self._copied: Event | None = None

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """None: what comes is a descriptor.  Does not touch the device."""
        return None

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        snapshot, reader = _take(bytes(payload), self._end)
        source = snapshot.info.device
        named = CPU if source == CPU and self._source.kind == "host" else self._source  # plain code's host device
        if snapshot.info.nbytes != self._nbytes or source != named:
            raise LifetimeError(
                f"{self._nbytes} bytes of {self._source} were announced, and {snapshot.info.nbytes} of {source} came"
            )
        if self._stream is not None:
            if snapshot.event is not None:
                self._stream.wait(snapshot.event, edge="pull.wait")
            self._memory = memory.allocate(self.device, self._nbytes, self._stream)
            self._stream.copy(self._memory.address, snapshot.info.address, self._nbytes)
            snapshot.buffer.use(self._stream)
            if reader is not None or not source.has_streams:
                # Lent memory may be written again, and no stream holds ordinary memory: the transfer holds both.
                self._reading = (snapshot, reader)
                self._copied = self._stream.record()
        elif source == CPU:
            self._memory = memory.allocate(CPU, self._nbytes)  # a copy: what is lent is the caller's own
            move(self._memory.address, snapshot.info.address, self._nbytes)
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


def _take(descriptor: bytes, end: str) -> tuple[Source, object]:
    with _lock:
        handed = _handed.get(descriptor)
        if handed is None or not end or handed[0] != end:
            raise LifetimeError("what was handed over was given up, or taken already, or is another connection's")
        del _handed[descriptor]
    return handed[1], handed[2]


def taken(descriptor: bytes) -> bool:
    """Whether nobody can take what was handed over under the descriptor any more.  Does not touch the device."""
    return descriptor not in _handed


def discard(descriptor: memoryview | bytes, end: str) -> None:
    """The end will not take what was handed over to it.  Does not touch the device.  Idempotent."""
    with _lock:
        handed = _handed.get(bytes(descriptor))
        if handed is not None and handed[0] == end:
            del _handed[bytes(descriptor)]
