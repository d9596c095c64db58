"""Small operations of the runtime that are one call here and one operation on the stream: `copy_many`, `latch`.

Their kernels are loaded when the device is opened (`Backend.open`): the first launch of a kernel blocks the host while
any stream of the process is held up by a peer.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrt import hooks
from streamrt.device import LatchHandle
from streamrt.stream import Stream

Copy = tuple[int, int, int]


def copy_many(stream: Stream, copies: Sequence[Copy]) -> None:
    """Enqueues on `stream` all copies, each a (destination, source, bytes) of this process's addresses.

    No copy may overlap another's destination: they have no order among themselves.  The caller keeps all memory alive
    until they ran.  Does not block the host.  Raises `ValueError` for a negative size, before anything is enqueued.
    """
    pieces = []
    for piece in copies:
        if piece[2] > 0:
            pieces.append(piece)
        elif piece[2] < 0:
            raise ValueError("a copy of fewer than 0 bytes is not possible")
    if not pieces:
        return
    stream.device.backend.copy_many(stream.device.index, stream.handle, pieces)
    if hooks.listeners:
        for destination, source, nbytes in pieces:
            hooks.emit(hooks.Copied(stream.key, destination, source, nbytes))


def latch(stream: Stream) -> LatchHandle:
    """Enqueues on `stream` a door that stays closed until the handle's `open` (a GPU's opens itself after a minute).

    `streamrt.testing.Latch` is the same as a context manager.  Does not block the host.
    """
    return stream.device.backend.latch(stream.device.index, stream.handle)
