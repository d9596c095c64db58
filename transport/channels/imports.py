"""Imported memory: the peer's export segment and its arenas, each mapped once, and their blocks as buffers of ours.

What comes from the wire is checked before it is used: the segment is a sealed memfd, a block lies inside it, past its
words, or inside an arena that the backend could map.  Whatever a peer claims, it can only make us read memory that it
gave us.

A block is a buffer of the runtime (`streamrt.buffers`): when the last array over it has died and the streams that used
it are done, its slot's word is written, and that is all.  The mappings live as long as the connection or any array.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable

from streamrt import buffers, forks
from streamrt.buffer import Buffer
from streamrt.device import CPU, Block, Device
from streamrt.errors import LifetimeError, StreamrtError
from streamrt.segment import Segment, Word
from transport.channels import OpenError
from transport.channels.exports import (
    ARENA,
    ARENA_GRAIN,
    DESCRIPTOR,
    GRAIN,
    HEADER_BYTES,
    LENT,
    MAPPED,
    MAX_ARENAS,
    ORDERED,
    SLOTS,
    UNMAPPED,
    state_of,
    word_of,
)
from transport.channels.words import SIGNAL


class _Lease:
    """Writes a slot's word when it dies: a plain store, allowed anywhere.  Not in a forked child, whose copies of the
    arrays are not what the peer waits for."""

    __slots__ = ("_awaited", "_born", "_generation", "_memory", "_word")

    def __init__(self, word: Word, generation: int, memory: object, awaited: set[int] | None) -> None:
        """`awaited`: those whose release somebody waits for."""
        self._awaited = awaited
        if awaited is not None:
            awaited.add(id(self))
        self._word = word
        self._generation = generation
        self._memory = memory  # mapped as long as the block is read
        self._born = forks.generation

    def __del__(self, process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._awaited is not None:
            self._awaited.discard(id(self))
        if process_ends() or self._born != forks.generation:
            return
        try:
            self._word.store(self._generation)
        except LifetimeError:
            return  # the process ends: the mapping went first


class _Arena:
    """One arena of the peer: what maps it, and where it is mapped by now, by the device that reads it."""

    def __init__(self, segment: Segment, number: int, handle: bytes, nbytes: int) -> None:
        self._nbytes = nbytes
        self._handle = handle
        self._state = state_of(segment, number)
        self._blocks: dict[Device, Block] = {}
        self._lock = threading.Lock()
        self._mappings = 0
        self._born = forks.generation

    def on(self, device: Device) -> Block:
        """Where the device reads it.  May block the host in the driver, once.  Raises `OpenError`."""
        block = self._blocks.get(device)
        if block is None:
            reader = device if device.has_streams else Device("host", 0)
            try:
                block = reader.backend.import_memory(reader.index, self._handle, self._nbytes, self._unmapped)
            except StreamrtError as error:
                raise OpenError(str(error)) from error
            self._blocks[device] = block
            with self._lock:
                self._mappings += 1
            self._state.store(MAPPED)
        return block

    def close(self) -> None:
        """Maps it no more once no block of it is read.  Does not block the host."""
        self._blocks.clear()

    def _unmapped(self, process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Runs where mappings end: the last one tells the peer, who may free the memory then.

        When the process ends the peer knows that by itself, and this module's names are gone.
        """
        if process_ends():
            return
        with self._lock:
            self._mappings -= 1
            if self._mappings or self._born != forks.generation:
                return
        try:
            self._state.store(UNMAPPED)
        except LifetimeError:
            return  # the process ends: the words went first


