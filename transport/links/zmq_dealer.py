"""The connecting end of a ZeroMQ link: a DEALER, which speaks first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import zmq

from transport.address import Address
from transport.errors import AddressError
from transport.links import MAX_FRAMES, Frame, LinkBroken, Unreached, check_frames
from transport.links.zmq_socket import LOST, REFUSED, TURNED_AWAY, UNREACHED, Core, ZmqLinkBase, message_frames


class DealerLink(ZmqLinkBase):
    """The connecting end.  `connected` once the handshake is done; a refused connection breaks the link."""

    def __init__(self, address: Address) -> None:
        super().__init__(Core(zmq.DEALER, address))
        self._connected = False
        self._unreached = False  # nobody was there, or somebody who has ended: unless we have heard of him
        self._heard = False
        self._more = False
        try:
            self._core.socket.connect(str(address))
        except zmq.ZMQError as error:
            self._core.close(0)
            raise AddressError(f"cannot connect to {address}: {zmq.strerror(error.errno or 0)}") from error

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

        Raises `LinkBroken`, `Unreached` where nobody listens, or no more.  Does not block the host.
        """
        size = check_frames(frames)
        with self._core.lock:
            self._check()
            self._check_broken()
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
                messages.append(message_frames(parts))
            self._heard |= bool(messages)
            self._settle()
            if not messages:
                self._check_broken()
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
            self._check_broken()

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

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise (Unreached if self._unreached and not self._heard else LinkBroken)(self._broken)

    def _watch(self) -> None:
        for event, _ in self._core.news():
            if event & zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event & (LOST | REFUSED) and self._broken is None:
                self._unreached = not event & TURNED_AWAY  # else by a listener that ends just now, as far as is known
                if self._connected:
                    self._broken = "the peer closed the connection"
                elif event & UNREACHED:
                    self._broken = "the connection was refused"
                else:
                    self._broken = "the connection was closed at once"

    def _settle(self) -> None:
        try:
            self._more = self._core.settle(self._flush)
        except LinkBroken as broken:
            self._broken = self._broken or str(broken)
        if self._broken is not None:
            self._more = True
        if self._more:
            self._core.kick()
