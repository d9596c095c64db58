"""The writing half of an AF_UNIX link: what its socket has not taken yet, and the descriptors that go with it.

Frames are written straight from the caller's memory; what does not fit is kept (the views, not copies) and written by
`flush`.
"""

from __future__ import annotations

import array
import collections
import errno
import os
import socket
import struct
from collections.abc import Sequence

from transport.links import MAX_FRAMES, Frame, LinkBroken

COUNTS = struct.Struct("<II")
LENGTHS = [struct.Struct(f"<{count}Q") for count in range(MAX_FRAMES + 1)]
_VECTORS = 128  # pieces of one write; the kernel's limit is 1024
_AT_ONCE_BYTES = 1 << 16
_NOSIGNAL = int(socket.MSG_NOSIGNAL)  # a plain integer: arithmetic on the enum member costs more than the call

_Rights = list[tuple[int, int, "array.array[int]"]]


class SocketWriter:
    """Messages and signals on their way to a socket, in order.  The socket is the link's."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self.queued = 0
        """Bytes that are not written yet."""

    @property
    def waits(self) -> bool:
        """Whether `flush` has something to write.  Does not touch the device."""
        return bool(self._outgoing)

    def send(self, frames: Sequence[Frame], sizes: Sequence[int], total: int, fds: Sequence[int], place: bytes) -> None:
        """Queues one message and writes what goes.  `sizes` are the frames' bytes, `place` stands before them.

        The caller keeps its own `fds`; where they have to wait and cannot be duplicated, or the kernel passes no more,
        the message goes without.  Raises `LinkBroken`.  Does not block the host.
        """
        count = len(sizes)
        rest = place + LENGTHS[count].pack(*sizes)
        head = COUNTS.pack(count, len(fds)) + rest
        total += len(head)
        if not self._outgoing and (fds or total <= _AT_ONCE_BYTES):
            # The common case: a small message that goes at once needs no views and no queue.
            written = self._write([head, *frames], _rights(fds))
            if written is None:
                fds, head = (), _without_fds(head)
                written = self._write([head, *frames], []) or 0
            if written == total:
                return
        else:
            written = 0
        kept: list[int] = []
        if fds and not written:  # else they went with the first byte
            kept = _duplicates(fds)
            head = head if kept else _without_fds(head)
        pieces = [memoryview(head)]
        pieces += [memoryview(frame).cast("B") for frame, size in zip(frames, sizes, strict=True) if size]
        self._outgoing.append(_Outgoing(pieces, kept))
        self.queued += total
        if written:
            self._advance(written)
        elif len(self._outgoing) == 1:
            self.flush()

    def signal(self, kind: int, fds: Sequence[int] = ()) -> None:
        """Queues a signal, which is a message of no frames; not where its `fds` cannot be duplicated, or passed.

        `flush` writes it.  Does not block the host.
        """
        kept = _duplicates(fds)
        if len(kept) == len(fds):
            self._outgoing.append(_Outgoing([memoryview(COUNTS.pack(0, kind))], kept))
            self.queued += COUNTS.size

    def own(self) -> None:
        """Copies what is queued, so that the memory of its frames may change.  Does not touch the device."""
        for entry in self._outgoing:
            entry.pieces = [memoryview(bytes(piece)) for piece in entry.pieces]

    def flush(self) -> None:
        """Writes what can be written.  Raises `LinkBroken`.  Does not block the host."""
        while self._outgoing:
            first = self._outgoing[0]
            pieces: list[memoryview] = []
            for entry in self._outgoing:
                if len(pieces) >= _VECTORS or (entry.fds and entry is not first):
                    break
                pieces += entry.pieces
            asked = sum(map(len, pieces[:_VECTORS]))
            written = self._write(pieces[:_VECTORS], _rights(first.fds))
            if written is None:
                self._go_without(first)
                continue
            if not written:
                return
            first.close_fds()  # they went with the first byte
            self._advance(written)
            if written < asked:
                return

    def drop(self) -> None:
        """Forgets what is queued.  Does not touch the device."""
        for entry in self._outgoing:
            entry.close_fds()
        self._outgoing.clear()
        self.queued = 0

    def _go_without(self, first: _Outgoing) -> None:
        """The kernel passes no descriptors now: a message goes without, a signal not at all."""
        first.close_fds()
        head = bytes(first.pieces[0])
        if COUNTS.unpack_from(head)[0]:
            first.pieces[0] = memoryview(_without_fds(head))
        else:
            self._outgoing.popleft()
            self.queued -= len(head)

    def _write(self, pieces: Sequence[Frame], rights: _Rights) -> int | None:
        """Writes what goes; the number of bytes, None where it would go without the descriptors alone.

        The kernel counts those that a user has on their way anywhere, and passes no more than a process may have open.
        """
        try:
            return self._socket.sendmsg(pieces, rights, _NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            if rights and error.errno == errno.ETOOMANYREFS:
                return None
            raise LinkBroken(f"the peer closed the connection ({error.strerror})") from error

    def _advance(self, written: int) -> None:
        self.queued -= written
        while written:
            pieces = self._outgoing[0].pieces
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][written:]
                return
            self._outgoing.popleft()


class _Outgoing:
    """A message on its way out: the pieces not yet written, and the descriptors until the first byte is."""

    __slots__ = ("fds", "pieces")

    def __init__(self, pieces: list[memoryview], fds: list[int]) -> None:
        self.pieces = pieces
        self.fds = fds

    def close_fds(self) -> None:
        for descriptor in self.fds:
            os.close(descriptor)
        self.fds = []


def _without_fds(head: bytes) -> bytes:
    """The head of the same message with no descriptors."""
    return COUNTS.pack(COUNTS.unpack_from(head)[0], 0) + head[COUNTS.size :]


def _rights(fds: Sequence[int]) -> _Rights:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _duplicates(fds: Sequence[int]) -> list[int]:
    """All of them, or none where the process has no room for more."""
    made: list[int] = []
    try:
        for descriptor in fds:
            made.append(os.dup(descriptor))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        return []
    return made
