"""Exported memory: where the snapshots of one connection are taken, so that its peer can read them in place.

One sealed segment a connection and direction: its first part holds the words, the rest is cut into blocks of ordinary
memory.  The peer maps it once, and sees nothing but what was sent to it.  Pages are taken from the system as blocks are
first written, and kept: on most machines the first touch of a page costs more than a copy of its bytes.  The memory of
devices is exported by their backends, in *arenas* that grow by need; a descriptor carries an arena's handle until the
peer has mapped it.

A block is free again when its slot is released (the peer wrote the generation into the word) *and* nobody here holds it
any more, which `streamrt.buffers` says once the copy into it has run.  Words are read at allocations only: nobody polls
for an array that the peer's user keeps.  Finalisers only append to a queue.
"""

from __future__ import annotations

import collections
import functools
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from streamrt.device import CPU, Allocation, Block, Device, ExportedMemory
from streamrt.errors import StreamrtError
from streamrt.segment import STRIDE, Segment, Word
from transport import lend
from transport.channels import retired
from transport.channels.gaps import Gaps
from transport.errors import RemoteProtocolError
from transport.lease import LeaseSlot, SlotTable

SLOTS = 4096
MAX_ARENAS = 255
HEADER_BYTES = (1 + SLOTS + MAX_ARENAS) * STRIDE + -(1 + SLOTS + MAX_ARENAS) * STRIDE % 4096
"""Word 0 says how far the peer is with the segment, then come the words of the slots, then those of the arenas."""
MAPPED, UNMAPPED = 1, 2
"""What a peer writes into the word of a segment or an arena."""
GRAIN = 4096
ARENA_GRAIN = 512
MAX_SEGMENT_BYTES = 1 << 30
MOST_BYTES = MAX_SEGMENT_BYTES - HEADER_BYTES
LENT = 1 << 31
"""Set in a memory's number where the block is a user's own, who waits for its release."""
ORDERED = 1 << 30
"""Set in a memory's number where a signal follows (`words.SIGNAL`), behind which the bytes are there."""
MOST_LENT = 64  # allocations of users that a peer keeps mapped
FIRST_ARENA_BYTES = 8 << 20
LARGEST_ARENA_BYTES = 1 << 30  # but for an array that is larger
ARENA_STEP = 2 << 20
DEFAULT_EXPORT_LIMIT = 4 << 30
DESCRIPTOR = struct.Struct("<IIQQQ")
"""What names a block to the peer: its memory's number, slot, generation, offset, bytes."""
ARENA = struct.Struct("<Q")
"""What follows it, and the signal, until the peer has mapped that arena: its bytes, and then its handle."""
NEVER_MAPPED_SECONDS = 60.0  # after which a peer that lives and runs has not received what was announced to it
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
    return Word(segment, (1 + slot) * STRIDE, 64)


def state_of(segment: Segment, number: int) -> Word:
    """The word that says how far the peer is with the segment (0) or an arena.  Does not touch the device."""
    return Word(segment, (SLOTS + number if number else 0) * STRIDE, 64)


class Room:
    """A range of memory that the peer maps as one, under a number: the segment's (0) or an arena's, which is cut into
    blocks, or an allocation of the user's."""

    __slots__ = ("address", "device", "gaps", "grain", "memory", "nbytes", "number", "out")

    def __init__(self, number: int, device: Device, memory: Segment | ExportedMemory, start: int, grain: int) -> None:
        self.number = number
        self.device = device
        self.memory = memory  # mapped as long as anybody may write to a block, also past the connection's end
        self.address = memory.address
        self.nbytes = memory.nbytes
        self.gaps = Gaps(start, memory.nbytes)
        self.grain = grain
        self.out = 0  # how many blocks of it are lent

    @property
    def handle(self) -> bytes:
        """What the peer needs to map it, empty for the segment.  Does not touch the device."""
        return self.memory.handle if isinstance(self.memory, ExportedMemory) else b""


