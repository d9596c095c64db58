"""Our calls: from `StartCall` to the one `EndFuture`.

    (held) WAITING --sent--> OPEN --reply--> RECEIVING --complete--> ended (VALUE)

and from each of these a call may end early (deadline, cancel, loss; an error of the peer's once it is open).  A notify
ends when its bytes have gone; it has no future.  A call that is held has an id of its own, below zero, until its body
is there and it gets one of the wire's, which only rise.  A call that has ended is in no table; what still comes for it
is known by its id, which is no higher than the last one used, and is swallowed with its credit given back.

`TRANSITIONS` is the whole machine; an event that it does not list for a state is somebody's fault.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from transport.deadlines import Deadlines
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.events import CancelCall, EndFuture, HoldCall, Key, LeaseStreams, Outcome, Side, StartCall
from transport.lease import ReceiveWindow
from transport.limits import Limits
from transport.messages import Call, Cancel, Error, Reply
from transport.outbox import Outbox
from transport.sending import Sender, check_outgoing, cost_of
from transport.transfers import IncomingTransfer, excess


class CallState(enum.Enum):
    """How far a call of ours is."""

    WAITING = "waiting"
    OPEN = "open"
    RECEIVING = "receiving"
    ENDED = "ended"

    __hash__ = object.__hash__  # members are singletons; the Enum's own hash is a Python function


class CallEvent(enum.Enum):
    """What happens to a call of ours."""

    SENT = "sent"
    DELIVERED = "delivered"
    REPLY = "reply"
    ERROR = "error"
    COMPLETE = "complete"
    NO_MEMORY = "no memory"
    CANCEL = "cancel"
    EXPIRE = "expire"

    __hash__ = object.__hash__


_WAITING, _OPEN, _RECEIVING, _ENDED = CallState
TRANSITIONS: dict[CallState, dict[CallEvent, CallState]] = {
    _WAITING: {
        CallEvent.SENT: _OPEN,
        CallEvent.CANCEL: _ENDED,
        CallEvent.EXPIRE: _ENDED,
    },
    _OPEN: {
        CallEvent.DELIVERED: _ENDED,  # a notify
        CallEvent.REPLY: _RECEIVING,
        CallEvent.ERROR: _ENDED,
        CallEvent.CANCEL: _ENDED,
        CallEvent.EXPIRE: _ENDED,
    },
    _RECEIVING: {
        CallEvent.COMPLETE: _ENDED,
        CallEvent.ERROR: _ENDED,  # the callee's device failed while the value was on its way
        CallEvent.NO_MEMORY: _ENDED,
        CallEvent.CANCEL: _ENDED,
        CallEvent.EXPIRE: _ENDED,
    },
    _ENDED: {},
}


@dataclass(slots=True)
class _OurCall:
    call: int
    function: str
    notify: bool
    state: CallState = CallState.WAITING
    body: bytes = b""
    reply: IncomingTransfer | None = None


class Calls:
    """The table of our calls that have not ended."""

    def __init__(self, limits: Limits, outbox: Outbox, credit: ReceiveWindow) -> None:
        self.deadlines = Deadlines()
        self.late_replies = 0
        self.last = 0
        self.last_held = 0
        self._limits = limits
        self._outbox = outbox
        self._credit = credit
        self._calls: dict[int, _OurCall] = {}
        self._sender: Sender

    def attach(self, sender: Sender) -> None:
        """Names the line that requests go through.  Does not touch the device."""
        self._sender = sender

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, command: StartCall, now: float) -> None:
        """Sends a request, or puts it in the line.  Raises `LocalProtocolError`, then nothing has changed."""
        message = Call(command.call, command.function, command.body, tuple(command.buffers), None, command.notify)
        check_outgoing(message, self._limits, "the call")
        if command.call <= self.last:
            raise LocalProtocolError(f"call id {command.call} after {self.last}; ids rise strictly, count them up")
        _check_deadline(command.deadline)
        if command.held:
            if command.held > 0 or command.held not in self._calls:
                raise LocalProtocolError(f"call {command.held} is not held; hold a call before its rest is sent, once")
            if command.notify:
                raise LocalProtocolError(f"call {command.held} is held, and a notify is not; send it at once")
            del self._calls[command.held]
            self.deadlines.discard(command.held)
        self.last = command.call
        self._begin(_OurCall(command.call, command.function, command.notify), command.deadline)
        self._sender.submit(Key(command.call, True, Side.REQUEST), message, now, command.deadline)

    def hold(self, command: HoldCall, now: float) -> None:
        """Begins a call that is not to be sent yet.  Raises `LocalProtocolError`, then nothing has changed."""
        check_outgoing(Call(1, command.function, b"", (), None, False), self._limits, "the call")
        if command.call >= self.last_held:
            last = self.last_held
            raise LocalProtocolError(f"held call id {command.call} after {last}; they fall strictly, count them down")
        _check_deadline(command.deadline)
        self.last_held = command.call
        self._begin(_OurCall(command.call, command.function, False), command.deadline)

    def _begin(self, entry: _OurCall, deadline: float | None) -> None:
        self._calls[entry.call] = entry
        if deadline is not None:
            self.deadlines.add(entry.call, deadline)

    def sent(self, call: int) -> None:
        """The request's header has gone.  Does not touch the device."""
        self._move(self._calls[call], CallEvent.SENT)

    def delivered(self, call: int) -> None:
        """All bytes of the request have gone: the end of a notify.  Does not touch the device."""
        if (entry := self._calls.get(call)) is not None and entry.notify:
            self._move(entry, CallEvent.DELIVERED)

    def cancel(self, command: CancelCall, now: float) -> None:
        """Ends a call that the caller gave up; one that has ended is left alone.  Raises `LocalProtocolError`."""
        if command.call == 0 or not self.last_held <= command.call <= self.last:
            raise LocalProtocolError(f"call {command.call} was never started")
        if (entry := self._calls.get(command.call)) is not None:
            self._give_up(entry, CallEvent.CANCEL, Outcome.CANCELLED, "cancelled by the caller", now)

    def expire(self, now: float) -> None:
        """Ends the calls whose time has run out.  Does not touch the device."""
        for call in self.deadlines.expired(now):
            entry = self._calls[call]
            sent = "before its reply was there; its function is told to stop"
            what = "before it was sent" if entry.state is CallState.WAITING else sent
            self._give_up(entry, CallEvent.EXPIRE, Outcome.DEADLINE, f"{_title(entry)}: time ran out {what}", now)

    # What comes from the peer -----------------------------------------------------------------------------------------

    def reply(self, message: Reply, now: float) -> None:
        """A value has come: its transfer begins, or it is late and is swallowed.  Raises `RemoteProtocolError`."""
        cost = cost_of(message)
        self._credit.accept(cost)
        entry = self._find(message.call, "a reply to")
        if entry is None:
            self._credit.release(cost)
            self.late_replies += 1
            key = Key(message.call, True, Side.REPLY)
            for slot in IncomingTransfer(key, message.buffers, cost).unopened():
                self._outbox.emit(slot)
            return
        sender = self._sender
        if entry.notify or not (sender.idle or sender.all_sent(Key(message.call, True, Side.REQUEST))):
            raise RemoteProtocolError(
                f"the peer replied to call {message.call} before it had all of it, or to a notify"
            )
        self._move(entry, CallEvent.REPLY)
        if not message.buffers:  # nothing to lease, nothing to pull
            self._move(entry, CallEvent.COMPLETE)
            self._credit.release(cost)
            self._outbox.emit(EndFuture(message.call, Outcome.VALUE, message.body))
            return
        key = Key(message.call, True, Side.REPLY)
        entry.body = message.body
        entry.reply = IncomingTransfer(key, message.buffers, cost)
        if no_room := excess(message.buffers, self._limits.max_transfer):
            self.no_memory(message.call, "ExhaustedError", no_room, now)
        else:
            self._outbox.emit(LeaseStreams(key, message.buffers))

    def error(self, message: Error) -> None:
        """The callee's error ends the call.  Raises `RemoteProtocolError`."""
        entry = self._find(message.call, "an error for")
        if entry is None:
            self.late_replies += 1
            return
        self._move(entry, CallEvent.ERROR)
        self._drop_reply(entry)
        self._sender.give_up(Key(message.call, True, Side.REQUEST))
        if not entry.notify:
            text = (message.type_name, message.traceback_text)
            self._outbox.emit(
                EndFuture(
                    entry.call, Outcome.REMOTE_ERROR, b"", message.message, type_name=text[0], traceback_text=text[1]
                )
            )

    def known(self, call: int) -> bool:
        """Whether a call has not ended.  Does not touch the device."""
        return call in self._calls

    def transfer(self, call: int) -> IncomingTransfer | None:
        """The reply that is on its way to us; None if the call has ended.  Does not touch the device."""
        entry = self._calls.get(call)
        return entry.reply if entry is not None else None

    # What comes from the driver ---------------------------------------------------------------------------------------

    def advance(self, call: int) -> None:
        """Ends the call with its value if all of the reply is pulled.  Does not touch the device."""
        entry = self._calls[call]
        if entry.reply is not None and entry.reply.complete:
            self._move(entry, CallEvent.COMPLETE)
            self._credit.release(entry.reply.cost)
            self._outbox.emit(EndFuture(call, Outcome.VALUE, entry.body))

    def no_memory(self, call: int, type_name: str, reason: str, now: float) -> None:
        """There is no room for the reply: the call ends, and the rest of the reply is swallowed."""
        entry = self._calls[call]
        message = f"{_title(entry)} has returned, but its reply found no room here: {reason}"
        self._give_up(entry, CallEvent.NO_MEMORY, Outcome.REMOTE_ERROR, message, now, type_name=type_name)

    def lose(self, outcome: Outcome, reason: str) -> None:
        """Ends all calls, in the order in which they began or, held once, went on.

        The line and the transfers are the sender's to clear.
        """
        calls, self._calls = self._calls, {}
        for call, entry in calls.items():
            self.deadlines.discard(call)
            known = "it was not sent" if entry.state is CallState.WAITING else "it was sent, its outcome is unknown"
            self._drop_reply(entry)
            if not entry.notify:
                self._outbox.emit(EndFuture(call, outcome, message=f"{reason}; {_title(entry)}: {known}"))

    # ------------------------------------------------------------------------------------------------------------------

    def _find(self, call: int, what: str) -> _OurCall | None:
        if call > self.last:
            raise RemoteProtocolError(f"{what} call {call}, which was never made")
        return self._calls.get(call)

    def _give_up(
        self, entry: _OurCall, event: CallEvent, outcome: Outcome, message: str, now: float, *, type_name: str = ""
    ) -> None:
        self._move(entry, event)
        if entry.call > 0 and self._sender.give_up(Key(entry.call, True, Side.REQUEST)):
            self._outbox.send(Cancel(entry.call), now)
        self._drop_reply(entry)
        if not entry.notify:
            self._outbox.emit(EndFuture(entry.call, outcome, message=message, type_name=type_name))

    def _drop_reply(self, entry: _OurCall) -> None:
        if entry.reply is not None:
            self._credit.release(entry.reply.cost)
            for slot in entry.reply.unopened():
                self._outbox.emit(slot)

    def _move(self, entry: _OurCall, event: CallEvent) -> None:
        state = TRANSITIONS[entry.state].get(event)
        if state is None:
            raise RemoteProtocolError(f"{event.value} for call {entry.call}, which is {entry.state.value}")
        entry.state = state
        if state is CallState.ENDED:
            del self._calls[entry.call]
            self.deadlines.discard(entry.call)


def _title(entry: _OurCall) -> str:
    return f"call {entry.call} of {entry.function!r}" if entry.call > 0 else f"a call of {entry.function!r}"


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and deadline != deadline:
        raise LocalProtocolError("the deadline is not a number; give seconds of the connection's clock, or None")
