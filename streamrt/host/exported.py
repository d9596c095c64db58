"""Memory of virtual devices that another process of this host maps: sealed memfds, opened through ``/proc``.

The handle names the descriptor by process and number, so that it is bytes and may travel over any link, as CUDA's is.
Only a process that may look into ours, one of the same user, can open it.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
from collections.abc import Callable

from streamrt.device import Allocation, Block, ExportedMemory
from streamrt.errors import ExhaustedError, UnavailableError
from streamrt.host.memory import HostMemory
from streamrt.segment import Segment

_HANDLE = struct.Struct("<II")  # process id, descriptor


class _Owner:
    """Unmaps when it is dropped, and says so."""

    __slots__ = ("__weakref__", "_mapping", "_unmapped", "segment")

    def __init__(self, segment: Segment, mapping: object, unmapped: Callable[[], None] | None = None) -> None:
        self.segment = segment
        self._mapping: object = mapping
        self._unmapped = unmapped

    def __del__(self) -> None:
        self._mapping = None  # before the addresses can be somebody else's
        self.segment.close()
        if self._unmapped is not None:
            self._unmapped()


class HostExports:
    """What virtual devices export and map."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._numbers = itertools.count(1)
        self._exported: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()

    def export(self, index: int, nbytes: int) -> ExportedMemory:
        """Memory for other processes to map; see `Backend.export_memory`."""
        try:
            segment = Segment.create(nbytes, "streamrt-export")
        except (OSError, ValueError) as error:
            raise ExhaustedError(f"no {nbytes} bytes can be shared with another process: {error}") from error
        owner = _Owner(segment, self._memory.mapped(index, segment.address, segment.nbytes))
        self._exported[next(self._numbers)] = owner
        return ExportedMemory(segment.address, nbytes, _handle_of(segment), owner)

    def allocation(self, address: int) -> Allocation | None:
        """What was exported around an address; see `Backend.allocation`."""
        for number, owner in list(self._exported.items()):
            segment = owner.segment
            if segment.address <= address < segment.address + segment.nbytes:
                return Allocation(segment.address, segment.nbytes, number)
        return None

    def export_allocation(self, allocation: Allocation) -> bytes:
        """The handle of what was exported; see `Backend.export_allocation`."""
        owner = self._exported.get(allocation.identity)
        if owner is None:
            raise UnavailableError(f"the memory at {allocation.address:#x} is gone")
        return _handle_of(owner.segment)

    def import_(self, index: int, handle: bytes, nbytes: int, unmapped: Callable[[], None]) -> Block:
        """What another process exported; see `Backend.import_memory`."""
        try:
            pid, descriptor = _HANDLE.unpack(handle)
            segment = Segment.attach(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError, struct.error) as error:
            raise UnavailableError(f"the peer's memory cannot be mapped: {error}") from error
        if segment.nbytes < nbytes:
            segment.close()
            raise UnavailableError(f"the peer exported {segment.nbytes} bytes as {nbytes}")
        mapping = self._memory.mapped(index, segment.address, segment.nbytes)
        return Block(segment.address, nbytes, _Owner(segment, mapping, unmapped))


def _handle_of(segment: Segment) -> bytes:
    return _HANDLE.pack(os.getpid(), segment.fd)
