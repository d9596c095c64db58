"""One direction of shared memory between two processes: a ring of bytes that holds whole messages.

It has one writer and one reader, and no lock (Lamport, "Proving the Correctness of Multiprocess Programs", IEEE
Transactions on Software Engineering 1977).  A line for each of three counters, and `RING_BYTES` of records, lie in a
sealed segment that both ends map::

    +0  tail: bytes that were written        +64  head: bytes that were read        +128  the bell

Each counter has one writer, who goes by its own copy and never reads back what the peer could have changed.  A record
begins at a multiple of 16 and may wrap around the end, but for its head, which says its bytes, its frames, and how many
messages the writer had sent by the socket beside the ring before.  Then come the frames' lengths (u32 each), and the
frames.

*The bell.*  A reader that is about to sleep on the socket stores a number there that it has never used, and looks at
the tail again; while it looks by itself the bell is 0.  A writer stores the tail, then reads the bell: for a number
that it has not rung for it has to write to the socket.  One of them sees the other's store, so no message is slept
through.

*What this relies on*, and why there are no rings elsewhere (`usable`): on x86-64 a load or store of an aligned word is
one access, stores are seen and loads are made in program order, and only a load may overtake an earlier store to
another place (Intel's manual, volume 3, "Memory Ordering"; the stores of one copy may change places, but none comes
after a later store).  So a record lies there before the tail says so, and is read before its place is free.  Where a
load must not overtake a store, between tail and bell, both sides take and leave a lock that nobody else has: that is a
locked compare-and-exchange, a full barrier.  A weakly ordered machine gives plain stores of Python no such order.

A hostile peer may write what it likes at any moment.  So counters and lengths are checked against their bounds, and a
record is copied out once, before anything in it is believed.

Does not touch the device.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
from collections.abc import Sequence

from streamrt.segment import STRIDE, Segment
from transport.links import MAX_FRAMES, Frame

RING_BYTES = 1 << 16
MOST_BYTES = RING_BYTES // 4
"""The largest record: some of them fit, and none keeps the others waiting for long."""
_CONTROL_BYTES = 4 * STRIDE
_RING_STRIDE = _CONTROL_BYTES + RING_BYTES
_TAIL, _HEAD, _BELL = 0, STRIDE // 8, 2 * STRIDE // 8
_GRAIN = 16
_RECORD = struct.Struct("<IIQ")
_HEADS = [struct.Struct(f"<IIQ{count}I") for count in range(MAX_FRAMES + 1)]
_LENGTHS = [struct.Struct(f"<{count}I") for count in range(MAX_FRAMES + 1)]
_WRAP = (1 << 64) - 1


class RingFault(Exception):
    """What lies in the shared memory is no ring: the peer is broken, or hostile."""


def usable() -> bool:
    """Whether this machine orders memory as a ring needs it.  Does not touch the device."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def create() -> Segment:
    """Memory for two rings, one each way.  Does not block the host.

    Raises `OSError` where no descriptor is left, `UnavailableError` where the system has no sealed memory.
    """
    return Segment.create(2 * _RING_STRIDE, "streamrt-ring")


def attach(descriptor: int) -> Segment:
    """Maps what the peer made by `create`; takes the descriptor over.  Does not block the host.

    Raises `ValueError` for what is no such segment, `OSError`.
    """
    segment = Segment.attach(descriptor)
    if segment.nbytes < 2 * _RING_STRIDE:
        segment.close()
        raise ValueError(f"{segment.nbytes} bytes are no two rings")
    return segment


class RingWriter:
    """The end that writes ring `number` (0 or 1) of a segment.  Not thread-safe."""

    def __init__(self, segment: Segment, number: int) -> None:
        self.count = 0
        """Messages that were pushed."""
        self.beside = 0
        """Messages that went by the socket; whoever sends them counts."""
        self._words, self._data = segment.words, segment.view
        self._control, self._records = _places(number)
        self._tail = self._head = 0  # the head as it was seen last: there is at least that much room
        self._rung = 0
        self._fence = threading.Lock()

    def push(self, frames: Sequence[Frame], sizes: Sequence[int]) -> bool:
        """Copies one message in, behind those `beside`; False where it finds no room.

        `sizes` are the frames' bytes.  Ask `claim_bell` afterwards.  Raises `RingFault`.  Does not block the host.
        """
        head = _HEADS[len(sizes)]
        nbytes = head.size + sum(sizes)
        room = nbytes + -nbytes % _GRAIN
        if room > MOST_BYTES:
            return False
        tail = self._tail
        if room > RING_BYTES - ((tail - self._head) & _WRAP) and room > self._room():
            return False
        record = b"".join((head.pack(nbytes, len(sizes), self.beside, *sizes), *frames))
        begin, whole = self._records + tail % RING_BYTES, RING_BYTES - tail % RING_BYTES
        if nbytes <= whole:
            self._data[begin : begin + nbytes] = record
        else:
            self._data[begin : begin + whole] = record[:whole]
            self._data[self._records : self._records + nbytes - whole] = record[whole:]
        self._tail = self._words[self._control + _TAIL] = (tail + room) & _WRAP
        self.count += 1
        self._fence.acquire()  # the bell is read after the tail is seen
        self._fence.release()
        return True

    def _room(self) -> int:
        head = self._words[self._control + _HEAD]
        used = (self._tail - head) & _WRAP
        if used > RING_BYTES or head % _GRAIN:
            raise RingFault(f"the peer says that it has read {head} of {self._tail} bytes of shared memory")
        self._head = head
        return RING_BYTES - used

    def claim_bell(self) -> bool:
        """Whether the reader sleeps and nobody has rung yet: then the caller writes to the socket next.

        Does not block the host.
        """
        bell = self._words[self._control + _BELL]
        if bell in (0, self._rung):
            return False
        self._rung = bell
        return True


