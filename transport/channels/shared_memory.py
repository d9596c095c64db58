"""Two processes of one host: the snapshot lies in memory that both map, and a descriptor says where.

In *host order* the sender's agent reads the snapshot's event and only then gives the descriptor, so no stream ever
waits for a peer.  In *stream order* the descriptor names a signal that is enqueued behind the snapshot (`signals`) and
goes at once; the receiver's leased stream waits for it before it pulls (`waits`).  In ordinary memory the receiver's
array *is* that memory: one copy each way, the snapshot's.  A virtual device copies it into memory of its own on the
leased stream.  Either way the slot is released by a word, by the receiver's last use (`transport.channels.imports`).
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrt import hooks, memory
from streamrt.buffer import Buffer
from streamrt.device import Device
from streamrt.event import Event
from streamrt.stream import Stream
from streamrt.timeline import Point
from transport.channels import Chunk, OpenError, Source
from transport.channels.exports import Export
from transport.channels.imports import Imports, lent, ordered, signal_of
from transport.channels.signals import Signal
from transport.channels.waits import Named, Waits, guard

READY_EDGE = "share.ready"


def export_of(source: Source) -> Export | None:
    """The exported block in which a snapshot lies, None if it lies elsewhere.  Does not touch the device."""
    owner = source.buffer.block.owner if isinstance(source, memory.Snapshot) else getattr(source, "export", None)
    return owner if isinstance(owner, Export) else None


def exported(sources: Sequence[Source]) -> list[bool]:
    """Which sources can go by descriptor.  One block goes once: two arrays of a message never share memory."""
    seen: set[int] = set()
    result = []
    for source in sources:
        export = export_of(source)
        result.append(export is not None and id(export) not in seen)
        seen.add(id(export))
    return result


def has_run(event: Event | None) -> bool:
    """Whether a snapshot's copy has run, so that its descriptor may go.  Does not block the host."""
    return event is None or READY_EDGE in hooks.dropped or event.query()


class Sharer:
    """The sending half: one descriptor, once the snapshot's copy has run, or at once with the `signal` behind it."""

    def __init__(self, export: Export, nbytes: int, event: Event | None, signal: Signal | None = None) -> None:
        self._export: Export | None = export
        self._nbytes = nbytes
        self._event = event
        self._signal = signal

    @property
    def ready(self) -> bool:
        return self._signal is not None or has_run(self._event)

    @property
    def finished(self) -> bool:
        return self._export is None

    def advance(self) -> Chunk | None:
        if self._export is None:
            return None
        if not self.ready:
            return None
        descriptor = self._export.give(self._nbytes, b"" if self._signal is None else self._signal.packed)
        self._export = None
        return 0, descriptor

    def abandon(self) -> None:
        """Nothing is enqueued but the snapshot itself.  Does not touch the device."""


class Opener:
    """The receiving half, and the memory in which the data are."""

    def __init__(
        self,
        device: Device,
        nbytes: int,
        stream: Stream | None,
        imports: Imports | None,
        *,
        borrow: bool = False,
        waits: Waits | None = None,
    ) -> None:
        """Takes memory of the device where that is not ordinary memory, nor to be read in place (`borrow`).  `waits`
        are those for the peer's signals.

        Does not block the host.
        """
        self.device = device
        self._nbytes = nbytes
        self._stream = stream
        self._imports = imports
        self._waits = waits
        self.point: Point | None = None
        """The peer's point behind which the bytes are there, in stream order."""
        self._buffer: Buffer | None = None if stream is None or borrow else memory.allocate(device, nbytes, stream)
        self._copied: Event | None = None

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """None: what comes is a descriptor.  Does not touch the device."""
        return None

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        if self._imports is None:
            raise OpenError("no memory is shared on this connection")
        signal = Named.read(signal_of(payload)) if ordered(payload) else None
        if signal is not None:
            if self._stream is None or self._waits is None:
                raise OpenError("no stream here can wait for the peer's signal")
            self._waits.check(self._stream.device, signal)  # before the block is taken: who declines writes no slot
        opened = self._imports.open(payload, self._nbytes, self.device)
        if self._stream is not None:
            opened.use(self._stream)
            if signal is not None and self._waits is not None:
                self.point = self._waits.wait(self._stream, signal)
        if self._stream is None or self._buffer is None:
            self._buffer = opened
        else:
            self._stream.copy(self._buffer.address, opened.address, self._nbytes)
            if lent(payload):
                self._copied = self._stream.record()
        if self.point is not None:
            guard(self.point, self._buffer)

    @property
    def address(self) -> int:
        return self._memory().address

    def holder(self) -> object:
        """What keeps the memory alive.  Does not touch the device."""
        return self._memory().holder()

    def _memory(self) -> Buffer:
        if self._buffer is None:
            raise OpenError("the buffer was not opened")
        return self._buffer

    @property
    def drained(self) -> bool:
        """Whether nobody waits for the copy: what it reads is held by its buffer.  Does not block the host."""
        return self._copied is None or self._copied.query()

    def abandon(self) -> None:
        """Nothing to hold, see `drained`.  Does not touch the device."""
