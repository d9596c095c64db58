"""Exported memory: where the snapshots of one connection are taken, so that its peer can read them in place.

One sealed segment a connection and direction: its first part holds the words of the lease slots, the rest is cut into
blocks.  The peer maps it once, and sees nothing but what was sent to it.  Pages are taken from the system as blocks are
first written, and kept: on most machines the first touch of a page costs more than a copy of its bytes.

A block is free again when its slot is released (the peer wrote the generation into the word) *and* nobody here holds it
any more, which `streamrt.buffers` says once the copy into it has run.  Words are read at allocations only: nobody polls
for an array that the peer's user keeps.  Finalisers only append to a queue.
"""

from __future__ import annotations

import bisect
import collections
import struct
import threading

from streamrt.device import Block
from streamrt.errors import StreamrtError
from streamrt.segment import STRIDE, Segment, Word
from transport.errors import RemoteProtocolError
from transport.lease import LeaseSlot, SlotTable

SLOTS = 4096
HEADER_BYTES = (SLOTS + 1) * STRIDE + -(SLOTS + 1) * STRIDE % 4096
"""Word 0 says that the peer has mapped the segment, the others are the slots'."""
GRAIN = 4096
MAX_SEGMENT_BYTES = 1 << 30
MOST_BYTES = MAX_SEGMENT_BYTES - HEADER_BYTES
DEFAULT_EXPORT_LIMIT = 4 << 30
DESCRIPTOR = struct.Struct("<IIQQQ")
"""What names a block to the peer: its memory's number, slot, generation, offset, bytes."""
_LOOKS = 16  # slots that one allocation looks at: those held for long must not make the others dear


_lock = threading.Lock()
_taken_bytes = 0
_export_limit = DEFAULT_EXPORT_LIMIT


def set_export_limit(nbytes: int) -> int:
    """Sets how many bytes this process may export to all its peers, in memory that is kept for the next message.

    Past it arrays are copied through the links.  Returns the limit before; 0 switches sharing off.  Does not touch the
    device.
    """
    global _export_limit
    if nbytes < 0:
        raise ValueError(f"export_limit={nbytes} is negative")
    previous, _export_limit = _export_limit, nbytes
    return previous


def _take(nbytes: int) -> bool:
    global _taken_bytes
    with _lock:
        if nbytes > 0 and _taken_bytes + nbytes > _export_limit:
            return False
        _taken_bytes += nbytes
        return True


def word_of(segment: Segment, slot: int) -> Word:
    """The word of a slot.  Does not touch the device."""
    return Word(segment, (slot + 1) * STRIDE, 64)


class Export:
    """One block: lives as long as somebody here holds it, and beyond that until the peer has released it."""

    __slots__ = ("_exports", "_segment", "given", "nbytes", "offset", "slot")

    def __init__(self, exports: Exports, segment: Segment, offset: int, nbytes: int, slot: LeaseSlot) -> None:
        self._exports = exports
        self._segment = segment  # mapped as long as anybody may write to the block, also past the connection's end
        self.offset = offset
        self.nbytes = nbytes
        self.slot = slot
        self.given = False  # to the peer, who then releases it

    def give(self, nbytes: int) -> bytes:
        """The descriptor for the peer, who owns the block's slot from now on.  Does not touch the device."""
        self.given = True
        return DESCRIPTOR.pack(0, self.slot.word, self.slot.generation, self.offset, nbytes)

    def take_back(self) -> None:
        """The peer has declined it and will not write its word.  Does not touch the device."""
        self.given = False

    def __del__(self) -> None:
        self._exports.dropped.append((self.offset, self.nbytes, self.slot, self.given))


