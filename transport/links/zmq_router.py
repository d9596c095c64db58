"""The listening end: one ROUTER, told apart into a link for each peer by routing id.

A listener knows of a peer when its first message arrives.  All links share the ROUTER and its lock; whoever touches it
moves what has arrived into the links it is for, and each link wakes its own reader.

ZeroMQ does not say who has come by ipc (`credentials`), so there the permissions of the path are all that keeps other
users out; where the kernel's word is wanted, use ``unix://``.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

import zmq

from transport.address import Address
from transport.errors import AddressError
from transport.links import MAX_FRAMES, Frame, Link, LinkBroken, check_frames
from transport.links.zmq_socket import LOST, Core, ZmqLinkBase, message_frames

_PUMP_MESSAGES = 256


class RouterLink(ZmqLinkBase):
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
            if not self._closed:
                linger = 0.0 if self._broken is not None else linger
                self._end(linger)
                self._listener._end_if_unused(linger)

    def _end(self, linger: float) -> None:
        """Nobody uses it any more.  It stays known while its connection lasts: what else that brings is dropped.

        Under the lock.
        """
        self._closed = True
        self._inbox.clear()
        self._backlog.clear()
        self._backlog_bytes = 0
        os.close(self._wake)
        self._wake = -1
        self._listener._leave(self, linger)

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


@contextlib.contextmanager
def _owner_only(address: Address) -> Iterator[None]:
    """Keeps other users from an ipc socket from its first moment on: ZeroMQ binds and listens in one step."""
    if address.scheme != "ipc":
        yield
        return
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)


class ZmqListener:
    """A ROUTER and its links.  After `close` it answers no new peer; the socket ends with its last link."""

    def __init__(self, address: Address) -> None:
        self._core = Core(zmq.ROUTER, address)
        self._core.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._links: dict[bytes, RouterLink] = {}
        self._by_descriptor: dict[int, RouterLink] = {}
        self._gone: set[int] = set()
        self._dying: list[RouterLink] = []
        self._new: list[RouterLink] = []
        self._leaving: list[tuple[float, RouterLink]] = []
        self._listening = True
        try:
            with _owner_only(address):
                self._core.socket.bind(str(address))
        except zmq.ZMQError as error:
            self._core.close(0)
            remedy = "choose another port, or 0 for a free one" if address.scheme == "tcp" else "choose another path"
            raise AddressError(f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; {remedy}") from error
        bound = self._core.socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address = bound.decode().rstrip("\0") if isinstance(bound, bytes) else str(address)

    def fileno(self) -> int:
        """The descriptor to poll for reading for as long as a link lives; -1 after that.  Does not touch the device."""
        return self._core.fileno()

    def accept(self) -> list[Link]:
        """The links that are new since the last call; each has its first message.  Does not block the host."""
        with self._core.lock:
            if not self._core.socket.closed:
                self._pump(_PUMP_MESSAGES)
            new, self._new = self._new, []
            return [*new]

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
            turned_away, self._new = self._new, []
            for link in turned_away:
                link._end(0.0)
            self._end_if_unused()

    # under the lock ---------------------------------------------------------------------------------------------------

    def _pump(self, limit: int) -> None:
        self._core.unkick()
        try:
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
        finally:
            self._settle()  # else the descriptor might never tell again of what is left

    def _watch(self) -> None:
        for event, descriptor in self._core.news():
            if event & zmq.Event.ACCEPTED:
                self._gone.discard(descriptor)
            elif event & LOST:
                link = self._by_descriptor.pop(descriptor, None)
                if link is not None:
                    self._dying.append(link)
                else:
                    self._gone.add(descriptor)

    def _route(self, parts: list[zmq.Frame]) -> None:
        routing_id = parts[0].bytes
        link = self._links.get(routing_id) or self._admit(routing_id, parts[0])
        if link is None or link._closed or link._broken is not None:
            return
        if not 1 <= len(parts) - 1 <= MAX_FRAMES:
            link._drop_wire(cut=True)
            link._lose(f"the peer sent a message of {len(parts) - 1} frames")
            return
        link._deliver(message_frames(parts[1:]))

    def _admit(self, routing_id: bytes, part: zmq.Frame) -> RouterLink | None:
        """A new peer's link; None for a stranger whose bytes ZeroMQ takes for those of its first version, which names
        nobody: what he sends is dropped."""
        try:
            descriptor = int(part.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None
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
            link._end(0.0)
        return link

    def _settle(self) -> None:
        def flush() -> None:
            for link in list(self._links.values()):
                if link._backlog and link._broken is None:
                    try:
                        link._flush()
                    except LinkBroken as broken:
                        link._lose(str(broken))

        if self._core.settle(flush) or self._dying or self._new:  # whoever pumped may not be who accepts
            self._core.kick()

    def _leave(self, link: RouterLink, linger: float) -> None:
        """Cuts the connection of a link that nobody uses any more, at once or later."""
        if linger > 0 and link._wire is not None:
            self._leaving.append((time.monotonic() + linger, link))
        else:
            link._drop_wire(cut=True)

    def _forget(self, link: RouterLink) -> None:
        link._drop_wire()
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
