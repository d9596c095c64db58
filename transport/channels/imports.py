"""Imported memory: the peer's export segment, mapped once, and its blocks as buffers of ours.

What comes from the wire is checked before it is used: the segment is a sealed memfd, a block lies inside it, past its
words.  Whatever a peer claims, it can only make us read memory that it gave us.

A block is a buffer of the runtime (`streamrt.buffers`): when the last array over it has died and the streams that used
it are done, its slot's word is written, and that is all.  The mapping lives as long as the connection or any array.
"""

from __future__ import annotations

import struct

from streamrt import buffers
from streamrt.buffer import Buffer
from streamrt.device import CPU, Block
from streamrt.errors import LifetimeError
from streamrt.segment import Segment, Word
from transport.channels import OpenError
from transport.channels.exports import DESCRIPTOR, GRAIN, HEADER_BYTES, SLOTS, word_of


class _Lease:
    """Writes a slot's word when it dies: a plain store, allowed anywhere."""

    __slots__ = ("_generation", "_word")

    def __init__(self, word: Word, generation: int) -> None:
        self._word = word
        self._generation = generation

    def __del__(self, closed: type[Exception] = LifetimeError) -> None:
        try:
            self._word.store(self._generation)
        except closed:
            return  # the process ends: the mapping went first


class Imports:
    """The memory that one peer has exported to us.  Used under the connection's lock.  Does not block the host."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self.failure = ""

    def attach(self, fd: int) -> None:
        """Maps the peer's segment; takes the descriptor over.  What cannot be mapped shows at `open`."""
        try:
            segment = Segment.attach(fd)
        except (ValueError, OSError) as error:
            self.failure = self.failure or str(error)
            return
        if self._segment is not None or segment.nbytes <= HEADER_BYTES:
            self.failure = self.failure or "the peer sent a second segment, or one without room"
            segment.close()
            return
        self._segment = segment
        Word(segment, 0, 64).store(1)

    def open(self, descriptor: memoryview | bytes, nbytes: int) -> Buffer:
        """The block that a descriptor names, of `nbytes`, as a buffer of ordinary memory, which it then leases.

        Does not touch the device.  Raises `OpenError` for what was not exported to us.
        """
        segment, slot, generation, offset, size = self._read(descriptor)
        inside = HEADER_BYTES <= offset <= segment.nbytes and size <= segment.nbytes - offset
        if not inside or offset % GRAIN or size != nbytes:
            raise OpenError(f"{size} bytes at {offset} are no block of the peer's {segment!r} for {nbytes} bytes")
        lease = _Lease(word_of(segment, slot), generation)
        return buffers.adopt(Block(segment.address + offset, nbytes, lease), CPU)

    def release(self, descriptor: memoryview | bytes) -> None:
        """Nobody will open what a descriptor names.  Does not touch the device."""
        try:
            segment, slot, generation, _, _ = self._read(descriptor)
        except OpenError:
            return
        word_of(segment, slot).store(generation)

    def close(self) -> None:
        """The connection has ended: unmaps once no array lives there.  Idempotent.  Does not touch the device."""
        self._segment = None
        self.failure = self.failure or "the connection has ended"

    def _read(self, descriptor: memoryview | bytes) -> tuple[Segment, int, int, int, int]:
        if self._segment is None:
            raise OpenError(f"the peer's memory is not mapped here: {self.failure or 'its descriptor did not come'}")
        try:
            number, slot, generation, offset, nbytes = DESCRIPTOR.unpack(descriptor)
        except struct.error as error:
            raise OpenError(f"the peer sent a malformed descriptor: {error}") from error
        if number or slot >= SLOTS:
            raise OpenError(f"the peer named slot {slot} of memory {number}, which it has not exported")
        return self._segment, slot, generation, offset, nbytes
