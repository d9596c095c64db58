"""Sealed shared-memory segments, and the words in them on which streams of several processes order themselves.

A segment is a memfd whose size is sealed: no process that holds the descriptor can shrink it under a mapping (that
would be SIGBUS at the next load), and no crash leaks it.  It belongs to one connection, so that nobody else's fault can
reach its words.

A *word* is one counter of 32 or 64 bits.  Words are 64 bytes apart, so that no two share a cache line or a transaction
on the bus.  The rest of a word's line holds what is known about its loss::

    +0  the word        +8  its value when it was marked lost        +16  the lost flag

Invariants:

- *One word, one writer* (a stream or a host), except that whoever survives the writer releases the word.
- Release is flag first, word second: who sees the released value sees the flag too.  Points that were reached before
  the mark stay good, because the mark keeps the value that it found.
- Loads and stores are single aligned accesses of the whole word: no lock, no CUDA call, nothing that can block.  Their
  order is program order on x86-64, which is what the release relies on.

Standard library only: helper processes use this module with nothing else loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from typing import Self

from streamrt.errors import ClosedError, ExhaustedError, LifetimeError, UnavailableError

STRIDE = 64
_LAST_GOOD = 8
_LOST = 16
_MAX_BYTES = 1 << 30


class Segment:
    """A sealed memfd, mapped shared.  Make one with `create` or `attach`; `fd` is what a peer attaches to.

    `nbytes` is a whole number of pages, `address` is where this process has it mapped, `view` is its bytes.
    """

    __slots__ = ("__weakref__", "_lock", "_map", "_words32", "_words64", "address", "fd", "nbytes", "view")

    fd: int
    nbytes: int
    address: int
    view: memoryview

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `nbytes` of `fd` and takes it over.  Use `create` or `attach`.  Does not touch the device."""
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
        self._words32 = self.view.cast("I")
        self._words64 = self.view.cast("Q")
        self.fd = fd  # last: until then the descriptor is still the caller's to close

    @classmethod
    def create(cls, nbytes: int, name: str = "streamrt") -> Segment:
        """A new zeroed segment of at least `nbytes` (rounded up to pages).  Does not touch the device.

        Raises `ValueError` for a size outside 1 byte to 1 GiB, `UnavailableError` where the system has no sealed memfd.
        """
        if not 0 < nbytes <= _MAX_BYTES:
            raise ValueError(f"a segment of {nbytes} bytes is not possible; ask for 1 to {_MAX_BYTES}")
        if not hasattr(os, "memfd_create"):
            raise UnavailableError("sealed shared memory needs Linux (memfd_create); here only one process can be used")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Maps a segment that a peer made; takes the descriptor over, also on an error.  Does not touch the device.

        Seals and size are checked before anything is mapped.  Raises `ValueError` for a descriptor that is no sealed
        memfd or has an impossible size.
        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise ValueError(f"descriptor {fd} is no memfd ({error.strerror}); pass a Segment's `fd`") from error
            if seals & _seals() != _seals():
                raise ValueError(f"descriptor {fd} can still change its size (seals {seals:#x}); seal it first")
            size = os.fstat(fd).st_size
            if not 0 < size <= _MAX_BYTES or size % mmap.PAGESIZE:
                raise ValueError(f"descriptor {fd} has {size} bytes; a segment is whole pages, at most {_MAX_BYTES}")
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def words(self) -> memoryview:
        """Its bytes as 64-bit words; each load and store is one access.  Released by `close`, as `view` is."""
        return self._words64

    @property
    def closed(self) -> bool:
        """Whether `close` was called.  Does not touch the device."""
        return self.fd < 0

    def close(self) -> None:
        """Unmaps the segment and closes the descriptor.  Idempotent.  Does not block the host, nor touch the device.

        Unregister it from devices first: no stream may write or wait on its words any more.
        """
        with self._lock:
            if self.fd < 0:
                return
            fd, self.fd = self.fd, -1
            for view in (self._words32, self._words64, self.view):
                view.release()
            self._map.close()
            os.close(fd)

    def __repr__(self) -> str:
        return f"<Segment {self.nbytes} bytes {'closed' if self.closed else f'fd {self.fd}'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def reached(current: int, value: int, bits: int) -> bool:
    """Whether a word that reads `current` has come to `value`, cyclically, as the GPU's own wait compares them.

    True when `current - value`, taken as a signed number of `bits` bits, is not negative: so counters may wrap, and two
    values must be less than half the range apart.  Does not touch the device.
    """
    return ((current - value) & ((1 << bits) - 1)) < (1 << (bits - 1))