class RingReader:
    """The end that reads ring `number` (0 or 1) of a segment.  Not thread-safe, but for `watch` and `rouse`."""

    def __init__(self, segment: Segment, number: int) -> None:
        self.count = 0
        """Messages that were taken."""
        self.beside = 0
        """Messages that came by the socket; whoever takes them counts."""
        self._words, self._data = segment.words, segment.view
        self._control, self._records = _places(number)
        self._head = 0
        self._bell = 0
        self._fence = threading.Lock()
        self._first: list[Frame] | None = None
        self._size = self._before = 0  # of the first message: its bytes here, and what comes before it on the socket

    def watch(self, looks: int) -> bool:
        """Looks at the tail up to so often: whether something lies there.

        Keeps the interpreter, for some 30 ns a look.  Raises `ValueError` once the segment is closed.
        """
        words, index = self._words, self._control + _TAIL
        for _ in range(looks):  # noqa: SIM110 - a generator costs as much again
            if words[index] != self._head:
                return True
        return False

    def take(self) -> list[Frame] | None:
        """The first message, if what comes before it on the socket has come; else None.

        Its frames are copies.  Raises `RingFault`.  Does not block the host.
        """
        if self._first is None:
            tail = self._words[self._control + _TAIL]
            if tail == self._head:
                return None
            self._copy_out((tail - self._head) & _WRAP)
        if self._before != self.beside:
            if self._before < self.beside:
                raise RingFault(f"the peer wrote a message behind {self._before} of the socket, of {self.beside}")
            return None
        frames, self._first = self._first, None
        self._head = self._words[self._control + _HEAD] = (self._head + self._size) & _WRAP
        self.count += 1
        return frames

    def _copy_out(self, there: int) -> None:
        if there > RING_BYTES or there % _GRAIN:
            raise RingFault(f"the peer says that {there} bytes lie in shared memory")
        start = self._head % RING_BYTES
        begin = self._records + start
        nbytes, count, before = _RECORD.unpack_from(self._data, begin)
        if not 1 <= count <= MAX_FRAMES:
            raise RingFault(f"the peer wrote a message of {count} frames")
        offset = _HEADS[count].size
        if not offset <= nbytes <= min(there, MOST_BYTES):
            raise RingFault(f"the peer wrote a message of {nbytes} bytes where {there} lie in shared memory")
        record = self._data[begin : min(begin + nbytes, self._records + RING_BYTES)].tobytes()
        if len(record) < nbytes:
            record += self._data[self._records : self._records + nbytes - len(record)].tobytes()
        lengths = _LENGTHS[count].unpack_from(record, _RECORD.size)  # of the copy: the peer may write on
        if offset + sum(lengths) != nbytes:
            raise RingFault(f"the peer wrote frames of {sum(lengths)} bytes in a message of {nbytes}")
        frames: list[Frame] = []
        for length in lengths:
            frames.append(record[offset : offset + length])
            offset += length
        self._first, self._before, self._size = frames, before, nbytes + -nbytes % _GRAIN

    def rouse(self) -> None:
        """The reader looks by itself from now on: nobody has to ring.  Does not block the host."""
        self._words[self._control + _BELL] = 0

    def doze(self) -> bool:
        """The reader will sleep on the socket: whether it may, for whatever comes from now on is rung for.

        False where `take` has something to do.  Does not block the host.
        """
        self._bell += 1
        self._words[self._control + _BELL] = self._bell
        self._fence.acquire()  # the tail is read after the bell is seen
        self._fence.release()
        if self._first is None:
            return bool(self._words[self._control + _TAIL] == self._head)
        return self._before != self.beside


def _places(number: int) -> tuple[int, int]:
    """Where a ring's counters begin, in words, and its records, in bytes."""
    base = number * _RING_STRIDE
    return base // 8, base + _CONTROL_BYTES
