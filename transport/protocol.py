"""The sans-io connection: the glue of handshake, calls, credit, liveness and the end.

Four ways in (`receive`, `command`, `fact`, `handle_timeout`), one way out (`drain`), and `next_timeout`.  Time
enters as `now`; there is no clock, no socket, no thread and no randomness here, so a run is a function of what goes in.
After every way in, call `drain` and `next_timeout` again.

    GREETING (initiator: HELLO sent)   --WELCOME-->  OPEN  --end, loss, fault-->  CLOSED
    LISTENING (acceptor)               --HELLO---->  OPEN

`TABLE` says which message is handled in which state and by what; any other is the peer's fault.

Rules:

* **Nothing from the wire raises.**  A fault of the peer's ends the connection in order, with its reason told to both.
* **Nothing is done twice.**  Messages are numbered per direction: a number that was seen is dropped, a gap is loss and
  ends the connection; ids of calls rise strictly; a message of another session ends the connection.
* **A wrong command changes nothing.**  It raises before the first change.
* **Every call ends once.**  The tables are the truth: who is in a table has not ended, who has ended is in none.
* **Loss has one order:** `MarkLost`, `ReleaseWords`, `FreeBuffers` for what is held, `EndFuture`, `StopCall`, `Closed`.
* **A graceful end is acknowledged.**  BYE: I start no more calls and mine have ended.  BYE_ACK: yours have ended here
  too, their functions have run and their replies are gone.  Only with both acknowledgements is the end graceful.

Standard library, and this package's own.  Does not touch the device.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from streamrt.errors import ClosedError
from transport import messages, wire
from transport.calls import Calls
from transport.deadlines import earlier
from transport.errors import LocalProtocolError, RemoteProtocolError, VersionError
from transport.events import (
    Abort,
    Announce,
    Announced,
    CancelCall,
    Closed,
    Command,
    DataReady,
    Effect,
    Fact,
    FailCall,
    FinishCall,
    Frozen,
    Goodbye,
    HoldCall,
    Key,
    MarkLost,
    NoMemory,
    OpenFailed,
    Outcome,
    PeerGone,
    PeerSuspected,
    Pulled,
    Ready,
    Released,
    ReleaseWords,
    Retire,
    Retired,
    Side,
    StartCall,
    StreamsGranted,
    Watched,
)
from transport.farewell import Farewell
from transport.handshake import choose_version, mismatch, sessions
from transport.lease import ReceiveWindow, SendWindow
from transport.limits import STAGING, ConnectionStatistics, Limits
from transport.liveness import Liveness
from transport.messages import Frame
from transport.outbox import Outbox
from transport.receiving import Receiver
from transport.sending import Sender
from transport.serving import Serving
from transport.wire import Malformed


class State(enum.Enum):
    """How far a connection is."""

    GREETING = "greeting"
    LISTENING = "listening"
    OPEN = "open"
    CLOSED = "closed"

    __hash__ = object.__hash__  # members are singletons; the Enum's own hash is a Python function


TABLE: dict[State, dict[type[messages.Message], str]] = {
    State.GREETING: {
        messages.Welcome: "_on_welcome",
        messages.Refuse: "_on_refuse",
    },
    State.LISTENING: {
        messages.Hello: "_on_hello",
        messages.Refuse: "_on_refuse",
    },
    State.OPEN: {
        messages.Refuse: "_on_refuse",
        messages.Call: "_on_call",
        messages.Data: "_on_data",
        messages.Reply: "_on_reply",
        messages.Error: "_on_error",
        messages.Cancel: "_on_cancel",
        messages.Credit: "_on_credit",
        messages.Decline: "_on_decline",
        messages.Retire: "_on_retire",
        messages.Announce: "_on_announce",
        messages.Ping: "_on_ping",
        messages.Pong: "_on_pong",
        messages.Bye: "_on_bye",
        messages.ByeAck: "_on_bye_ack",
    },
    State.CLOSED: {},
}


class Connection:
    """One connection to one peer.  Not thread-safe: its agent holds a lock."""

    def __init__(
        self, *, initiator: bool, hello: dict[str, object], session: bytes, limits: Limits, now: float
    ) -> None:
        """`session` is our nonce: 16 fresh random bytes.  `hello` is what we tell of ourselves (`Ready.info` there).

        Raises `LocalProtocolError`.  Does not touch the device.
        """
        self._limits = limits
        self._channels = limits.channels
        self._state = State.GREETING if initiator else State.LISTENING
        self._nonce = session
        self._hello = hello
        self._version = 0
        self._peer_session = b""
        self._expected = 0
        self._bytes_received = self._duplicates = self._declines = 0
        self._retired: list[int] = []
        self._outbox = Outbox(now)
        self._liveness = Liveness(limits, now)
        self._farewell = Farewell()
        self._credit = ReceiveWindow(limits.window)
        self._calls = Calls(limits, self._outbox, self._credit)
        self._serving = Serving(limits, self._outbox, self._credit)
        self._receiver = Receiver(self._calls, self._serving, self._outbox)
        self._sender = Sender(self._outbox, self._calls.sent, self._calls.delivered)
        self._calls.attach(self._sender)
        self._serving.attach(self._sender)
        greeting = messages.Hello(*limits.versions, session, limits.window, hello)
        try:
            wire.check(greeting)
        except Malformed as fault:
            raise LocalProtocolError(f"the handshake cannot be sent: {fault}") from None
        if initiator:
            self._outbox.send(greeting, now)

    def __repr__(self) -> str:
        return f"<Connection {self._state.value}, {len(self._calls)} calls, {len(self._serving)} served>"

    # Ways in ----------------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Takes one message.  Never raises for what is in it: the connection aborts.  Does not touch the device."""
        if self._state is State.CLOSED:
            return
        try:
            message = self._admit(frames, now)
            if message is not None:
                getattr(self, TABLE[self._state][type(message)])(message, now)
        except VersionError as fault:
            self._refuse("version", str(fault), now)
            self._end(str(fault), Outcome.PROTOCOL, version_mismatch=True)
        except (RemoteProtocolError, Malformed) as fault:
            self._refuse("protocol", str(fault), now)
            self._end(f"the peer broke the protocol: {fault}")
        self._settle(now)

    def command(self, command: Command, now: float) -> None:
        """Does what the application asks; before the handshake is done, calls wait for it.

        Raises `LocalProtocolError` or `ClosedError`; then nothing has changed and nothing is sent.  Does not touch the
        device.
        """
        if self._state is State.CLOSED:
            raise ClosedError("the connection is closed; open a new one")
        match command:
            case StartCall():
                if not command.held:
                    self._check_may_start()
                self._calls.start(command, now)
            case HoldCall():
                self._check_may_start()
                self._calls.hold(command, now)
            case CancelCall():
                self._calls.cancel(command, now)
            case FinishCall():
                self._serving.finish(command, now)
            case FailCall():
                self._serving.fail(command, now)
            case Goodbye():
                self._farewell.leaving = True
            case Retire():
                self._retire(command.buffer_id, now)
            case Announce():
                self._announce(command, now)
            case Abort():
                self._refuse(messages.NOT_YET if command.not_yet else "abort", command.reason, now)
                self._end(command.reason)
        self._settle(now)

    def _check_may_start(self) -> None:
        if not self._farewell.may_start(len(self._serving) > 0):
            raise ClosedError("the connection is ending and takes no new calls; open a new one")

    def fact(self, fact: Fact, now: float) -> None:
        """Takes what the driver has seen; a fact about a transfer that is over is dropped.

        Raises `LocalProtocolError` for one that cannot be (bytes outside a buffer, a second grant); then nothing has
        changed.  Does not touch the device.
        """
        if self._state is State.CLOSED:
            return
        try:
            match fact:
                case DataReady():
                    self._sender.data_ready(fact, now)
                case Released():
                    self._sender.released(fact.key)
                case StreamsGranted() | Pulled() | OpenFailed() | NoMemory():
                    self._receiver.fact(fact, now)
                case PeerSuspected():
                    self._end(fact.reason, not_yet=fact.not_yet)
                case PeerGone():
                    self._end(fact.reason, certain=True)
                case Watched():
                    self._liveness.watch()
                case Frozen():
                    self._liveness.freeze(now)
        except Malformed as fault:
            raise LocalProtocolError(f"{type(fact).__name__}: {fault}") from None
        self._settle(now)

    def handle_timeout(self, now: float) -> None:
        """Does what is due; a call before anything is due changes nothing.  Does not touch the device."""
        if self._state is State.CLOSED:
            return
        lost, ping = self._liveness.lost_at(), self._liveness.ping_at(self._outbox.last_sent)
        if lost is not None and now >= lost:
            reason = self._liveness.loss()
            self._refuse("abort", f"you are held for lost: {reason}", now)
            self._end(reason, certain=True)
        elif ping is not None and now >= ping:
            self._outbox.send(messages.Ping(), now)
        self._settle(now)

    # Ways out ---------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is due next, or None.  Does not touch the device."""
        if self._state is State.CLOSED:
            return None
        due = self._liveness.due(self._outbox.last_sent)
        if self._calls.deadlines.known:
            due = earlier(due, self._calls.deadlines.next())
        if self._serving.deadlines.known:
            due = earlier(due, self._serving.deadlines.next())
        return due

    @property
    def limits(self) -> Limits:
        """What this side was told.  Does not touch the device."""
        return self._limits

    def leave_out(self, channel: str) -> None:
        """There is no such channel to this peer: after a decline the one behind it is next.  Does not touch the device.

        Not for staging, which serves everything.
        """
        self._channels = tuple(name for name in self._channels if name != channel or name == STAGING)

    def drain(self) -> list[Effect]:
        """Takes the effects since the last call, in order.  Does not touch the device."""
        effects, self._outbox.effects = self._outbox.effects, []
        return effects

    def statistics(self) -> ConnectionStatistics:
        """A snapshot of the tables and counters.  Does not touch the device."""
        window = self._sender.window
        return ConnectionStatistics(
            state=self._state.value,
            version=self._version,
            calls=len(self._calls),
            serving=len(self._serving),
            waiting=len(self._sender.waiting),
            sending=self._sender.sending,
            outstanding=window.outstanding if window is not None else 0,
            available=window.size - window.outstanding if window is not None else 0,
            held=self._credit.held,
            owed=self._credit.owed,
            messages_sent=self._outbox.messages,
            messages_received=self._expected,
            bytes_sent=self._outbox.nbytes,
            bytes_received=self._bytes_received,
            duplicates=self._duplicates,
            late_replies=self._calls.late_replies,
            declines=self._declines,
        )

    # Messages ---------------------------------------------------------------------------------------------------------

    def _admit(self, frames: Sequence[Frame], now: float) -> messages.Message | None:
        """The message if it is the next of this session; None for one that was seen before."""
        sequence, session, message = wire.decode(frames)
        if self._state is State.GREETING and isinstance(message, messages.Welcome):
            self._peer_session = sessions(self._nonce, message.nonce)[1]
        # A greeting and its refusal come before there are sessions, and a link may repeat them later.
        early = session == b"" and isinstance(message, messages.Hello | messages.Refuse)
        if session != self._peer_session and not early:
            raise RemoteProtocolError("a message of another session; it may be a replay and is not run")
        if sequence < self._expected:
            self._duplicates += 1
            return None
        if sequence > self._expected:
            raise RemoteProtocolError(f"message {self._expected} was lost, {sequence} came")
        if type(message) not in TABLE[self._state]:
            raise RemoteProtocolError(f"a {type(message).__name__} while {self._state.value}")
        self._expected += 1
        for frame in frames:
            self._bytes_received += wire.size(frame)
        self._liveness.heard(now)
        return message

    def _on_hello(self, message: messages.Hello, now: float) -> None:
        version = choose_version(self._limits.versions, (message.minimum, message.maximum))
        if not message.nonce:
            raise RemoteProtocolError("a Hello of a version that we speak and of a shape that we do not")
        self._peer_session, self._outbox.session = sessions(message.nonce, self._nonce)
        self._outbox.send(messages.Welcome(version, self._nonce, self._limits.window, self._hello), now)
        self._open(version, message.window, message.info, now)

    def _on_welcome(self, message: messages.Welcome, now: float) -> None:
        version = choose_version(self._limits.versions, (message.version, message.version))
        self._outbox.session = sessions(self._nonce, message.nonce)[0]
        self._open(version, message.window, message.info, now)

    def _open(self, version: int, window: int, info: dict[str, object], now: float) -> None:
        self._version = version
        self._sender.window = SendWindow(window)
        self._state = State.OPEN
        self._liveness.opened = True
        self._outbox.emit(Ready(info))
        for buffer_id in self._retired:
            self._outbox.send(messages.Retire(buffer_id), now)

    def _on_refuse(self, message: messages.Refuse, now: float) -> None:
        if message.code == "version":
            reason = mismatch(self._limits.versions, (message.minimum, message.maximum))
            self._end(reason, Outcome.PROTOCOL, version_mismatch=True)
        else:
            outcome = Outcome.PEER_LOST if self._state is State.OPEN else Outcome.PROTOCOL
            self._end(
                f"the peer ended the connection: {message.reason}", outcome, not_yet=message.code == messages.NOT_YET
            )

    def _on_call(self, message: messages.Call, now: float) -> None:
        if self._farewell.heard:
            raise RemoteProtocolError(f"call {message.call} after the peer's Bye")
        self._serving.begin(message, now)

    def _on_data(self, message: messages.Data, now: float) -> None:
        self._receiver.data(message, now)

    def _on_reply(self, message: messages.Reply, now: float) -> None:
        self._calls.reply(message, now)

    def _on_error(self, message: messages.Error, now: float) -> None:
        self._calls.error(message)

    def _on_cancel(self, message: messages.Cancel, now: float) -> None:
        self._serving.cancel(message)

    def _on_credit(self, message: messages.Credit, now: float) -> None:
        if self._sender.window is not None:
            self._sender.window.give_back(message.nbytes)

    def _on_decline(self, message: messages.Decline, now: float) -> None:
        ours = message.side is Side.REQUEST
        if message.call > (self._calls if ours else self._serving).last:
            raise RemoteProtocolError(f"a decline for call {message.call}, which was never made")
        key = Key(message.call, ours, message.side)
        self._declines += self._sender.declined(key, message, self._channels)

    def _on_retire(self, message: messages.Retire, now: float) -> None:
        self._outbox.emit(Retired(message.buffer_id))

    def _on_announce(self, message: messages.Announce, now: float) -> None:
        self._outbox.emit(Announced(message.channel, message.payload))

    def _on_ping(self, message: messages.Ping, now: float) -> None:
        self._outbox.send(messages.Pong(), now)

    def _on_pong(self, message: messages.Pong, now: float) -> None:
        """That it came is all that it says."""

    def _on_bye(self, message: messages.Bye, now: float) -> None:
        self._farewell.on_bye()

    def _on_bye_ack(self, message: messages.ByeAck, now: float) -> None:
        self._farewell.on_bye_ack()

    # Ends -------------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Does what any way in may have made possible or due."""
        if self._state is State.CLOSED:
            return
        if self._calls.deadlines.known:
            self._calls.expire(now)
        if self._serving.deadlines.known:
            self._serving.expire(now)
        if self._sender.waiting:
            self._sender.pump(now)
        if self._state is not State.OPEN:
            return
        if self._credit.owed and (credit := self._credit.due()):
            self._outbox.send(messages.Credit(credit), now)
        if self._farewell.leaving or self._farewell.heard:
            self._part(now)

    def _part(self, now: float) -> None:
        """Says what the graceful end has come to, and ends when both sides have proof."""
        for farewell in self._farewell.due(
            calling=len(self._calls) > 0 or self._sender.busy(outgoing=True),
            serving=len(self._serving) > 0,
            replying=self._sender.busy(outgoing=False),
        ):
            self._outbox.send(farewell, now)
        if self._farewell.done:
            self._state = State.CLOSED
            self._outbox.emit(Closed(graceful=True))

    def _refuse(self, code: str, reason: str, now: float) -> None:
        """Tells the peer why, as well as may be: it may be gone."""
        self._outbox.send(messages.Refuse(code, wire.clip(reason, wire.MAX_REASON_BYTES), *self._limits.versions), now)

    def _end(
        self,
        reason: str,
        outcome: Outcome = Outcome.PEER_LOST,
        *,
        version_mismatch: bool = False,
        not_yet: bool = False,
        certain: bool = False,
    ) -> None:
        self._state = State.CLOSED
        self._outbox.emit(MarkLost(reason, certain))
        self._outbox.emit(ReleaseWords())
        self._sender.clear()
        self._calls.lose(outcome, reason)
        self._serving.lose(reason)
        self._outbox.emit(Closed(graceful=False, reason=reason, version_mismatch=version_mismatch, not_yet=not_yet))

    def _retire(self, buffer_id: int, now: float) -> None:
        message = messages.Retire(buffer_id)
        try:
            wire.check(message)
        except Malformed as fault:
            raise LocalProtocolError(f"the buffer cannot be retired: {fault}") from None
        if self._state is State.OPEN:
            self._outbox.send(message, now)
        else:
            self._retired.append(buffer_id)

    def _announce(self, command: Announce, now: float) -> None:
        message = messages.Announce(command.channel, command.payload)
        try:
            wire.check(message)
        except Malformed as fault:
            raise LocalProtocolError(f"the channel cannot be announced: {fault}") from None
        if self._state is not State.OPEN:
            raise LocalProtocolError("a channel is announced once the connection is open")
        self._outbox.send(message, now)
