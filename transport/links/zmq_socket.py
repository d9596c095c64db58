"""One ZeroMQ socket: what its links and listeners share.

What ZeroMQ does quietly is made loud here:

- A DEALER that lost its connection would reconnect and send the rest of a session to whoever answers.  The reconnect
  interval is an hour and a socket monitor tells of the loss, so that the link breaks first; what had arrived is read.
- A ROUTER drops what it cannot route.  ROUTER_MANDATORY makes it say so, and what must wait waits here, in order.
- ZMQ_FD is edge-triggered, and any call may eat the edge.  Every call ends with a look at EVENTS (`Core.settle`), and
  what is left over is put on an event descriptor: `fileno` of a link or listener stays readable until it is taken.
- Termination waits for unsent messages: LINGER is bounded on every socket, and the context is left to the exit.

One lock per socket: the links of a listener share its ROUTER.
"""

from __future__ import annotations

import collections
import os
import select
import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.address import Address
from transport.links import MAX_FRAME_BYTES, MAX_FRAMES, Frame, LinkBroken, PeerCredentials

ZERO_COPY_BYTES = 1 << 16  # below this a copy is cheaper than telling Python that a frame has been written
HIGH_WATER_MESSAGES = 1000
READ_AHEAD_MESSAGES = 32  # that ZeroMQ holds for a slow reader: with chunks of 4 MiB, 128 MiB of each connection
CONNECT_MILLISECONDS = 10_000
MAX_LINGER_SECONDS = 10.0
_NO_RECONNECT_MILLISECONDS = 3_600_000  # not -1, which would throw away what has arrived but was not read yet
LOST = zmq.Event.DISCONNECTED
UNREACHED = zmq.Event.CLOSED | zmq.Event.CONNECT_RETRIED
TURNED_AWAY = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
"""By somebody who will do so again: he speaks ZeroMQ otherwise, or knows us not.  Of who speaks something else ZeroMQ
does not say that: he may be a listener that ends, and is tried again."""
REFUSED = UNREACHED | TURNED_AWAY | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = LOST | REFUSED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.ACCEPTED

_context_lock = threading.Lock()
_context: tuple[int, zmq.Context[zmq.Socket[bytes]]] | None = None


def _shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's context.  A forked child makes its own: the parent's threads are not there."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid():
            context = zmq.Context()
            context.set(zmq.MAX_SOCKETS, 16384)  # a link takes three
            _context = (os.getpid(), context)
        return _context[1]