class Exports:
    """The exported memory of one connection.  Thread-safe; nothing here blocks the host but for its own short lock."""

    def __init__(self, limit: int = MOST_BYTES) -> None:
        """`limit`: bytes of this connection's blocks.  Takes no memory before the first block is asked for."""
        self.dropped: collections.deque[tuple[int, int, LeaseSlot, bool]] = collections.deque()
        self.announced = False
        """Whether the segment's descriptor went to the peer."""
        self._limit = min(limit, MOST_BYTES) // GRAIN * GRAIN
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._gaps: list[tuple[int, int]] = []  # (offset, bytes), in order, never touching each other
        self._slots = SlotTable(SLOTS)
        self._touched = HEADER_BYTES
        self._out: collections.deque[tuple[int, int, LeaseSlot]] = collections.deque()
        self._refused = self._limit <= 0

    @property
    def fd(self) -> int:
        """The segment's descriptor, -1 where there is none.  Does not touch the device."""
        return -1 if self._segment is None else self._segment.fd

    @property
    def opened(self) -> bool:
        """Whether the peer has mapped the segment: from then on it can open every block.  Does not touch the device."""
        return self._segment is not None and Word(self._segment, 0, 64).load() != 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are not free.  Does not touch the device."""
        with self._lock:
            self._collect(len(self._out) + len(self.dropped))
            free = sum(nbytes for _, nbytes in self._gaps)
            return 0 if self._segment is None else self._segment.nbytes - HEADER_BYTES - free

    @property
    def touched_bytes(self) -> int:
        """Where the highest block so far has ended: what the system may have given.  Does not touch the device."""
        return self._touched - HEADER_BYTES

    def allocate(self, nbytes: int) -> Block | None:
        """A block of `nbytes`, page-aligned, that the peer can map; None where there is no room, or after `refuse`.

        Does not touch the device; does not block the host.
        """
        size = -(-nbytes // GRAIN) * GRAIN
        with self._lock:
            if self._refused or size > self._limit or not self._make():
                return None
            self._collect(_LOOKS)
            at = self._gap(size)
            if at is None:
                self._collect(len(self._out) + len(self.dropped))
                at = self._gap(size)
            if at is None or self._segment is None:
                return None
            offset, room = self._gaps[at]
            growth = max(0, offset + size - self._touched)
            if not _take(growth):
                return None
            self._touched += growth
            slot = self._slots.lease()
            if slot is None:
                return None
            self._gaps[at : at + 1] = [(offset + size, room - size)] if room > size else []
            return Block(self._segment.address + offset, nbytes, Export(self, self._segment, offset, size, slot))

    def refuse(self) -> None:
        """Gives no more blocks: the peer cannot open them, or the connection has ended.  Does not touch the device."""
        with self._lock:
            self._refused = True

    def close(self) -> None:
        """The connection has ended: unmaps as soon as nobody here holds a block; no byte is used again.  Idempotent."""
        with self._lock:
            self._refused = True
            self._segment = None
            _take(HEADER_BYTES - self._touched)
            self._touched = HEADER_BYTES
            self._gaps.clear()
            self._out.clear()

    def _make(self) -> bool:
        if self._segment is None:
            try:
                self._segment = Segment.create(self._limit + HEADER_BYTES, "streamrt-exports")
            except (StreamrtError, OSError):  # no memfd here, or no room for the mapping: staging serves
                self._refused = True
                return False
            self._gaps = [(HEADER_BYTES, self._segment.nbytes - HEADER_BYTES)]
        return True

    def _gap(self, size: int) -> int | None:
        """The first gap that is large enough: low memory is the memory that was touched already."""
        return next((at for at, (_, room) in enumerate(self._gaps) if room >= size), None)

    def _collect(self, looks: int) -> None:
        """Takes back what was dropped, and of what is out as much as `looks` slots show to be released."""
        while self.dropped:
            offset, nbytes, slot, given = self.dropped.popleft()
            if given:
                self._out.append((offset, nbytes, slot))
                looks += 1
            else:
                self._slots.observe(slot.word, slot.generation)
                self._free(offset, nbytes)
        if self._segment is None:
            return
        try:
            for _ in range(min(looks, len(self._out))):
                offset, nbytes, slot = self._out.popleft()
                if self._slots.observe(slot.word, word_of(self._segment, slot.word).load()):
                    self._free(offset, nbytes)
                else:
                    self._out.append((offset, nbytes, slot))
        except RemoteProtocolError:  # a peer that writes what was never leased harms itself only
            self._refused = True

    def _free(self, offset: int, nbytes: int) -> None:
        at = bisect.bisect(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + nbytes:
            nbytes += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            at -= 1
            before = self._gaps.pop(at)
            offset, nbytes = before[0], before[1] + nbytes
        self._gaps.insert(at, (offset, nbytes))
