"""The sending half of credit: requests and replies in one line, and the transfers that have left it.

A message waits in the line until the handshake is done and the peer's window admits it; nobody overtakes, so call ids
on the wire only rise.  Once it has gone, its buffers are watched, and its bytes follow as the driver reports them.
Each message that was taken in gives exactly one `FreeBuffers`.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transport.errors import LocalProtocolError
from transport.events import BufferHeader, DataReady, FreeBuffers, Key, ReleaseSlot, Watch
from transport.lease import MESSAGE_COST, SendWindow
from transport.limits import Limits
from transport.messages import Call, Data, Decline, Reply
from transport.outbox import Outbox
from transport.transfers import OutgoingTransfer, enclosed, excess
from transport.wire import MAX_REMAINING, Malformed, check


def cost_of(message: Call | Reply) -> int:
    """Bytes of credit that a message takes, the same at both ends.  Does not touch the device."""
    cost = MESSAGE_COST + len(message.body)
    for one in message.buffers:
        cost += one.nbytes
    return cost


@dataclass(slots=True)
class Pending:
    """A message in the line; `deadline` becomes the remaining time when it goes."""

    message: Call | Reply
    deadline: float | None = None


class Sender:
    """The line and the transfers.  `on_sent` hears by its call that a request has gone, `on_done` that its memory is
    free."""

    def __init__(self, outbox: Outbox, on_sent: Callable[[int], None], on_done: Callable[[int], None]) -> None:
        self.window: SendWindow | None = None
        self._outbox = outbox
        self._on_sent = on_sent
        self._on_done = on_done
        self.waiting: dict[Key, Pending] = {}
        """The line, in order."""
        self._transfers: dict[Key, OutgoingTransfer] = {}

    @property
    def sending(self) -> int:
        return len(self._transfers)

    def busy(self, outgoing: bool) -> bool:
        """Whether requests (`outgoing`) or replies are in the line or on their way.  Does not touch the device."""
        return any(key.outgoing == outgoing for table in (self.waiting, self._transfers) for key in table)

    def submit(self, key: Key, message: Call | Reply, now: float, deadline: float | None = None) -> None:
        """Sends a message, or puts it at the end of the line: behind others, or when its own time is over.

        Does not touch the device.
        """
        if not self.waiting and (deadline is None or deadline > now) and self._admits(cost := cost_of(message)):
            self._send(key, message, cost, now, deadline)
        else:
            self.waiting[key] = Pending(message, deadline)

    def pump(self, now: float) -> None:
        """Sends what the window admits.  Does not touch the device."""
        while self.waiting:
            key, pending = next(iter(self.waiting.items()))
            cost = cost_of(pending.message)
            if not self._admits(cost):
                return
            del self.waiting[key]
            self._send(key, pending.message, cost, now, pending.deadline)

    def _admits(self, cost: int) -> bool:
        return self.window is not None and self.window.admits(cost)

    def _send(self, key: Key, message: Call | Reply, cost: int, now: float, deadline: float | None) -> None:
        assert self.window is not None
        self.window.take(cost)
        if deadline is not None and isinstance(message, Call):
            message = replace(message, remaining=min(MAX_REMAINING, max(0.0, float(deadline - now))))
        self._outbox.send(message, now)
        if key.outgoing:
            self._on_sent(key.call)
        if not message.buffers or all(map(enclosed, message.buffers)):
            self._free(key)
            return
        transfer = self._transfers[key] = OutgoingTransfer(key, message.buffers)
        if not transfer.all_sent:
            self._outbox.emit(Watch(key, message.buffers))
        self._settle(transfer)

    def data_ready(self, fact: DataReady, now: float) -> None:
        """Sends bytes; those of a transfer or channel that was given up are dropped.  Raises `Malformed`."""
        transfer = self._transfers.get(fact.key)
        if transfer is None:
            return
        if 0 <= fact.buffer < len(transfer.buffers) and transfer.buffers[fact.buffer].channel != fact.channel:
            return
        transfer.send(fact.buffer, fact.offset, fact.payload)
        call, _, side = fact.key
        self._outbox.send(Data(call, side, fact.buffer, fact.offset, fact.channel, fact.payload), now)
        self._settle(transfer)

    def released(self, key: Key) -> None:
        """The driver has seen the slots of a transfer by reference released.  Does not touch the device."""
        if (transfer := self._transfers.get(key)) is not None:
            transfer.release()
            self._settle(transfer)

    def declined(self, key: Key, message: Decline, channels: Sequence[str]) -> bool:
        """The peer declined a buffer: it is watched again, on the next channel.  Raises `Malformed`."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.decline(message.buffer, channels)
        self._outbox.emit(ReleaseSlot(key, message.buffer))
        if transfer is None:
            return False
        self._outbox.emit(Watch(key, tuple(transfer.buffers), message.buffer))
        return True

    @property
    def idle(self) -> bool:
        """Whether every message and all their bytes have gone, and their memory is free."""
        return not self.waiting and not self._transfers

    def all_sent(self, key: Key) -> bool:
        """Whether a message and all its bytes have gone.  Does not touch the device."""
        transfer = self._transfers.get(key)
        return key not in self.waiting and (transfer is None or transfer.all_sent)

    def give_up(self, key: Key) -> bool:
        """Drops a message or what remains of its transfer; whether the message had gone.  Does not touch the device."""
        if self.waiting.pop(key, None) is not None:
            self._outbox.emit(FreeBuffers(key, sent=False))
            return False
        if self._transfers.pop(key, None) is not None:
            self._outbox.emit(FreeBuffers(key, sent=False))
        return True

    def withdraw(self, key: Key) -> bool:
        """Drops a message that is not all out yet; whether there was one.  Does not touch the device."""
        active = key in self.waiting or key in self._transfers
        if active:
            self.give_up(key)
        return active

    def clear(self) -> None:
        """Drops everything, oldest transfer first.  Does not touch the device."""
        for key in (*self._transfers, *self.waiting):
            self._outbox.emit(FreeBuffers(key, sent=False))
        self._transfers.clear()
        self.waiting.clear()

    def _settle(self, transfer: OutgoingTransfer) -> None:
        if transfer.complete and self._transfers.pop(transfer.key, None) is not None:
            self._free(transfer.key)

    def _free(self, key: Key) -> None:
        self._outbox.effects.append(FreeBuffers(key, True))
        if key.outgoing:
            self._on_done(key.call)


def check_outgoing(message: Call | Reply, limits: Limits, what: str) -> None:
    """Raises `LocalProtocolError`, which names `what` is to be sent, if it may not be.  Does not touch the device."""
    try:
        check(message)
    except Malformed as fault:
        raise LocalProtocolError(f"{what} cannot be sent: {fault}") from None
    if fault_text := _fault_of(message.buffers, limits.channels, limits.max_transfer):
        raise LocalProtocolError(f"{what} cannot be sent: {fault_text}")


def _fault_of(buffers: Sequence[BufferHeader], channels: Sequence[str], limit: int) -> str:
    if not buffers:
        return ""
    if too_much := excess(buffers, limit):
        return too_much
    for one in buffers:
        if one.channel not in channels:
            return f"channel {one.channel!r} is none of {', '.join(channels)}"
    return ""