class Core:
    """One socket with its monitor, the descriptor that stands for all of it, and its lock."""

    def __init__(self, kind: int, address: Address) -> None:
        context = _shared_context()
        self.lock = threading.Lock()
        self.socket = context.socket(kind)
        self.socket.copy_threshold = ZERO_COPY_BYTES
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, READ_AHEAD_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MILLISECONDS)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MILLISECONDS)
        self.socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        self._monitor = self.socket.get_monitor_socket(int(_WATCHED))
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kicked = False
        self._poller = select.epoll()
        for descriptor in (self.socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD), self._kick):
            self._poller.register(int(descriptor), select.EPOLLIN)
        self.news()  # a socket signals only once somebody has looked and found nothing

    def fileno(self) -> int:
        return -1 if self.socket.closed else self._poller.fileno()

    def news(self) -> list[tuple[zmq.Event, int]]:
        """What the monitor has to tell: (event, descriptor), in order.  Under the lock."""
        news: list[tuple[zmq.Event, int]] = []
        while True:
            try:
                parts = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return news
            event = parse_monitor_message(parts)
            news.append((zmq.Event(event["event"]), int(event["value"])))

    def read(self) -> list[zmq.Frame] | None:
        """One message, or None.  Of one with too many parts some, but too many still.  Under the lock.

        ZeroMQ itself takes a message in as a whole, with the size of each part bounded but not their number.
        """
        try:
            part = self.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        parts = [part]
        while part.more:
            part = self.socket.recv(copy=False)
            if len(parts) < MAX_FRAMES + 2:  # with the routing id, one too many
                parts.append(part)
        return parts

    def write(self, frames: Sequence[Frame], tracked: TrackedBytes) -> bool:
        """Hands a whole message over; False, with nothing done, where it has to wait.  Under the lock."""
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            flags = zmq.DONTWAIT | (zmq.SNDMORE if number < last else 0)
            size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            try:
                if size >= ZERO_COPY_BYTES:
                    tracked.add(size, self.socket.send(frame, flags, copy=False, track=True))
                else:
                    self.socket.send(frame, flags)
            except zmq.Again:
                if number:
                    raise LinkBroken("the connection ended in the middle of a message") from None
                return False
            except zmq.ZMQError as error:
                raise LinkBroken(f"the peer is not reachable any more ({error.strerror})") from error
            except RuntimeError as error:  # from pyzmq: its own helper thread is gone before ours, at exit
                raise LinkBroken("this process is ending") from error
        return True

    def settle(self, flush: Callable[[], None]) -> bool:
        """Ends every use of the socket: flushes what can go, and sees to it that `fileno` tells of what is left.

        Returns whether there are messages to read.  Under the lock.
        """
        if self.events() & zmq.POLLOUT:
            flush()
        return bool(self.events() & zmq.POLLIN)

    def events(self) -> int:
        return int(self.socket.getsockopt(zmq.EVENTS))

    def kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            os.eventfd_write(self._kick, 1)

    def unkick(self) -> None:
        if self._kicked:
            self._kicked = False
            os.eventfd_read(self._kick)

    def close(self, linger: float) -> None:
        if self.socket.closed:
            return
        self._poller.close()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=int(min(linger, MAX_LINGER_SECONDS) * 1e3))
        os.close(self._kick)


class TrackedBytes:
    """Bytes of frames that ZeroMQ still holds without a copy."""

    def __init__(self) -> None:
        self._held: collections.deque[tuple[int, zmq.MessageTracker]] = collections.deque()
        self._bytes = 0

    def add(self, size: int, tracker: zmq.MessageTracker | None) -> None:
        if tracker is not None:
            self._held.append((size, tracker))
            self._bytes += size

    def bytes(self) -> int:
        while self._held and self._held[0][1].done:
            self._bytes -= self._held.popleft()[0]
        return self._bytes


class ZmqLinkBase:
    """What both kinds of link share: the queue of what could not be passed on yet, and the end."""

    same_host = False  # a tunnel may lie between: the hello tells
    level_triggered = False
    inherited = False

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tracked = TrackedBytes()
        self._backlog: collections.deque[tuple[int, list[Frame]]] = collections.deque()
        self._backlog_bytes = 0
        self._broken: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self._closed else self._broken or 'open'}>"

    def _enqueue(self, frames: list[Frame], size: int) -> None:
        """Passes a message on, behind those that wait.  Under the lock."""
        if self._backlog or not self._core.write(frames, self._tracked):
            self._backlog.append((size, frames))
            self._backlog_bytes += size

    def _flush(self) -> None:
        while self._backlog and self._core.write(self._backlog[0][1], self._tracked):
            self._backlog_bytes -= self._backlog.popleft()[0]

    def _check(self) -> None:
        if self._closed:
            raise LinkBroken("this end is closed")

    @property
    def wants_write(self) -> bool:
        """Never: what waits goes out when the link, or its listener, becomes readable.  Does not touch the device."""
        return False

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait here, or that ZeroMQ reads from the caller's memory.  Does not touch the device."""
        with self._core.lock:
            return self._backlog_bytes + self._tracked.bytes()

    def credentials(self) -> PeerCredentials | None:
        """None: ZeroMQ does not tell.  Does not touch the device."""
        return None


def message_frames(parts: Sequence[zmq.Frame]) -> list[Frame]:
    """A message's parts as frames: small ones copied, large ones as ZeroMQ holds them.  Does not touch the device."""
    return [part.buffer if len(part) >= ZERO_COPY_BYTES else part.bytes for part in parts]