class Imports:
    """The memory that one peer has exported to us.  Used under the connection's lock.  Does not block the host, but for
    the first use of an arena in the driver."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._arenas: dict[int, _Arena] = {}
        self.awaited: set[int] = set()
        """Blocks that are held here and for whose release their owner waits."""
        self._born = forks.generation
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
        state_of(segment, 0).store(MAPPED)

    def open(self, descriptor: memoryview | bytes, nbytes: int, device: Device = CPU) -> Buffer:
        """The block that a descriptor names, of `nbytes`, for a device to read: a buffer, which leases it.

        One of ordinary memory is the same for every device.  May block the host in the driver at an arena's first use.
        Raises `OpenError` for what was not exported to us.
        """
        segment, number, slot, generation, offset, size = self._read(descriptor)
        if number:
            rest = DESCRIPTOR.size + (SIGNAL.size if ordered(descriptor) else 0)
            memory = self._arena(segment, number, memoryview(descriptor)[rest:]).on(device)
            start, grain = 0, 1 if lent(descriptor) else ARENA_GRAIN
        else:
            memory = Block(segment.address, segment.nbytes, segment)
            start, grain, device = HEADER_BYTES, GRAIN, CPU
        end = memory.nbytes
        if not start <= offset <= end or size > end - offset or offset % grain or size != nbytes:
            raise OpenError(f"{size} bytes at {offset} are no block of the peer's memory {number} for {nbytes} bytes")
        awaited = self.awaited if lent(descriptor) else None
        lease = _Lease(word_of(segment, slot), generation, memory, awaited)
        return buffers.adopt(Block(memory.address + offset, nbytes, lease), device)

    def _arena(self, segment: Segment, number: int, rest: memoryview) -> _Arena:
        arena = self._arenas.get(number)
        if arena is None:
            if number > MAX_ARENAS or len(rest) <= ARENA.size:
                raise OpenError(f"the peer named memory {number}, which it has not exported")
            (nbytes,) = ARENA.unpack_from(rest)
            arena = self._arenas[number] = _Arena(segment, number, bytes(rest[ARENA.size :]), nbytes)
        return arena

    def retire(self, number: int) -> None:
        """The peer lends nothing of an allocation any more: unmaps it once nothing of it is read.

        Does not block the host.
        """
        if (arena := self._arenas.pop(number, None)) is not None:
            arena.close()

    def release(self, descriptor: memoryview | bytes) -> None:
        """Nobody will open what a descriptor names.  Does not touch the device."""
        try:
            segment, _, slot, generation, _, _ = self._read(descriptor)
        except OpenError:
            return
        word_of(segment, slot).store(generation)

    def close(self) -> None:
        """The connection has ended: unmaps once no array lives there.  Idempotent.  Does not touch the device."""
        if self._segment is not None and self._born == forks.generation:
            state_of(self._segment, 0).store(UNMAPPED)  # and no arena will be mapped any more
        self._segment = None
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.failure = self.failure or "the connection has ended"

    def _read(self, descriptor: memoryview | bytes) -> tuple[Segment, int, int, int, int, int]:
        if self._segment is None:
            raise OpenError(f"the peer's memory is not mapped here: {self.failure or 'its descriptor did not come'}")
        try:
            number, slot, generation, offset, nbytes = DESCRIPTOR.unpack_from(descriptor)
        except struct.error as error:
            raise OpenError(f"the peer sent a malformed descriptor: {error}") from error
        if slot >= SLOTS or (number == 0 and len(descriptor) != DESCRIPTOR.size):
            raise OpenError(f"the peer named slot {slot} of memory {number}, which it has not exported")
        return self._segment, number & ~(LENT | ORDERED), slot, generation, offset, nbytes


def lent(descriptor: memoryview | bytes) -> bool:
    """Whether a block is a user's own memory, who waits for its release.  Does not touch the device."""
    return len(descriptor) >= DESCRIPTOR.size and bool(DESCRIPTOR.unpack_from(descriptor)[0] & LENT)


def ordered(descriptor: memoryview | bytes) -> bool:
    """Whether the bytes are there behind a signal alone (stream order).  Does not touch the device."""
    return len(descriptor) >= DESCRIPTOR.size and bool(DESCRIPTOR.unpack_from(descriptor)[0] & ORDERED)


def signal_of(descriptor: memoryview | bytes) -> memoryview:
    """What a descriptor in stream order says of its signal.  Does not touch the device."""
    return memoryview(descriptor)[DESCRIPTOR.size :]
