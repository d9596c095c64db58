"""ZeroMQ links: DEALER to ROUTER over TCP loopback or ipc.

What ZeroMQ does quietly is made loud here:

- A DEALER that lost its connection would reconnect and send the rest of a session to whoever answers.  The reconnect
  interval is an hour and a socket monitor tells of the loss, so that the link breaks first; what had arrived is read.
- A ROUTER drops what it cannot route.  ROUTER_MANDATORY makes it say so, and what has to wait waits here, in order.
- ZMQ_FD is edge-triggered, and any call may eat the edge.  Every call ends with a look at EVENTS (`_Core.settle`), and
  what is left over is put on an event descriptor: `fileno` of a link or listener stays readable until it is taken.
- Termination waits for unsent messages: LINGER is bounded on every socket, and the context is left to the process's end.

One lock per socket: the links of a listener share its ROUTER.  A DEALER speaks first: a listener knows of a peer when
its first message arrives.  The only module that imports zmq.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.address import Address, parse_address
from transport.errors import AddressError
from transport.links import MAX_FRAME_BYTES, MAX_FRAMES, Frame, Link, LinkBroken, PeerCredentials, check_frames

ZERO_COPY_BYTES = 1 << 16  # below this a copy is cheaper than telling Python that a frame has been written
HIGH_WATER_MESSAGES = 1000
CONNECT_MILLISECONDS = 10_000
MAX_LINGER_SECONDS = 10.0
_NO_RECONNECT_MILLISECONDS = 3_600_000  # not -1, which would throw away what has arrived but was not read yet
_PUMP_MESSAGES = 256
_LOST = zmq.Event.DISCONNECTED
_REFUSED = (
    zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = _LOST | _REFUSED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.ACCEPTED

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


class _Core:
    """One socket with its monitor, the descriptor that stands for all of it, and its lock."""

    def __init__(self, kind: int, address: Address) -> None:
        context = _shared_context()
        self.lock = threading.Lock()
        self.socket = context.socket(kind)
        self.socket.copy_threshold = ZERO_COPY_BYTES
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
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
        """One message, or None.  Under the lock."""
        try:
            parts = [self.socket.recv(zmq.DONTWAIT, copy=False)]
        except zmq.Again:
            return None
        while parts[-1].more:
            parts.append(self.socket.recv(copy=False))
        return parts

    def write(self, frames: Sequence[Frame], tracked: _Tracked) -> bool:
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


class _Tracked:
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


class _ZmqLink:
    """What both kinds of link share: the queue of what could not be passed on yet, and the end."""

    same_host = True
    inherited = False

    def __init__(self, core: _Core) -> None:
        self._core = core
        self._tracked = _Tracked()
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


class DealerLink(_ZmqLink):
    """The connecting end.  `connected` once the handshake is done; a refused connection breaks the link."""

    def __init__(self, address: Address) -> None:
        super().__init__(_Core(zmq.DEALER, address))
        self._address = address
        self._connected = False
        self._more = False
        try:
            self._core.socket.connect(str(address))
        except zmq.ZMQError as error:
            self._core.close(0)
            raise AddressError(f"cannot connect to {address}: {error.strerror}") from error

    @property
    def connected(self) -> bool:
        """Whether the other end has answered and was not lost since.  Does not touch the device."""
        with self._core.lock:
            if not self._closed:
                self._watch()
                self._settle()
            return self._connected and not self._closed and self._broken is None

    def fileno(self) -> int:
        """The descriptor to poll for reading, -1 when closed.  Does not touch the device."""
        return self._core.fileno()

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues one message; large frames are not copied and must stay as they are while `queued_bytes` is not 0.

        Raises `LinkBroken`.  Does not block the host.
        """
        size = check_frames(frames)
        with self._core.lock:
            self._check()
            if self._broken is not None:
                raise LinkBroken(self._broken)
            self._enqueue(list(frames), size)
            self._settle()

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """The messages that are there, at most `limit`.  Raises `LinkBroken` after the last one of a lost connection.

        Does not block the host.
        """
        with self._core.lock:
            self._check()
            self._core.unkick()
            self._watch()  # before reading: then all that came before a loss is read before it is told
            messages: list[list[Frame]] = []
            while len(messages) < limit and (parts := self._core.read()) is not None:
                if len(parts) > MAX_FRAMES:
                    self._broken = f"the peer sent a message of {len(parts)} frames"
                    break
                messages.append(_frames(parts))
            self._settle()
            if not messages and self._broken is not None:
                raise LinkBroken(self._broken)
            return messages

    @property
    def readable(self) -> bool:
        """Whether `receive` has something to return or to raise.  Does not touch the device."""
        return self._more and not self._closed

    def flush(self) -> None:
        """Passes on what waits.  Raises `LinkBroken`.  Does not block the host."""
        with self._core.lock:
            self._check()
            self._settle()
            if self._broken is not None:
                raise LinkBroken(self._broken)

    def close(self, linger: float = 0.0) -> None:
        """Ends the link.  Blocks the host at most `linger` seconds, and only for what ZeroMQ has not taken yet; ZeroMQ
        itself writes in the background, as long again.  Idempotent.
        """
        with self._core.lock:
            if self._closed:
                return
            deadline = time.monotonic() + linger
            with contextlib.suppress(LinkBroken):
                self._flush()
                while self._backlog and self._broken is None and (left := deadline - time.monotonic()) > 0:
                    self._core.socket.poll(int(min(left, 0.1) * 1e3) + 1, zmq.POLLOUT)
                    self._watch()
                    self._flush()
            self._closed = True
            self._backlog.clear()
            self._backlog_bytes = 0
            self._core.close(0 if self._broken is not None else linger)

    def _watch(self) -> None:
        for event, _ in self._core.news():
            if event & zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event & (_LOST | _REFUSED) and self._broken is None:
                what = "the peer closed the connection to" if self._connected else "nobody answers on"
                self._broken = f"{what} {self._address}"

    def _settle(self) -> None:
        try:
            self._more = self._core.settle(self._flush)
        except LinkBroken as broken:
            self._broken = self._broken or str(broken)
        if self._broken is not None:
            self._more = True
        if self._more:
            self._core.kick()


