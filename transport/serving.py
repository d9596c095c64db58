"""The peer's calls: from its `Call` to our reply.

    LEASING --granted--> PULLING --complete--> RUNNING --finish, fail--> ended

What comes without buffers is RUNNING at once.

Until a call is launched it can be dropped (cancel, deadline, no memory), its credit goes back and the function never
runs; once it runs, it is only asked to stop (CANCELLED) and its reply is dropped.  Call ids rise strictly, so that an
id is never served twice whatever a link repeats.

`TRANSITIONS` is the whole machine; an event that it does not list for a state is somebody's fault.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from transport.deadlines import Deadlines
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.events import FailCall, FinishCall, FreeBuffers, Key, Launch, LeaseStreams, Side, StopCall
from transport.lease import ReceiveWindow
from transport.limits import Limits
from transport.messages import Call, Cancel, Error, Reply
from transport.outbox import Outbox
from transport.sending import Sender, check_outgoing, cost_of
from transport.transfers import IncomingTransfer, excess
from transport.wire import MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES, MAX_TYPE_NAME_BYTES, clip


class ServeState(enum.Enum):
    """How far a call of the peer's is."""

    LEASING = "leasing"
    PULLING = "pulling"
    RUNNING = "running"
    CANCELLED = "cancelled"
    ENDED = "ended"

    __hash__ = object.__hash__  # members are singletons; the Enum's own hash is a Python function


class ServeEvent(enum.Enum):
    """What happens to a call of the peer's."""

    GRANTED = "granted"
    COMPLETE = "complete"
    FINISH = "finish"
    FAIL = "fail"
    NO_MEMORY = "no memory"
    CANCEL = "cancel"
    EXPIRE = "expire"

    __hash__ = object.__hash__


_LEASING, _PULLING, _RUNNING, _CANCELLED, _ENDED = ServeState
TRANSITIONS: dict[ServeState, dict[ServeEvent, ServeState]] = {
    _LEASING: {
        ServeEvent.GRANTED: _PULLING,
        ServeEvent.FAIL: _ENDED,
        ServeEvent.NO_MEMORY: _ENDED,
        ServeEvent.CANCEL: _ENDED,
        ServeEvent.EXPIRE: _ENDED,
    },
    _PULLING: {
        ServeEvent.COMPLETE: _RUNNING,
        ServeEvent.FAIL: _ENDED,
        ServeEvent.NO_MEMORY: _ENDED,
        ServeEvent.CANCEL: _ENDED,
        ServeEvent.EXPIRE: _ENDED,
    },
    _RUNNING: {
        ServeEvent.FINISH: _ENDED,
        ServeEvent.FAIL: _ENDED,
        ServeEvent.CANCEL: _CANCELLED,
    },
    _CANCELLED: {
        ServeEvent.FINISH: _ENDED,
        ServeEvent.FAIL: _ENDED,
        ServeEvent.CANCEL: _CANCELLED,
    },
    _ENDED: {},
}


TOO_LATE = "its deadline passed before it was launched"


@dataclass(slots=True)
class _TheirCall:
    message: Call
    deadline: float | None
    request: IncomingTransfer | None
    """None of what came without buffers."""
    state: ServeState


