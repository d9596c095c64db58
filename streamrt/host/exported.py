"""Memory of virtual devices that another process of this host maps: sealed memfds, opened through ``/proc``.

The handle names the descriptor by process and number, so that it is bytes and may travel over any link, as CUDA's is.
Only a process that may look into ours, one of the same user, can open it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from streamrt.device import Block, ExportedMemory
from streamrt.errors import ExhaustedError, UnavailableError
from streamrt.segment import Segment

_HANDLE = struct.Struct("<II")  # process id, descriptor


class _Owner:
    """Unmaps when it is dropped, and says so."""

    __slots__ = ("_segment", "_unmapped")

    def __init__(self, segment: Segment, unmapped: Callable[[], None] | None = None) -> None:
        self._segment = segment
        self._unmapped = unmapped

    def __del__(self) -> None:
        self._segment.close()
        if self._unmapped is not None:
            self._unmapped()


def export(nbytes: int) -> ExportedMemory:
    """Memory for other processes to map; see `Backend.export_memory`."""
    try:
        segment = Segment.create(nbytes, "streamrt-export")
    except (OSError, ValueError) as error:
        raise ExhaustedError(f"no {nbytes} bytes can be shared with another process: {error}") from error
    return ExportedMemory(segment.address, nbytes, _HANDLE.pack(os.getpid(), segment.fd), _Owner(segment))


def import_(handle: bytes, nbytes: int, unmapped: Callable[[], None]) -> Block:
    """What another process exported; see `Backend.import_memory`."""
    try:
        pid, descriptor = _HANDLE.unpack(handle)
        segment = Segment.attach(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except (OSError, ValueError, struct.error) as error:
        raise UnavailableError(f"the peer's memory cannot be mapped: {error}") from error
    if segment.nbytes < nbytes:
        segment.close()
        raise UnavailableError(f"the peer exported {segment.nbytes} bytes as {nbytes}")
    return Block(segment.address, nbytes, _Owner(segment, unmapped))
