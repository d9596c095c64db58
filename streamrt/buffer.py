"""One buffer of the runtime: the memory, the stream that it was allocated on, and who uses it.

What happens when it is dropped is the business of `streamrt.buffers`: the finaliser here only says that it was.
"""

from __future__ import annotations

from collections import deque

from streamrt.device import Block, Device, StreamKey
from streamrt.errors import PlacementError
from streamrt.event import Event
from streamrt.stream import Stream
from streamrt.views import view_of


class Record:
    """What must outlive a buffer: its block and who uses it."""

    __slots__ = ("block", "device", "ready", "snapshot", "stream", "uses")

    def __init__(self, block: Block, device: Device, stream: Stream | None, *, snapshot: bool) -> None:
        self.block = block
        self.device = device
        self.stream = stream
        self.snapshot = snapshot
        self.ready: Event | None = None
        self.uses: dict[StreamKey, Stream] = {}


dead_records: deque[Record] = deque()


class Buffer:
    """Memory of the runtime: one record of block, device, allocation stream, uses and ready event.

    An array over it keeps the buffer itself alive (`holder`), so the last alias that dies ends it.

    `block` is the memory as it was given, `address` where it starts, `nbytes` how many bytes were asked for; `device`
    says where it is, and `stream` on which it was allocated (None for ordinary memory).
    """

    __slots__ = ("__weakref__", "_record", "address", "block", "device", "nbytes", "stream")

    def __init__(self, record: Record) -> None:
        """Made by `streamrt.memory.allocate`.  Does not touch the device."""
        self._record = record
        self.block = block = record.block
        self.address, self.nbytes = block.address, block.nbytes
        self.device, self.stream = record.device, record.stream

    @property
    def ready(self) -> Event | None:
        """The event after which the contents are there, if anybody has said so.  Does not touch the device."""
        return self._record.ready

    @ready.setter
    def ready(self, event: Event) -> None:
        self._record.ready = event

    def use(self, stream: Stream) -> None:
        """Says that `stream` works on it, now or until the buffer is dropped.  Does not touch the device."""
        self._record.uses[stream.key] = stream

    def holder(self) -> object:
        """What an array over this memory keeps alive (`Library.wrap(..., holder=)`).  Does not touch the device."""
        return self

    def host_view(self) -> memoryview:
        """The bytes, for the host backend and ordinary memory; a view keeps the buffer alive.

        Does not touch the device: the caller has waited.
        """
        if self.device.kind == "cuda":
            raise PlacementError(f"the host cannot read {self!r}; copy it to pinned memory first")
        return view_of(self.address, self.nbytes, self)

    def __repr__(self) -> str:
        return f"<Buffer {self.device} {self.address:#x} {self.nbytes} bytes>"

    def __del__(self, dead: deque[Record] = dead_records) -> None:  # bound here: globals go first when the process ends
        record = getattr(self, "_record", None)
        if record is not None:
            dead.append(record)
