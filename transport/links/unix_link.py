"""AF_UNIX links: the control path between processes of one host, and the only one that carries descriptors.

A message on the stream is: frame count and descriptor count (two u32), the frames' lengths (u64 each), the frames.  All
three are bounded before anything is allocated.  Frames are written straight from the caller's memory; what does not fit
is kept (the views, not copies) and written by `flush`.  Small frames are read through one buffer; a large one is read
in place, into memory from `sink` or into a block that is used again once nobody looks at it any more.

Descriptors (SCM_RIGHTS) arrive no later than the first byte of their message.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from transport.errors import LocalProtocolError
from transport.links import MAX_FRAME_BYTES, MAX_FRAMES, Frame, LinkBroken, PeerCredentials, check_frames
from transport.links.spare_blocks import SpareBlocks

MAX_FDS = 16
SOCKET_BUFFER_BYTES = 4 << 20  # a few chunks: the writer need not wait for each wake-up of the reader
_HEAD = struct.Struct("<II")
_LENGTHS = [struct.Struct(f"<{count}Q") for count in range(MAX_FRAMES + 1)]
_READ_BYTES = 1 << 16
_IN_PLACE_BYTES = 1 << 14  # frames from here on are read in place; smaller ones always fit the read buffer
_READ_BUDGET = 8 << 20  # bytes that one `receive` reads, so that one busy link does not starve the others
_VECTORS = 128  # pieces of one write; the kernel's limit is 1024
_AT_ONCE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_RIGHTS_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)
# Plain integers: arithmetic on the enum members costs more than the calls that they are for.
_NOSIGNAL, _CLOEXEC, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)

_Rights = list[tuple[int, int, "array.array[int]"]]
Sink = Callable[[bytes, int], "memoryview | None"]


class UnixLink:
    """A link over a connected AF_UNIX stream socket, which it owns from now on.

    `inherited`: the socket is one half of a socketpair shared with our own child or parent.  `sink(header, nbytes)`, if
    set, is asked where a large second frame should be read to; it returns writable memory of that size, or None.
    """

    level_triggered = True

    def __init__(self, sock: socket.socket, *, inherited: bool = False) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.inherited = inherited
        self.same_host = inherited  # a path may be a tunnel's end: the hello tells
        self.sink: Sink | None = None
        self._socket = sock
        self._broken: str | None = None
        self._ended = False
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self._queued = 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = 0
        self._end = 0
        self._lengths: tuple[int, ...] | None = None
        self._expected_fds = 0
        self._frames: list[Frame] = []
        self._large: memoryview | None = None
        self._filled = 0
        self._spare = SpareBlocks()
        self._arrived_fds: collections.deque[int] = collections.deque()
        self._taken_fds: list[int] = []
        self._starved = False  # descriptors that were sent to us have found no room, and messages lack theirs
        self._more = False

    def __repr__(self) -> str:
        state = "closed" if self.fileno() < 0 else self._broken or "open"
        return f"<UnixLink {'inherited, ' if self.inherited else ''}{state}>"

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known.  Does not touch the device."""
        return self._broken is None and not self._ended

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed.  Does not touch the device."""
        return self._socket.fileno()

    # sending ----------------------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Frame], fds: Sequence[int] = ()) -> None:
        """Queues one message and writes what goes; the frames' memory must stay as it is while `queued_bytes` is not 0.

        The caller keeps its own `fds`.  Where they have to wait and cannot be duplicated, or the kernel passes no more,
        the message goes without, and its receiver declines what it cannot open.  Raises `LinkBroken`;
        `LocalProtocolError` for a message that no link carries.  Does not block the host.
        """
        self._check()
        total = check_frames(frames)
        if len(fds) > MAX_FDS:
            raise LocalProtocolError(f"{len(fds)} descriptors with one message; a link passes {MAX_FDS}")
        count = len(frames)
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        head = _HEAD.pack(count, len(fds)) + _LENGTHS[count].pack(*sizes)
        if not self._outgoing and (fds or total <= _AT_ONCE_BYTES):
            # The common case: a small message that goes at once needs no views and no queue.
            written = self._write([head, *frames], _rights(fds))
            if written is None:
                fds, head = (), _without_fds(head)
                written = self._write([head, *frames], []) or 0
            if written == total + len(head):
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
        self._queued += total + len(head)
        if written:
            self._advance(written)
        elif len(self._outgoing) == 1:
            self.flush()

    def own_queued(self) -> None:
        """Copies what is queued, so that the memory of its frames may change.  Does not touch the device."""
        for entry in self._outgoing:
            entry.pieces = [memoryview(bytes(piece)) for piece in entry.pieces]

    def flush(self) -> None:
        """Writes what can be written.  Raises `LinkBroken`.  Does not block the host."""
        self._check()
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
                first.close_fds()
                first.pieces[0] = memoryview(_without_fds(bytes(first.pieces[0])))
                continue
            if not written:
                return
            first.close_fds()  # they went with the first byte
            self._advance(written)
            if written < asked:
                return

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
            raise self._break(f"the peer closed the connection ({error.strerror})") from error

    def _advance(self, written: int) -> None:
        self._queued -= written
        while written:
            pieces = self._outgoing[0].pieces
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][written:]
                return
            self._outgoing.popleft()

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has something to write.  Does not touch the device."""
        return bool(self._outgoing) and self._broken is None

    @property
    def queued_bytes(self) -> int:
        """Bytes that are not written yet.  Does not touch the device."""
        return self._queued

    # receiving --------------------------------------------------------------------------------------------------------

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """The messages that are there, at most `limit`; the last one may come with `taken_fds`.

        Raises `LinkBroken` at the end of file, after all that came before it was returned, and at once for bytes that
        are no message.  Does not block the host.
        """
        self._check()
        self._drop_taken_fds()
        messages: list[list[Frame]] = []
        budget = _READ_BUDGET
        drained = False
        while len(messages) < limit:
            message = self._next() if self._start < self._end or self._lengths is not None else None
            if message is not None:
                messages.append(message)
                if self._taken_fds:
                    break
                continue
            if drained or self._ended or budget <= 0:
                break
            got, drained = self._read()
            budget -= got
        self._more = self._ended or ((len(messages) == limit or bool(self._taken_fds)) and self._start < self._end)
        if self._ended and not messages:
            middle = self._lengths is not None or self._start < self._end
            raise self._break("the peer closed the connection" + (" in the middle of a message" if middle else ""))
        return messages

    def taken_fds(self) -> list[int]:
        """The descriptors that came with the last message that `receive` returned; the caller closes them.

        Fewer than were sent where this process has no room for them.  What is not taken before the next `receive` is
        closed by it.  Does not touch the device.
        """
        taken, self._taken_fds = self._taken_fds, []
        return taken

    @property
    def readable(self) -> bool:
        """Whether messages, or the end of file, are already here.  Does not touch the device."""
        return self._more and self._broken is None

    def _read(self) -> tuple[int, bool]:
        """Reads once: the number of bytes, and whether the socket has no more for now."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < _READ_BYTES // 2:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        targets = [self._buffer[self._end :]]
        missing = 0
        if self._large is not None:
            targets.insert(0, self._large[self._filled :])
            missing = len(targets[0])
        try:
            got, rights, flags, _ = self._socket.recvmsg_into(targets, _RIGHTS_BYTES, _CLOEXEC)
        except BlockingIOError:
            return 0, True
        except ConnectionError:
            self._ended = True
            return 0, True
        except OSError as error:
            raise self._break(f"reading failed ({error.strerror})") from error
        came = 0
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                came += len(data) // 4
                self._arrived_fds.extend(array.array("i", data[: len(data) // 4 * 4]))
        if len(self._arrived_fds) > 4 * MAX_FDS or (flags & _TRUNCATED and came >= MAX_FDS):
            raise self._break("the peer sent more descriptors than a message may have")
        self._starved |= bool(flags & _TRUNCATED)  # this process has no room for more
        if got == 0:
            self._ended = True
            return 0, True
        self._filled += min(got, missing)
        self._end += max(0, got - missing)
        # A short read may also end where descriptors lie; the poll that follows finds the rest.
        return got, not rights and got < missing + len(targets[-1])

    def _next(self) -> list[Frame] | None:
        """The next whole message of what was read, or None."""
        if self._lengths is None and not self._head():
            return None
        lengths = self._lengths or ()
        while len(self._frames) < len(lengths):
            size = lengths[len(self._frames)]
            here = self._end - self._start
            if size < _IN_PLACE_BYTES:
                if here < size:
                    return None
                self._frames.append(bytes(self._buffer[self._start : self._start + size]))
                self._start += size
                continue
            if self._large is None:
                self._large, self._filled = self._destination(size), 0
            part = min(here, size - self._filled)
            if part:
                self._large[self._filled : self._filled + part] = self._buffer[self._start : self._start + part]
                self._start += part
                self._filled += part
            if self._filled < size:
                return None
            self._frames.append(self._large)
            self._large = None
        if len(self._arrived_fds) < self._expected_fds and not self._starved:
            raise self._break("the peer announced descriptors that did not come")
        self._taken_fds += [self._arrived_fds.popleft() for _ in range(min(self._expected_fds, len(self._arrived_fds)))]
        message, self._frames, self._lengths = self._frames, [], None
        return message

    def _head(self) -> bool:
        here = self._end - self._start
        if here < _HEAD.size:
            return False
        count, fds = _HEAD.unpack_from(self._buffer, self._start)
        if not 1 <= count <= MAX_FRAMES or fds > MAX_FDS:
            raise self._break(f"the peer sent a message of {count} frames and {fds} descriptors")
        size = _HEAD.size + 8 * count
        if here < size:
            return False
        lengths = _LENGTHS[count].unpack_from(self._buffer, self._start + _HEAD.size)
        if max(lengths) > MAX_FRAME_BYTES:
            raise self._break(f"the peer sent a frame of {max(lengths)} bytes; {MAX_FRAME_BYTES} are allowed")
        self._start += size
        self._lengths, self._expected_fds = lengths, fds
        return True

    def _destination(self, size: int) -> memoryview:
        if self.sink is not None and len(self._frames) == 1:
            header = self._frames[0]
            memory = self.sink(header if isinstance(header, bytes) else bytes(header), size)
            if memory is not None:
                view = memory.cast("B")
                if len(view) != size or view.readonly:
                    raise LocalProtocolError(f"the sink gave {len(view)} bytes for a frame of {size}")
                return view
        return self._spare.take(size)

    # the end ----------------------------------------------------------------------------------------------------------

    def credentials(self) -> PeerCredentials | None:
        """The peer's process, user and group as the kernel noted them when the sockets were connected.

        For a socketpair that is the process that made the pair, on both ends.  Does not touch the device.
        """
        if self.fileno() < 0:
            return None
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return PeerCredentials(*_CREDENTIALS.unpack(raw))

    def close(self, linger: float = 0.0) -> None:
        """Ends the link.  Blocks the host at most `linger` seconds while queued bytes are written.  Idempotent."""
        if self.fileno() < 0:
            return
        deadline = time.monotonic() + linger
        with contextlib.suppress(LinkBroken):
            while self._outgoing and (left := deadline - time.monotonic()) > 0:
                waiting = select.poll()
                waiting.register(self.fileno(), select.POLLOUT)
                waiting.poll(left * 1e3)
                self.flush()
        self._broken = self._broken or "this end is closed"
        self._socket.close()
        self._release()

    def _check(self) -> None:
        if self._broken is not None:
            raise LinkBroken(self._broken)

    def _break(self, reason: str) -> LinkBroken:
        self._broken = self._broken or reason
        self._release()
        return LinkBroken(reason)

    def _release(self) -> None:
        for entry in self._outgoing:
            entry.close_fds()
        self._outgoing.clear()
        self._queued = 0
        self._large = None
        self._frames = []
        self._drop_taken_fds()
        while self._arrived_fds:
            os.close(self._arrived_fds.popleft())

    def _drop_taken_fds(self) -> None:
        for descriptor in self.taken_fds():
            os.close(descriptor)


def _without_fds(head: bytes) -> bytes:
    """The head of the same message with no descriptors."""
    return _HEAD.pack(_HEAD.unpack_from(head)[0], 0) + head[_HEAD.size :]


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


def pair() -> tuple[UnixLink, socket.socket]:
    """A link to a child that will be started, and the socket that the child inherits (it makes its own `UnixLink`).

    Close the socket here once the child has it.  Does not block the host.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixLink(ours, inherited=True), theirs