class Export:
    """One block: lives as long as somebody here holds it, and beyond that until the peer has released it."""

    __slots__ = ("_exports", "given", "lent", "nbytes", "offset", "room", "slot")

    def __init__(
        self, exports: Exports, room: Room, offset: int, nbytes: int, slot: LeaseSlot, lent: object = None
    ) -> None:
        self._exports = exports
        self.room = room
        self.offset = offset
        self.nbytes = nbytes
        self.slot = slot
        self.given = False  # to the peer, who then releases it
        self.lent = lent  # what keeps the user's memory, and says when it goes that it is free

    @property
    def mapped(self) -> bool:
        """Whether the peer can surely open it, by a descriptor alone.  Does not touch the device."""
        return self._exports.mapped(self.room.number)

    def give(self, nbytes: int, signal: bytes = b"") -> bytes:
        """The descriptor for the peer, who owns the block's slot from now on.  Does not touch the device.

        `signal` names the point behind which the bytes are there, in stream order.
        """
        self.given = True
        number = self.room.number
        named = (number if self.lent is None else number | LENT) | (ORDERED if signal else 0)
        descriptor = DESCRIPTOR.pack(named, self.slot.word, self.slot.generation, self.offset, nbytes) + signal
        if not number or self._exports.mapped(number):
            return descriptor
        return descriptor + ARENA.pack(self.room.nbytes) + self.room.handle

    def take_back(self) -> None:
        """The peer has declined it and will not write its word.  Does not touch the device."""
        self.given = False

    def __del__(self) -> None:
        if self._exports.closed:  # nobody would take it out again, and `lent` must go
            return
        self._exports.dropped.append(_Out(self.room, self.offset, self.nbytes, self.slot, self.given, self.lent))


class _Out(NamedTuple):
    """A block that nobody here holds any more."""

    room: Room
    offset: int
    nbytes: int
    slot: LeaseSlot
    given: bool
    lent: object