class Serving:
    """The table of the peer's calls that have not ended here."""

    def __init__(self, limits: Limits, outbox: Outbox, credit: ReceiveWindow) -> None:
        self.deadlines = Deadlines()
        self.last = 0
        self._limits = limits
        self._outbox = outbox
        self._credit = credit
        self._calls: dict[int, _TheirCall] = {}
        self._sender: Sender

    def attach(self, sender: Sender) -> None:
        """Names the line that replies go through.  Does not touch the device."""
        self._sender = sender

    def __len__(self) -> int:
        return len(self._calls)

    # What comes from the peer -----------------------------------------------------------------------------------------

    def begin(self, message: Call, now: float) -> None:
        """A request has come: its transfer begins.  Raises `RemoteProtocolError`.  Does not touch the device."""
        if message.call <= self.last:
            raise RemoteProtocolError(f"call id {message.call} after {self.last}; ids rise strictly")
        cost = cost_of(message)
        self._credit.accept(cost)
        self.last = message.call
        deadline = None if message.remaining is None else now + message.remaining
        if not message.buffers:  # nothing to lease, nothing to pull
            self._credit.release(cost)
            if deadline is not None and deadline <= now:
                self._outbox.emit(StopCall(message.call, TOO_LATE))
            else:
                self._launch(_TheirCall(message, deadline, None, _RUNNING))
            return
        key = Key(message.call, False, Side.REQUEST)
        request = IncomingTransfer(key, message.buffers, cost)
        self._calls[message.call] = _TheirCall(message, deadline, request, _LEASING)
        if deadline is not None:
            self.deadlines.add(message.call, deadline)
        if no_room := excess(message.buffers, self._limits.max_transfer):
            self.no_memory(message.call, "ExhaustedError", no_room, now)
        else:
            self._outbox.emit(LeaseStreams(key, message.buffers, message.function))

    def cancel(self, message: Cancel) -> None:
        """The caller gave a call up.  Raises `RemoteProtocolError`.  Does not touch the device."""
        if message.call > self.last:
            raise RemoteProtocolError(f"a cancel of call {message.call}, which was never made")
        entry = self._calls.get(message.call)
        if entry is None:
            self._sender.give_up(Key(message.call, False, Side.REPLY))
            return
        told = entry.state is ServeState.CANCELLED
        self._leave(entry, ServeEvent.CANCEL)
        if not told:
            self._outbox.emit(StopCall(message.call, "cancelled by the caller"))

    def known(self, call: int) -> bool:
        """Whether a call has not ended here.  Does not touch the device."""
        return call in self._calls

    def transfer(self, call: int) -> IncomingTransfer | None:
        """The request that is on its way to us; None if it is all here or was dropped.  Does not touch the device."""
        entry = self._calls.get(call)
        return entry.request if entry is not None and entry.state in (_LEASING, _PULLING) else None

    # What comes from the driver ---------------------------------------------------------------------------------------

    def granted(self, call: int) -> None:
        """Streams and memory are there.  Does not touch the device."""
        self._move(self._calls[call], ServeEvent.GRANTED)

    def advance(self, call: int, now: float) -> None:
        """Launches the function if all of the request is pulled and there is time left.  Does not touch the device."""
        entry = self._calls[call]
        if entry.request is None or not entry.request.complete:
            return
        if entry.deadline is not None and entry.deadline <= now:
            self._expire(entry)
            return
        self._move(entry, ServeEvent.COMPLETE)
        self.deadlines.discard(call)
        self._credit.release(entry.request.cost)
        self._launch(entry)

    def expire(self, now: float) -> None:
        """Drops the calls whose time ran out before they were launched.  Does not touch the device."""
        for call in self.deadlines.expired(now):
            self._expire(self._calls[call])

    def no_memory(self, call: int, type_name: str, reason: str, now: float) -> None:
        """There is no room for a request: the caller gets an error.  Does not touch the device."""
        entry = self._calls[call]
        self._leave(entry, ServeEvent.NO_MEMORY)
        if not entry.message.notify:
            self._outbox.send(
                Error(call, clip(type_name, MAX_TYPE_NAME_BYTES), clip(reason, MAX_MESSAGE_BYTES), ""), now
            )

    def finish(self, command: FinishCall, now: float) -> None:
        """Sends the reply, or puts it in the line.  Raises `LocalProtocolError`, then nothing has changed."""
        entry = self._calls.get(command.call)
        if entry is None or ServeEvent.FINISH not in TRANSITIONS[entry.state]:
            raise LocalProtocolError(f"call {command.call} is not running; finish a launched call once")
        message = Reply(command.call, command.body, tuple(command.buffers))
        check_outgoing(message, self._limits, "the reply")
        dropped = entry.message.notify or entry.state is ServeState.CANCELLED
        self._move(entry, ServeEvent.FINISH)
        key = Key(command.call, False, Side.REPLY)
        if dropped:
            self._outbox.emit(FreeBuffers(key, sent=False))
        else:
            self._sender.submit(key, message, now)

    def fail(self, command: FailCall, now: float) -> None:
        """Sends an error as the reply; a call dropped meanwhile is left alone.  Raises `LocalProtocolError`."""
        if not 0 < command.call <= self.last:
            raise LocalProtocolError(f"call {command.call} was never made by the peer")
        entry = self._calls.get(command.call)
        if entry is None:
            dropped = not self._sender.withdraw(Key(command.call, False, Side.REPLY))
        else:
            dropped = entry.message.notify or entry.state is ServeState.CANCELLED
            self._leave(entry, ServeEvent.FAIL)
        if not dropped:
            type_name = clip(command.type_name, MAX_TYPE_NAME_BYTES)
            text = clip(command.message, MAX_MESSAGE_BYTES)
            trace = clip(command.traceback_text, MAX_TRACEBACK_BYTES)
            self._outbox.send(Error(command.call, type_name, text, trace), now)

    def lose(self, reason: str) -> None:
        """Stops all calls, in the order of their ids.  Does not touch the device."""
        for entry in list(self._calls.values()):
            self._drop_request(entry)
            if entry.state is not ServeState.CANCELLED:
                self._outbox.emit(StopCall(entry.message.call, reason))
            self.deadlines.discard(entry.message.call)
        self._calls.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _launch(self, entry: _TheirCall) -> None:
        message = entry.message
        self._calls[message.call] = entry
        self._outbox.emit(Launch(message.call, message.function, message.body, entry.deadline, message.notify))

    def _expire(self, entry: _TheirCall) -> None:
        self._leave(entry, ServeEvent.EXPIRE)
        self._outbox.emit(StopCall(entry.message.call, TOO_LATE))

    def _leave(self, entry: _TheirCall, event: ServeEvent) -> None:
        """Moves, after dropping the request if it was not all here yet."""
        self._drop_request(entry)
        self._move(entry, event)

    def _drop_request(self, entry: _TheirCall) -> None:
        if entry.request is not None and entry.state in (_LEASING, _PULLING):
            self._credit.release(entry.request.cost)
            for slot in entry.request.unopened():
                self._outbox.emit(slot)

    def _move(self, entry: _TheirCall, event: ServeEvent) -> None:
        state = TRANSITIONS[entry.state].get(event)
        if state is None:
            raise LocalProtocolError(f"{event.value} for call {entry.message.call}, which is {entry.state.value}")
        entry.state = state
        if state is ServeState.ENDED:
            del self._calls[entry.message.call]
            self.deadlines.discard(entry.message.call)
