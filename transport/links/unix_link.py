"""AF_UNIX links: the control path between processes of one host, and the only one that carries descriptors.

A message on the stream is: frame count and descriptor count (two u32), the frames' lengths (u64 each), the frames.  All
three are bounded before anything is allocated.  Small frames are read through one buffer; a large one is read in place,
into memory from `sink` or into a block that is used again once nobody looks at it any more.

Descriptors (SCM_RIGHTS) arrive no later than the first byte of their message.

*Small messages* without descriptors may go through memory that both ends map (`ring`), which costs no call of the
system, while their reader is awake.  To one that sleeps they go by the socket, which wakes it.  The order between the
two ways is exact: a record in the ring says how many messages of the socket come before it, a message on the socket how
many of the ring (u64, in front of the lengths).  So neither way ever waits for room in the other.

A frame count of 0 is a signal about the rings (`ring_pair`), its kind in place of the descriptor count.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from transport.errors import LocalProtocolError
from transport.links import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    Frame,
    LinkBroken,
    PeerCredentials,
    Unreached,
    check_frames,
    ring,
)
from transport.links.ring_pair import RingPair
from transport.links.socket_writer import COUNTS, LENGTHS, SocketWriter
from transport.links.spare_blocks import SpareBlocks

MAX_FDS = 16
SOCKET_BUFFER_BYTES = 4 << 20  # a few chunks: the writer need not wait for each wake-up of the reader
_PLACE = struct.Struct("<Q")
_HEAD_BYTES = COUNTS.size + LENGTHS[1].size  # of a message of one frame
_READ_BYTES = 1 << 16
_IN_PLACE_BYTES = 1 << 14  # frames from here on are read in place; smaller ones always fit the read buffer
_READ_BUDGET = 8 << 20  # bytes that one `receive` reads, so that one busy link does not starve the others
_CREDENTIALS = struct.Struct("3i")
_RIGHTS_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)
# Plain integers: arithmetic on the enum members costs more than the calls that they are for.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)

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
        self._heard = inherited  # anything of the peer; our own child is there, whatever it says
        self._writer = SocketWriter(sock)
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
        self._rings = RingPair(self._writer)
        self._place = 0  # how many of the ring come before the message that is being read

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
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        place = b""
        try:
            writer = self._rings.writer
            if writer is not None:
                if not fds and self._rings.passes(writer, frames, sizes, total):
                    return
                writer.beside += 1
                place = _PLACE.pack(writer.count)
            self._writer.send(frames, sizes, total, fds, place)
        except (LinkBroken, ring.RingFault) as error:
            raise self._break(str(error), ended=True) from error

    def own_queued(self) -> None:
        """Copies what is queued, so that the memory of its frames may change.  Does not touch the device."""
        self._writer.own()

    def flush(self) -> None:
        """Writes what can be written.  Raises `LinkBroken`.  Does not block the host."""
        self._check()
        try:
            self._writer.flush()
        except LinkBroken as error:
            raise self._break(str(error), ended=True) from error

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has something to write.  Does not touch the device."""
        return self._writer.waits and self._broken is None

    @property
    def queued_bytes(self) -> int:
        """Bytes that are not written yet.  Does not touch the device."""
        return self._writer.queued

    # receiving --------------------------------------------------------------------------------------------------------

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """The messages that are there, at most `limit`; the last one may come with `taken_fds`.

        Raises `LinkBroken` at the end of file, after all that came before it was returned, and at once for bytes that
        are no message.  Does not block the host.
        """
        self._check()
        if self._taken_fds:
            self._drop_taken_fds()
        messages: list[list[Frame]] = []
        budget = _READ_BUDGET
        drained = False
        if self._start == self._end and self._lengths is None and self._rings.reader is None:
            got, drained = self._read()  # nothing is under way: there is nothing to look for before
            budget -= got
            if drained and got and (alone := self._alone()) is not None:
                self._heard, self._more = True, False
                return [alone]
        while len(messages) < limit:
            message = self._next()
            if message is not None:
                messages.append(message)
                if self._taken_fds:
                    break
                continue
            if drained or self._ended or budget <= 0:
                if self._rings.awake or self._rings.doze():
                    break
                continue  # something has come meanwhile, which nobody rings for
            if messages and self._rings.awake and budget == _READ_BUDGET:
                break  # from the ring: whoever looks there polls the socket too
            got, drained = self._read()
            budget -= got
        self._heard = self._heard or bool(messages)
        full = len(messages) == limit or bool(self._taken_fds)
        self._more = self._ended or (full and self._start < self._end)
        if full and not (self._more or self._rings.awake):
            self._more = not self._rings.doze()
        if self._ended and not messages:
            middle = self._lengths is not None or self._start < self._end
            where = " in the middle of a message" if middle else ""
            raise self._break(f"the peer closed the connection{where}", ended=not middle)
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
        """The next whole message, by whichever way it came, or None."""
        reader = self._rings.reader
        if reader is not None and (message := self._take(reader)) is not None:
            return message
        if self._lengths is None and not self._head():
            return None
        reader = self._rings.reader
        if reader is not None and reader.count != self._place:
            message = self._take(reader)  # what was written before the message on the socket is there by now
            if message is None:
                raise self._break(f"the peer sent a message behind {self._place} of the ring, where {reader.count} are")
            return message
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
        if reader is not None:
            reader.beside += 1
        return message

    def _alone(self) -> list[Frame] | None:
        """The commonest case: what was read is one message of one small frame, and no more."""
        if self._end < _HEAD_BYTES or self._arrived_fds:
            return None
        count, fds = COUNTS.unpack_from(self._buffer)
        if count != 1 or fds:
            return None
        (size,) = LENGTHS[1].unpack_from(self._buffer, COUNTS.size)
        if size != self._end - _HEAD_BYTES or size >= _IN_PLACE_BYTES:
            return None
        self._start = self._end
        return [bytes(self._buffer[_HEAD_BYTES : self._end])]

    def _take(self, reader: ring.RingReader) -> list[Frame] | None:
        """The next message, if that is one of the ring."""
        try:
            return reader.take()
        except ring.RingFault as fault:
            raise self._break(str(fault)) from fault

    def _head(self) -> bool:
        """Reads the head of the next message on the socket, and does what signals say: whether one has begun."""
        while True:
            here = self._end - self._start
            if here < COUNTS.size:
                return False
            count, fds = COUNTS.unpack_from(self._buffer, self._start)
            if count or not self._rings.heed(fds, self._arrived_fds, self._starved):
                break
            self._start += COUNTS.size
        if not 1 <= count <= MAX_FRAMES or fds > MAX_FDS:
            raise self._break(f"the peer sent a message of {count} frames and {fds} descriptors")
        start = self._start + COUNTS.size
        if self._rings.reader is not None:
            start += _PLACE.size
        if self._end < start + LENGTHS[count].size:
            return False
        lengths = LENGTHS[count].unpack_from(self._buffer, start)
        if max(lengths) > MAX_FRAME_BYTES:
            raise self._break(f"the peer sent a frame of {max(lengths)} bytes; {MAX_FRAME_BYTES} are allowed")
        if self._rings.reader is not None:
            (self._place,) = _PLACE.unpack_from(self._buffer, start - _PLACE.size)
        self._start = start + LENGTHS[count].size
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

    # the rings --------------------------------------------------------------------------------------------------------

    @property
    def takes_rings(self) -> bool:
        """Whether small messages may go through shared memory on this machine.  Does not touch the device."""
        return ring.usable()

    def offer_rings(self) -> None:
        """Makes memory for small messages both ways, which the peer uses if it can.  One end offers, once.

        Nothing where there is none to be had.  Raises `LinkBroken`.  Does not block the host.
        """
        self._check()
        self._rings.offer()
        self.flush()

    def glance(self, looks: int) -> bool:
        """Looks into the ring up to so many times: whether something lies there.  Keeps the interpreter.

        Needs no lock.  Does not block the host.
        """
        return self._rings.glance(looks)

    def rouse(self) -> None:
        """Who reads looks into the ring by itself, until `doze`.  Needs no lock.  Does not block the host."""
        self._rings.rouse()

    def doze(self) -> bool:
        """Whether who reads may sleep on `fileno`: whatever comes from now on makes that readable.

        Does not block the host.
        """
        return self._broken is not None or (self._rings.doze() and not self._more)

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
            while self._writer.waits and (left := deadline - time.monotonic()) > 0:
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

    def _break(self, reason: str, *, ended: bool = False) -> LinkBroken:
        """The error of a link that is over; `ended`: because the other end is."""
        self._broken = self._broken or reason
        self._release()
        return Unreached(reason) if ended and not self._heard else LinkBroken(reason)

    def _release(self) -> None:
        self._writer.drop()
        self._large = None
        self._frames = []
        self._drop_taken_fds()
        while self._arrived_fds:
            os.close(self._arrived_fds.popleft())
        self._rings.close()

    def _drop_taken_fds(self) -> None:
        for descriptor in self.taken_fds():
            os.close(descriptor)


def pair() -> tuple[UnixLink, socket.socket]:
    """A link to a child that will be started, and the socket that the child inherits (it makes its own `UnixLink`).

    Close the socket here once the child has it.  Does not block the host.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixLink(ours, inherited=True), theirs