class Exports:
    """The exported memory of one connection.  Thread-safe; nothing here blocks the host but for its own short lock, and
    for a device's memory the driver."""

    def __init__(self, limit: int = MOST_BYTES) -> None:
        """`limit`: bytes of this connection's blocks of ordinary memory.  Takes none before a block is asked for."""
        self.dropped: collections.deque[_Out] = collections.deque()
        self.closed = False
        self.fault = ""
        """What the peer has written that nobody could have told it to."""
        self.lent = 0
        """Blocks of users' own memory that the peer has not released: somebody waits for them."""
        self.retiring: collections.deque[int] = collections.deque()
        """Numbers of allocations that the peer is to unmap."""
        self.announced = False
        """Whether the segment's descriptor went to the peer."""
        self._limit = min(limit, MOST_BYTES) // GRAIN * GRAIN
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._room: Room | None = None
        self._arenas: dict[Device, list[Room]] = {}
        self._allocations: collections.OrderedDict[tuple[Device, int], Room] = collections.OrderedDict()
        self._retired: list[int] = []
        self._numbers = 0
        self._mapped: set[int] = set()
        self._slots = SlotTable(SLOTS)
        self._touched = HEADER_BYTES
        self._out: collections.deque[_Out] = collections.deque()
        self._refused = self._limit <= 0
        self._refused_devices: set[Device] = set()

    @property
    def fd(self) -> int:
        """The segment's descriptor, -1 where there is none.  Does not touch the device."""
        return -1 if self._segment is None else self._segment.fd

    def mapped(self, number: int = 0) -> bool:
        """Whether the peer has mapped the segment, or an arena: from then on it can open every block of it.

        Does not touch the device.
        """
        if number not in self._mapped:
            segment = self._segment
            if segment is None or state_of(segment, number).load() != MAPPED:
                return False
            self._mapped.add(number)
        return True

    def released(self, slot: int, generation: int) -> bool:
        """Whether the peer has given a slot back, used or not.  Does not touch the device."""
        return self._segment is not None and word_of(self._segment, slot).load() == generation

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are not free.  Does not touch the device."""
        with self._lock:
            self._collect(len(self._out) + len(self.dropped))
            used = sum(room.nbytes - room.gaps.nbytes for rooms in self._arenas.values() for room in rooms)
            return used if self._room is None else used + self._room.nbytes - HEADER_BYTES - self._room.gaps.nbytes

    @property
    def touched_bytes(self) -> int:
        """Where the highest block so far has ended, and all arenas: what the system may have given.

        Does not touch the device.
        """
        return self._touched - HEADER_BYTES + sum(room.nbytes for rooms in self._arenas.values() for room in rooms)

    def allocate(self, nbytes: int, device: Device = CPU) -> Block | None:
        """A block of `nbytes` that the peer can map; None where there is no room, or after `refuse`.

        Does not block the host, but for a new arena in the driver.
        """
        with self._lock:
            if self._refused or device in self._refused_devices or not self._make():
                return None
            room = self._ordinary(nbytes) if device == CPU else self._arena(device, nbytes)
            slot = None if room is None else self._slots.lease()
            if room is None or slot is None:
                return None
            size = -(-nbytes // room.grain) * room.grain
            offset = room.gaps.take(size)
            assert offset is not None, "a room was chosen for its gap"
            return Block(room.address + offset, nbytes, Export(self, room, offset, size, slot))

    def lend(self, device: Device, address: int, nbytes: int, keep: object) -> Export | None:
        """A block that is the user's own memory; None where the peer cannot map it.  `keep` is dropped when the peer
        has released it and nobody here holds it.  Does not block the host.
        """
        with self._lock:
            if self._refused or device in self._refused_devices or not self._make():
                return None
            found = device.backend.allocation(device.index, address)
            if found is None or address + nbytes > found.address + found.nbytes:
                return None
            self._collect(_LOOKS)
            key = (device, found.identity)
            room = self._allocations.get(key) or self._take_allocation(key, found)
            slot = None if room is None else self._slots.lease()
            if room is None or slot is None:
                return None
            self._allocations.move_to_end(key)
            room.out += 1
            self.lent += 1
            return Export(self, room, address - found.address, nbytes, slot, keep)

    def _take_allocation(self, key: tuple[Device, int], found: Allocation) -> Room | None:
        device = key[0]
        for other, room in list(self._allocations.items()):
            gone = room.address < found.address + found.nbytes and found.address < room.address + room.nbytes
            if gone and other[0] == device and not room.out:
                self._retire(other)
        idle = [other for other, room in self._allocations.items() if not room.out]  # lent longest ago comes first
        if idle and len(self._allocations) >= MOST_LENT:
            self._retire(idle[0])
        number = self._number()
        if not number:
            return None
        try:
            handle = device.backend.export_allocation(device.index, found)
        except StreamrtError:  # a snapshot serves
            self._retired.append(number)
            return None
        memory = ExportedMemory(found.address, found.nbytes, handle, None)
        room = self._allocations[key] = Room(number, device, memory, 0, 1)
        return room

    def _retire(self, key: tuple[Device, int]) -> None:
        """Lets the peer unmap an allocation, of which nothing is out."""
        number = self._allocations.pop(key).number
        self._mapped.discard(number)
        self._retired.append(number)
        self.retiring.append(number)

    def _number(self) -> int:
        """A number that means nothing to the peer; 0 where there is none."""
        if self._numbers < MAX_ARENAS:
            self._numbers += 1
            return self._numbers
        for number in self._retired:
            told = number not in self.retiring
            if told and self._segment is not None and state_of(self._segment, number).load() != MAPPED:
                self._retired.remove(number)
                return number
        return 0

    def give_up(self, slot: int, generation: int) -> None:
        """The peer will not write the word of a slot: it is free.  Does not touch the device."""
        with self._lock:
            if self._segment is not None and self._slots.is_leased(slot, generation):
                word_of(self._segment, slot).store(generation)

    def collect(self) -> None:
        """Takes back what the peer has released.  Does not touch the device."""
        with self._lock:
            self._collect(len(self._out))

    def _ordinary(self, nbytes: int) -> Room | None:
        """The segment, if there is room in it."""
        room, size = self._room, -(-nbytes // GRAIN) * GRAIN
        if room is None or size > self._limit:
            return None
        offset = self._find([room], size)
        if offset is None:
            return None
        growth = max(0, offset[1] + size - self._touched)
        if not _take(growth):
            return None
        self._touched += growth
        return room

    def _arena(self, device: Device, nbytes: int) -> Room | None:
        """An arena of the device with room for a block, a new one if need be."""
        rooms = self._arenas.setdefault(device, [])
        found = self._find(rooms, -(-nbytes // ARENA_GRAIN) * ARENA_GRAIN)
        if found is not None:
            return found[0]
        number = self._number()
        if not number:
            return None
        least = -(-nbytes // ARENA_STEP) * ARENA_STEP
        so_far = sum(room.nbytes for room in rooms)
        for size in sorted({max(least, FIRST_ARENA_BYTES, min(so_far, LARGEST_ARENA_BYTES)), least}, reverse=True):
            if not _take(size):
                continue
            try:
                memory = device.backend.export_memory(device.index, size)
            except StreamrtError:  # no room on the device, or it exports nothing: staging serves
                _take(-size)
                continue
            rooms.append(Room(number, device, memory, 0, ARENA_GRAIN))
            return rooms[-1]
        self._retired.append(number)
        return None

    def _find(self, rooms: list[Room], size: int) -> tuple[Room, int] | None:
        for looks in (_LOOKS, len(self._out) + len(self.dropped)):
            self._collect(looks)
            for room in rooms:
                if (offset := room.gaps.find(size)) is not None:
                    return room, offset
        return None

    def gives(self, device: Device) -> bool:
        """Whether the peer has refused no block of a device, as far as is known.  Does not touch the device."""
        return not (self._refused or device in self._refused_devices)

    def refuse(self, device: Device | None = None) -> bool:
        """Gives no more blocks, or none of a device: the peer cannot open them.  Whether that is new.

        Does not touch the device.
        """
        with self._lock:
            if device is None:
                new, self._refused = not self._refused, True
            else:
                new = device not in self._refused_devices
                self._refused_devices.add(device)
            return new

    def close(self, gone: Callable[[], bool]) -> None:
        """The connection has ended: unmaps as soon as nobody here holds a block; no byte is used again.  Idempotent.

        Arenas go when the peer has unmapped them, or its process is `gone`.  Does not block the host.
        """
        with self._lock:
            self._refused = self.closed = True
            out = [block for block in (*self._out, *self.dropped) if block.lent is not None]
            self.dropped.clear()
            segment, self._segment, self._room = self._segment, None, None
            _take(HEADER_BYTES - self._touched)
            self._touched = HEADER_BYTES
            arenas = [room for rooms in self._arenas.values() for room in rooms]
            self._arenas.clear()
            self._out.clear()
            if segment is None:
                return
            given_up = time.monotonic() + NEVER_MAPPED_SECONDS
            for block in out:
                mapped = functools.partial(_over, segment, block.room.number, gone, given_up)
                retired.keep(getattr(block.lent, "array", None), mapped if block.given else _at_once, _at_once)
                lend.let_go(block.lent)
            for room in arenas:
                over = functools.partial(_over, segment, room.number, gone, given_up) if self.announced else _at_once
                retired.keep(room.memory, over, functools.partial(_take, -room.nbytes))

    def _make(self) -> bool:
        if self._segment is None:
            try:
                self._segment = Segment.create(self._limit + HEADER_BYTES, "streamrt-exports")
            except (StreamrtError, OSError):  # no memfd here, or no room for the mapping: staging serves
                self._refused = True
                return False
            self._room = Room(0, CPU, self._segment, HEADER_BYTES, GRAIN)
        return True

    def _collect(self, looks: int) -> None:
        """Takes back what was dropped, and of what is out as much as `looks` slots show to be released."""
        while self.dropped:
            block = self.dropped.popleft()
            if block.given:
                self._out.append(block)
                looks += 1
            else:
                self._slots.observe(block.slot.word, block.slot.generation)
                self._end(block)
        if self._segment is None:
            return
        try:
            for _ in range(min(looks, len(self._out))):
                block = self._out.popleft()
                slot = block.slot
                if self._slots.observe(slot.word, word_of(self._segment, slot.word).load()):
                    self._end(block)
                else:
                    self._out.append(block)
        except RemoteProtocolError as fault:  # a peer that writes what was never leased harms itself only
            self._out.append(block)
            self._refused, self.fault = True, self.fault or str(fault)

    def _end(self, block: _Out) -> None:
        if block.lent is None:
            block.room.gaps.give(block.offset, block.nbytes)
        else:
            block.room.out -= 1
            self.lent -= 1
            lend.let_go(block.lent)


def _over(segment: Segment, number: int, gone: Callable[[], bool], given_up: float) -> bool:
    """Whether the peer maps an arena no more and never will."""
    peer = state_of(segment, 0).load()
    if peer == UNMAPPED and state_of(segment, number).load() != MAPPED:
        return True
    return (peer == 0 and time.monotonic() > given_up) or gone()


def _at_once() -> bool:
    return True