class RouterLink(_ZmqLink):
    """The accepted end: one peer of a listener's ROUTER.

    `_wire` duplicates the connection's own descriptor, by which `close` can end it: ZeroMQ has no call for that.
    """

    def __init__(self, listener: ZmqListener, routing_id: bytes, wire: socket.socket | None) -> None:
        super().__init__(listener._core)
        self._listener = listener
        self._routing_id = routing_id
        self._wire = wire
        self._inbox: collections.deque[list[Frame]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False

    @property
    def connected(self) -> bool:
        """Whether the connection was not lost, as far as is known.  Does not touch the device."""
        return not self._closed and self._broken is None

    def fileno(self) -> int:
        """The descriptor to poll for reading, -1 when closed; the listener's has to be polled too.

        Does not touch the device.
        """
        return self._wake

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues one message; large frames are not copied and must stay as they are while `queued_bytes` is not 0.

        Raises `LinkBroken`.  Does not block the host.
        """
        size = check_frames(frames)
        with self._core.lock:
            self._check()
            if self._broken is not None:
                raise LinkBroken(self._broken)
            try:
                self._enqueue([self._routing_id, *frames], size)
            except LinkBroken as broken:
                self._lose(str(broken))
                raise
            finally:
                self._listener._settle()

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """The messages that are there, at most `limit`.  Raises `LinkBroken` after the last one of a lost connection.

        Does not block the host.
        """
        with self._core.lock:
            self._check()
            if not self._inbox and self._broken is None:
                self._listener._pump(_PUMP_MESSAGES)
            messages = [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]
            if not messages and self._broken is not None:
                raise LinkBroken(self._broken)
            if self._woken and not self._inbox and self._broken is None:
                self._woken = False
                os.eventfd_read(self._wake)
            return messages

    @property
    def readable(self) -> bool:
        """Whether `receive` has something to return or to raise.  Does not touch the device."""
        return not self._closed and (bool(self._inbox) or self._broken is not None)

    def flush(self) -> None:
        """Passes on what waits.  Raises `LinkBroken`.  Does not block the host."""
        with self._core.lock:
            self._check()
            if self._broken is None:
                self._listener._settle()
            if self._broken is not None:
                raise LinkBroken(self._broken)

    def close(self, linger: float = 0.0) -> None:
        """Ends the link, and cuts the connection: at once, or `linger` seconds later if the peer has not left by then.

        Blocks the host at most `linger` seconds, and only for what ZeroMQ has not taken yet.  Idempotent.
        """
        deadline = time.monotonic() + linger
        while linger > 0 and self._backlog_bytes and self._broken is None and time.monotonic() < deadline:
            with self._core.lock:  # let go of in between: the other links of the listener go on
                if self._closed:
                    return
                self._core.socket.poll(5, zmq.POLLOUT)
                self._listener._settle()
        with self._core.lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            self._backlog.clear()
            self._backlog_bytes = 0
            os.close(self._wake)
            self._wake = -1
            self._listener._ended(self, 0.0 if self._broken is not None else linger)

    def _deliver(self, frames: list[Frame]) -> None:
        self._inbox.append(frames)
        self._notify()

    def _lose(self, reason: str) -> None:
        """The connection is gone.  Under the lock."""
        self._broken = self._broken or reason
        self._backlog.clear()
        self._backlog_bytes = 0
        self._drop_wire()
        if not self._closed:
            self._notify()

    def _notify(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _drop_wire(self, *, cut: bool = False) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            if cut:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
            wire.close()


class ZmqListener:
    """A ROUTER and its links.  After `close` it answers no new peer; the socket ends with its last link."""

    def __init__(self, address: Address) -> None:
        self._core = _Core(zmq.ROUTER, address)
        self._core.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._links: dict[bytes, RouterLink] = {}
        self._by_descriptor: dict[int, RouterLink] = {}
        self._gone: set[int] = set()
        self._dying: list[RouterLink] = []
        self._new: list[Link] = []
        self._leaving: list[tuple[float, RouterLink]] = []
        self._listening = True
        try:
            self._core.socket.bind(str(address))
        except zmq.ZMQError as error:
            self._core.close(0)
            raise AddressError(
                f"cannot listen on {address}: {error.strerror}; choose another port, or 0 for a free one"
            ) from error
        bound = self._core.socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address = bound.decode().rstrip("\0") if isinstance(bound, bytes) else str(address)

    def fileno(self) -> int:
        """The descriptor to poll for reading, for as long as a link lives; -1 after that.  Does not touch the device."""
        return self._core.fileno()

    def accept(self) -> list[Link]:
        """The links that are new since the last call; each has its first message.  Does not block the host."""
        with self._core.lock:
            if not self._core.socket.closed:
                self._pump(_PUMP_MESSAGES)
            new, self._new = self._new, []
            return new

    def pump(self) -> None:
        """Moves what arrived into the links, and passes on what waits.  Does not block the host."""
        with self._core.lock:
            if not self._core.socket.closed:
                self._pump(_PUMP_MESSAGES)

    def close(self) -> None:
        """Stops listening; links live on, for as long as a link or the listener is still polled.  Idempotent.

        Does not block the host.
        """
        with self._core.lock:
            self._listening = False
            for link in self._new:
                self._forget(link)  # type: ignore[arg-type]
            self._new = []
            self._end_if_unused()

    # under the lock ---------------------------------------------------------------------------------------------------

    def _pump(self, limit: int) -> None:
        self._core.unkick()
        self._watch()
        for _ in range(limit):
            parts = self._core.read()
            if parts is None:
                for link in self._dying:  # only now: what came before the loss has been read
                    link._lose("the peer closed the connection")
                    self._forget(link)
                self._dying = []
                break
            self._route(parts)
        now = time.monotonic()
        for due, link in [entry for entry in self._leaving if entry[0] <= now]:
            self._leaving.remove((due, link))
            link._drop_wire(cut=True)
        self._settle()

    def _watch(self) -> None:
        for event, descriptor in self._core.news():
            if event & zmq.Event.ACCEPTED:
                self._gone.discard(descriptor)
            elif event & _LOST:
                link = self._by_descriptor.pop(descriptor, None)
                if link is not None:
                    self._dying.append(link)
                else:
                    self._gone.add(descriptor)

    def _route(self, parts: list[zmq.Frame]) -> None:
        routing_id = parts[0].bytes
        link = self._links.get(routing_id)
        if link is None:
            link = self._admit(routing_id, parts[0])
        if link._closed or link._broken is not None:
            return
        if not 1 <= len(parts) - 1 <= MAX_FRAMES:
            link._drop_wire(cut=True)
            link._lose(f"the peer sent a message of {len(parts) - 1} frames")
            return
        link._deliver(_frames(parts[1:]))

    def _admit(self, routing_id: bytes, part: zmq.Frame) -> RouterLink:
        descriptor = int(part.get(zmq.SRCFD))
        wire: socket.socket | None = None
        with contextlib.suppress(OSError):
            wire = socket.socket(fileno=os.dup(descriptor))
        # ZeroMQ tells of a loss before it closes the descriptor: if nothing is told now, we hold the right one.
        self._watch()
        link = RouterLink(self, routing_id, wire)
        self._links[routing_id] = link
        if descriptor in self._gone:
            link._drop_wire()
            self._dying.append(link)
        else:
            self._by_descriptor[descriptor] = link
        if self._listening:
            self._new.append(link)
        else:
            self._forget(link, cut=True)
        return link

    def _settle(self) -> None:
        def flush() -> None:
            for link in list(self._links.values()):
                if link._backlog and link._broken is None:
                    try:
                        link._flush()
                    except LinkBroken as broken:
                        link._lose(str(broken))

        if self._core.settle(flush) or self._dying:
            self._core.kick()

    def _ended(self, link: RouterLink, linger: float) -> None:
        """A link was closed by its user.  It stays known while its connection lasts, so that nobody takes its place."""
        if linger > 0 and link._wire is not None:
            self._leaving.append((time.monotonic() + linger, link))
        else:
            link._drop_wire(cut=True)
        self._end_if_unused(linger)

    def _forget(self, link: RouterLink, *, cut: bool = False) -> None:
        link._drop_wire(cut=cut)
        if self._links.get(link._routing_id) is link:
            del self._links[link._routing_id]
        self._leaving = [entry for entry in self._leaving if entry[1] is not link]

    def _end_if_unused(self, linger: float = 0.0) -> None:
        if self._listening or any(not link._closed for link in self._links.values()):
            return
        self._core.close(linger)
        for link in self._links.values():
            link._drop_wire()
        self._links.clear()


def _frames(parts: Sequence[zmq.Frame]) -> list[Frame]:
    return [part.buffer if len(part) >= ZERO_COPY_BYTES else part.bytes for part in parts]


def connect(address: str | Address) -> DealerLink:
    """Begins to connect.  The link breaks if nobody answers; it may be used at once.  Does not block the host.

    Raises `AddressError` for an address that ZeroMQ refuses.
    """
    return DealerLink(parse_address(address))


def listen(address: str | Address) -> ZmqListener:
    """Listens; a port of 0 is resolved in `.address`.  Raises `AddressError` where it is in use.

    Does not block the host.
    """
    return ZmqListener(parse_address(address))
