"""Incoming transfers, of both directions: requests of the peer's calls and replies to ours.

The tables (`Calls`, `Serving`) own the transfers; this is the way that bytes and the driver's facts take to them, and
that declines take back.  Bytes for a call that has ended are swallowed, and a descriptor among them is given back.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from transport.calls import Calls
from transport.errors import RemoteProtocolError
from transport.events import Key, NoMemory, OpenFailed, Pulled, ReleaseSlot, Side, StreamsGranted
from transport.limits import STAGING
from transport.messages import Data, Decline
from transport.outbox import Outbox
from transport.serving import Serving
from transport.transfers import IncomingTransfer
from transport.wire import MAX_REASON_BYTES, Malformed, clip


class Receiver:
    """Routes bytes and facts to the transfers of both tables."""

    def __init__(self, calls: Calls, serving: Serving, outbox: Outbox) -> None:
        self._calls = calls
        self._serving = serving
        self._outbox = outbox

    def data(self, message: Data, now: float) -> None:
        """Bytes, or a descriptor, have come.  Raises `RemoteProtocolError` or `Malformed`."""
        reply = message.side is Side.REPLY
        if message.call > (self._calls if reply else self._serving).last:
            raise RemoteProtocolError(f"data of call {message.call}, which was never made")
        key = Key(message.call, reply, message.side)
        transfer = self._find(key)
        if transfer is None:
            if (self._calls if reply else self._serving).known(message.call):
                raise RemoteProtocolError(f"data of call {message.call} where none was due")
            if message.channel != STAGING:
                self._outbox.emit(ReleaseSlot(key, message.buffer, message.payload))
            return
        for pull in transfer.receive(message.buffer, message.offset, message.channel, message.payload):
            self._outbox.emit(pull)
        self._advance(key, now)

    def fact(self, fact: StreamsGranted | Pulled | OpenFailed | NoMemory, now: float) -> None:
        """The driver answers for a transfer; one that is over is left alone.  Raises `Malformed`."""
        key = fact.key
        if key.outgoing != (key.side is Side.REPLY):
            raise Malformed(f"{key} is a transfer of ours, not an incoming one")
        transfer = self._find(key)
        if transfer is None:
            return
        match fact:
            case StreamsGranted():
                self._grant(key, transfer, fact.opened)
            case Pulled():
                transfer.pulled(fact.buffer)
            case OpenFailed() if transfer.enclosed(fact.buffer):
                (self._calls if key.outgoing else self._serving).no_memory(key.call, "TransportError", fact.reason, now)
                return
            case OpenFailed():
                transfer.decline(fact.buffer)
                reason = clip(fact.reason, MAX_REASON_BYTES)
                self._outbox.send(Decline(key.call, key.side, fact.buffer, reason), now)
            case NoMemory():
                (self._calls if key.outgoing else self._serving).no_memory(key.call, fact.type_name, fact.reason, now)
                return
        self._advance(key, now)

    def _find(self, key: Key) -> IncomingTransfer | None:
        return (self._calls if key.outgoing else self._serving).transfer(key.call)

    def _grant(self, key: Key, transfer: IncomingTransfer, opened: int) -> None:
        if transfer.granted:
            raise Malformed(f"{key} was granted twice")
        pulls = transfer.grant(opened)
        if not key.outgoing:
            self._serving.granted(key.call)
        for pull in pulls:
            self._outbox.emit(pull)

    def _advance(self, key: Key, now: float) -> None:
        if key.outgoing:
            self._calls.advance(key.call)
        else:
            self._serving.advance(key.call, now)