class Word:
    """One counter of a segment, at `offset` (a multiple of 64), 32 or 64 `bits` wide.

    A word is a name: two `Word` objects at one offset, in one process or in two, are the same counter.
    """

    __slots__ = ("_index", "_view", "bits", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, bits: int = 32) -> None:
        """Names the word; its value stays as it is.  Does not touch the device.  Raises `ValueError`, `ClosedError`."""
        if bits not in (32, 64):
            raise ValueError(f"a word has 32 or 64 bits, not {bits}")
        if offset % STRIDE or not 0 <= offset <= segment.nbytes - STRIDE:
            raise ValueError(f"offset {offset} is no word of {segment!r}: words are {STRIDE} bytes apart, inside it")
        if segment.closed:
            raise ClosedError("the segment is closed; open a new connection")
        self.segment, self.offset, self.bits = segment, offset, bits
        self._view = segment._words32 if bits == 32 else segment._words64
        self._index = offset * 8 // bits

    @property
    def address(self) -> int:
        """Where this process has the word mapped.  Does not touch the device."""
        return self.segment.address + self.offset

    @property
    def index(self) -> int:
        """The word's number in its segment, the same in every process.  Does not touch the device."""
        return self.offset // STRIDE

    def load(self) -> int:
        """Reads the word, 0 to 2**bits - 1.  Does not block the host.  Raises `LifetimeError` once it is unmapped."""
        try:
            return self._view[self._index]
        except ValueError:
            raise self._unmapped() from None

    def store(self, value: int) -> None:
        """Writes the word (`value` is taken modulo 2**bits).  Does not block the host.  Raises `LifetimeError`."""
        try:
            self._view[self._index] = value & (0xFFFFFFFF if self.bits == 32 else 0xFFFFFFFFFFFFFFFF)
        except ValueError:
            raise self._unmapped() from None

    @property
    def lost(self) -> bool:
        """Whether the word's writer was given up.  Points that `last_good` had reached by then stay good."""
        try:
            return self.segment._words32[(self.offset + _LOST) // 4] != 0
        except ValueError:
            raise self._unmapped() from None

    @property
    def last_good(self) -> int:
        """What the word read when it was marked lost; meaningless before.  Does not block the host."""
        return self.segment._words64[(self.offset + _LAST_GOOD) // 8]

    def mark_lost(self) -> None:
        """Notes beside the word that its writer is gone and what it had reached.  Idempotent.  Does not block the host.

        Comes before the store that releases those who wait.  The value is read before the flag: if somebody else marks
        and releases in between, the flag is seen and their note stands.
        """
        value = self.load()
        if self.lost:
            return
        self.segment._words64[(self.offset + _LAST_GOOD) // 8] = value
        self.segment._words32[(self.offset + _LOST) // 4] = 1

    def reset(self, value: int = 0) -> None:
        """A fresh counter: no loss, `value`.  Only while nobody waits on it or writes it.  Does not block the host."""
        self.segment._words32[(self.offset + _LOST) // 4] = 0
        self.segment._words64[(self.offset + _LAST_GOOD) // 8] = 0
        self.segment._words64[self.offset // 8] = 0
        self.store(value)

    def _unmapped(self) -> LifetimeError:
        return LifetimeError(f"word {self.index} is used after its segment was closed; close the segment last")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and other.segment is self.segment and other.offset == self.offset

    def __hash__(self) -> int:
        return hash((id(self.segment), self.offset))

    def __repr__(self) -> str:
        if self.segment.closed:
            return f"<Word {self.index} unmapped>"
        return f"<Word {self.index} = {self.load()} of {self.bits} bits{' lost' if self.lost else ''}>"


class WordTable:
    """Hands out the words of one segment to the side that created it; the peer names them by index.  Thread-safe."""

    def __init__(self, segment: Segment) -> None:
        """All words of the segment are free.  Does not touch the device."""
        self.segment = segment
        self._lock = threading.Lock()
        self._free = list(range(segment.nbytes // STRIDE - 1, -1, -1))
        self._leased: set[int] = set()

    @property
    def free(self) -> int:
        """How many words can still be leased.  Does not touch the device."""
        return len(self._free)

    def lease(self, bits: int = 32) -> Word:
        """A word of its own, reset to 0.  Does not block the host.  Raises `ExhaustedError` when none is left."""
        with self._lock:
            if not self._free:
                raise ExhaustedError(
                    f"all {len(self._leased)} words of the segment are leased; release some or create a larger segment"
                )
            index = self._free[-1]
            word = Word(self.segment, index * STRIDE, bits)
            word.reset()
            self._free.pop()
            self._leased.add(index)
        return word

    def release(self, word: Word) -> None:
        """Takes a word back; nobody may wait on it or write it any more.  Raises `LifetimeError` for one not leased.

        Does not touch the device.
        """
        with self._lock:
            self._take(word)
            self._free.append(word.index)

    def quarantine(self, word: Word) -> None:
        """Takes a word back and never leases it again: a frozen writer may still come back and write it.

        Does not touch the device.
        """
        with self._lock:
            self._take(word)

    def _take(self, word: Word) -> None:
        if word.segment is not self.segment or word.index not in self._leased:
            raise LifetimeError(f"{word!r} is not leased from this table; release each word once, where it was leased")
        self._leased.remove(word.index)
