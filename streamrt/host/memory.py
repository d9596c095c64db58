"""Memory of the virtual devices: ordinary memory of the process, known by address.

An array of NumPy, torch or JAX that lies inside a block of ``host:1`` *is* on ``host:1``: placement is found by
address, so it survives every zero-copy view and DLPack import.

A freed block can be handed out again at once, whatever still runs, exactly as CuPy's pool does on a stream.  With
`poison` on (the replaying schedules) it is overwritten first and is the first to be reused, so that a missing wait
shows as wrong bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
import threading
from collections import defaultdict, deque

import numpy as np

from streamrt import forks, hooks
from streamrt.device import Block

ALIGNMENT = 64  # what JAX asks of memory that it imports without a copy
CACHE_LIMIT = 256 << 20  # freed bytes kept for reuse; past it they go back to the operating system
LARGE_BYTES = 1 << 20  # of a block that goes back at once; smaller ones do with the next allocation
POISON = 0xDB


class _Region:
    """One piece of backing memory; it belongs to one virtual device for as long as it lives."""

    __slots__ = ("address", "backing", "index", "nbytes")

    def __init__(self, index: int, nbytes: int) -> None:
        self.backing = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = self.backing.ctypes.data
        self.address = start + (-start % ALIGNMENT)
        self.index = index
        self.nbytes = nbytes


class _Owner:
    """Gives its region back when the last reference to the block is dropped."""

    __slots__ = ("memory", "region")

    def __init__(self, memory: HostMemory, region: _Region) -> None:
        self.memory = memory
        self.region = region

    def __del__(self, large: int = LARGE_BYTES) -> None:  # bound here: globals go first when the process ends
        if self.memory.poison:
            ctypes.memset(self.region.address, POISON, self.region.nbytes)
        self.memory.returned.append(self.region)
        if self.region.nbytes >= large and not self.memory.ending():
            self.memory.give_back()


class _Mapped:
    """Memory from elsewhere that counts as a virtual device's."""

    __slots__ = ("address", "index", "nbytes")

    def __init__(self, index: int, address: int, nbytes: int) -> None:
        self.address = address
        self.index = index
        self.nbytes = nbytes


class _Mapping:
    """Ends that when it is dropped, in a finaliser, so by a plain append."""

    __slots__ = ("gone", "mapped")

    def __init__(self, mapped: _Mapped, gone: deque[_Mapped]) -> None:
        self.mapped = mapped
        self.gone = gone

    def __del__(self) -> None:
        self.gone.append(self.mapped)


class HostMemory:
    """Allocates, reuses and locates the memory of all virtual devices.  Thread-safe."""

    def __init__(self) -> None:
        self.poison = False
        self.ending = sys.is_finalizing
        self.returned: deque[_Region] = deque()
        self.gone: deque[_Mapped] = deque()
        self._lock = threading.Lock()
        forks.renew(self, _lock=threading.Lock)
        self._free: defaultdict[tuple[int, int], list[_Region]] = defaultdict(list)
        self._cached = 0
        self._starts: list[int] = []
        self._regions: list[_Region | _Mapped] = []
        self._live = 0

    @property
    def live_bytes(self) -> int:
        """Bytes in blocks that somebody holds.  Does not touch the device."""
        with self._lock:
            self._collect()
            return self._live

    def allocate(self, index: int, nbytes: int) -> Block:
        """A block of a virtual device, 64-byte aligned; its contents are not set.  Does not block the host."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            freed = self._collect()
            free = self._free[index, size]
            region = free.pop() if free else None
            if region is not None:
                self._cached -= size
            else:
                region = _Region(index, size)
                at = bisect.bisect(self._starts, region.address)
                self._starts.insert(at, region.address)
                self._regions.insert(at, region)
            self._live += size
        if self.poison:
            ctypes.memset(region.address, POISON, size)
        if hooks.listeners:
            for old in freed:
                hooks.emit(hooks.Freed(f"host:{old.index}", old.address, old.nbytes))
            hooks.emit(hooks.Allocated(f"host:{index}", region.address, nbytes, None))
        return Block(region.address, nbytes, _Owner(self, region))

    def give_back(self) -> None:
        """Lets the system have what was dropped and is over the limit.  Does not block the host.

        For finalisers, which run anywhere, also inside of `allocate`: nothing where somebody is at it, who then does.
        """
        if hooks.listeners or not self._lock.acquire(blocking=False):
            return  # listeners are told by the next allocation
        try:
            self._collect()
        finally:
            self._lock.release()

    def mapped(self, index: int, address: int, nbytes: int) -> object:
        """Memory that was mapped from elsewhere is the device's as long as what this gives lives.

        Does not block the host.
        """
        with self._lock:
            self._forget_gone()
            mapped = _Mapped(index, address, nbytes)
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._regions.insert(at, mapped)
        return _Mapping(mapped, self.gone)

    def _forget_gone(self) -> None:
        """Under the lock, before anything is found by its address."""
        while self.gone:
            self._remove(self.gone.popleft())

    def _remove(self, region: _Region | _Mapped) -> None:
        at = self._regions.index(region, bisect.bisect_left(self._starts, region.address))
        del self._starts[at], self._regions[at]

    def _collect(self) -> list[_Region]:
        """Takes back what was dropped since the last call, under the lock."""
        self._forget_gone()
        freed = []
        while self.returned:
            region = self.returned.popleft()
            freed.append(region)
            self._live -= region.nbytes
            if self._cached + region.nbytes <= CACHE_LIMIT:
                self._cached += region.nbytes
                self._free[region.index, region.nbytes].append(region)
            else:
                self._remove(region)
        return freed

    def device_of(self, address: int) -> int | None:
        """The index of the virtual device that the address belongs to, or None.  Does not touch the device."""
        if not self._starts:  # what the caller has was there before
            return None
        with self._lock:
            self._forget_gone()
            at = bisect.bisect_right(self._starts, address) - 1
            if at >= 0 and address < self._starts[at] + self._regions[at].nbytes:
                return self._regions[at].index
        return None
