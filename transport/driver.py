"""One connection as it runs: the sans-io protocol, its link, and what is done about effects.

The protocol decides, the driver does.  Whoever has something for the connection (a calling thread, the agent's thread,
a thread that ran a function) takes the lock, tells the protocol, carries out what it wants, and lets go; so a call goes
to the link on the caller's own thread, with no hop.  Futures are completed after the lock is let go, because their
callbacks are the user's.

Rules:

- Nothing here blocks on a device or on the peer.
- A value is rebuilt and a function is run with the leased streams of its message current, behind all its pulls.
- What was leased for a message goes back when the message is done with, whatever became of it.
"""

from __future__ import annotations

import collections
import functools
import os
import select
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from streamrt import guard
from streamrt.device import CPU, Device, parse_device
from streamrt.errors import ClosedError, DeviceError, LifetimeError, PlacementError, StreamrtError
from streamrt.future import DeviceFuture
from streamrt.stream import Stream
from transport import context, lend, payload
from transport.channels import SHARED_MEMORY, OpenError, can_share, ends, same_process
from transport.device_map import DeviceMap
from transport.errors import (
    CodecError,
    DeadlineError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
    VersionError,
)
from transport.events import (
    Abort,
    CancelCall,
    Closed,
    DataReady,
    Effect,
    EndFuture,
    Fact,
    FailCall,
    FinishCall,
    FreeBuffers,
    Frozen,
    Goodbye,
    Key,
    Launch,
    LeaseStreams,
    MarkLost,
    NoMemory,
    OpenFailed,
    Outcome,
    PeerGone,
    PeerSuspected,
    Pull,
    Pulled,
    Ready,
    Released,
    ReleaseSlot,
    ReleaseWords,
    Retired,
    Send,
    Side,
    StartCall,
    StopCall,
    StreamsGranted,
    Watch,
    Watched,
)
from transport.hello import PeerInfo, parse_hello
from transport.lend import unshared
from transport.limits import STAGING
from transport.links import DescriptorLink, Link, LinkBroken, OwningLink, SinkLink
from transport.protocol import Connection
from transport.remote_errors import describe_error, rebuild_error
from transport.service import Service
from transport.sharing import Sharing
from transport.transfer import ROLE_SEND, ROLE_SERVE, Incoming, Outgoing
from transport.wire import peek_data

if TYPE_CHECKING:
    from transport.agent import Agent

LONG_CALL_SECONDS = 5.0
LINK_BYTES = 8 << 20  # bytes that may stand in a link before chunks wait for it: a few round trips of any link here


class OpenCall:
    """A call of ours that has not ended."""

    __slots__ = ("future", "kind", "name", "noted", "reply_streams", "started")

    def __init__(
        self,
        future: DeviceFuture[Any],
        name: str,
        kind: str | None,
        reply_streams: Mapping[Device, Stream],
        started: float,
    ) -> None:
        self.future = future
        self.name = name
        self.kind = kind
        self.reply_streams = reply_streams
        self.started = started
        self.noted = False  # that it takes long


class _Entry:
    """The driver's lock.  Work that is broken off under it, by Ctrl-C above all, is half done: the connection ends."""

    __slots__ = ("_driver", "_lock")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StreamrtError):
            self._driver.break_off(error)
        self._lock.release()


class Driver:
    """Drives one connection.  Made by `Agent.add`; `Peer` is what users see of it."""

    def __init__(
        self,
        agent: Agent,
        link: Link,
        protocol: Connection,
        *,
        name: str,
        service: Service,
        local_info: dict[str, object],
        make_map: Callable[[PeerInfo], DeviceMap],
        arrays: str | None = None,
    ) -> None:
        self.agent = agent
        self.link = link
        self.protocol = protocol
        self.name = name
        self.service = service
        self.arrays = arrays
        self.lock = _Entry(self)
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.closed: Closed | None = None
        self.refusal: StreamrtError | None = None
        self.remote_info: dict[str, object] = {}
        self.peer_info: PeerInfo | None = None
        self.moves = 0  # chunks handed on, copies seen to have run: whether polling brings anything
        self.on_ready: Callable[[Driver], None] | None = None
        self.on_closed: Callable[[Driver], None] | None = None
        self.bytes_out: collections.Counter[str] = collections.Counter()
        self.bytes_in: collections.Counter[str] = collections.Counter()
        self.local_info = local_info
        self.map: DeviceMap | None = None
        self._make_map = make_map
        self._last_call = 0
        self._calls: dict[int, OpenCall] = {}
        self._outgoing: dict[Key, Outgoing] = {}
        self._sending: collections.deque[Key] = collections.deque()
        self._incoming: dict[Key, Incoming] = {}
        self._draining: list[Incoming] = []
        self._handed: collections.deque[bytes] = collections.deque()  # descriptors that the peer may not have taken yet
        self._notifies: dict[int, Future[None] | None] = {}  # those without buffers that have not gone yet
        self._running: dict[int, context.RunningCall] = {}
        self._completions: collections.deque[Callable[[], None]] = collections.deque()
        self._in_effects = False
        self._link_full = False
        self._reading = threading.Lock()
        self._forked = False
        self._reader = 0  # the thread that reads its own reply
        self._reader_event = -1  # wakes it when another thread has brought that
        self.sharing: Sharing | None = None
        self.lends = isinstance(link, OwningLink)
        if isinstance(link, SinkLink):
            link.sink = self.sink

    # calls ------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        function: str,
        value: object,
        *,
        timeout: float | None,
        copy: bool | None,
        detach: bool,
        notify: bool,
        arrays: str | None,
        reply_streams: Mapping[Device, Stream],
    ) -> DeviceFuture[Any]:
        """Starts a call of ``(args, kwargs)``.  Enqueues snapshots on the current streams; does not block the host."""
        self._check_open()
        device_map = self.device_map()
        lend.drain()
        prepared = payload.prepare(
            value,
            device_map,
            device_map.request,
            local=self.local_info,
            remote=self.remote_info,
            copy=copy,
            detach=detach,
            allow_pickle=self.link.inherited,
            root=("args", "kwargs"),
            allocate_at=None if self.sharing is None else self.sharing.allocate,
        )
        outgoing: Outgoing | None = None
        sent: Future[None] | None = None  # without buffers there is nothing that may not be written
        if prepared.headers or notify:
            sent = Future()
        if prepared.headers:
            outgoing = Outgoing(prepared, ends.token_of(self.remote_info))
            outgoing.done = functools.partial(_end_sent, sent, self)
            outgoing.wake = self.agent.wake
        future: DeviceFuture[Any] = DeviceFuture(sent=sent)
        now = self.agent.clock()
        with self.lock:
            if self.closed is not None:
                if outgoing is not None:
                    outgoing.close(False)
                raise self.closed_error()
            self._last_call += 1
            call = self._last_call
            kind = arrays or self.arrays or prepared.first_kind
            self._calls[call] = OpenCall(future, function, kind, reply_streams, now)
            if outgoing is not None:
                self._outgoing[Key(call, True, Side.REQUEST)] = outgoing
            future.on_cancel = lambda _: self.cancel(call)
            try:
                self.protocol.command(
                    StartCall(
                        call,
                        function,
                        prepared.body,
                        prepared.headers,
                        None if timeout is None else now + timeout,
                        notify,
                    ),
                    now,
                )
            except StreamrtError:
                del self._calls[call]
                if outgoing is not None:
                    self._outgoing.pop(Key(call, True, Side.REQUEST)).close(False)
                raise
            if notify:
                del self._calls[call]
                if outgoing is None:
                    self._notifies[call] = sent
            self._work(now)
        self._after()
        return future

    def sink(self, header: bytes, nbytes: int) -> memoryview | None:
        """Where the link may receive a payload in place: its destination, while nobody has been given that yet."""
        data = peek_data(header)
        if data is None:
            return None
        call, side, buffer, offset = data
        incoming = self._incoming.get(Key(call, side is Side.REPLY, side))
        return None if incoming is None else incoming.reserve(buffer, offset, nbytes)

    def cancel(self, call: int) -> None:
        """Gives a call up: the callee is told and a late reply is dropped.  Does not block the host."""
        with self.lock:
            if call not in self._calls or self.closed is not None:
                return
            now = self.agent.clock()
            self.protocol.command(CancelCall(call), now)
            self._work(now)
        self._after()

    def give_up(self, future: DeviceFuture[Any]) -> None:
        """The caller stops waiting for its call: cancels it, and makes sure that nobody reads what it lent any more.

        Does not block the host.
        """
        future.cancel()
        with self.lock:
            if isinstance(self.link, OwningLink):
                self.link.own_queued()

    def read_until(self, future: DeviceFuture[Any]) -> None:
        """Reads the link on the calling thread until the future has ended, so that its reply needs no thread's hop.

        Returns at once where another thread reads already: it then brings the reply.  Blocks the host for the message.
        """
        if future.done() or not self._reading.acquire(blocking=False):
            return
        try:
            with self.lock:
                if self.closed is not None or not self.agent.pause_reading(self):
                    return
                descriptor = self.link.fileno()
            if self._reader_event < 0:
                self._reader_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._reader = threading.get_ident()
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.register(self._reader_event, select.POLLIN)
                while not future.done() and self.closed is None:
                    for ready, _ in poll.poll():
                        if ready == self._reader_event:
                            os.eventfd_read(self._reader_event)
                        else:
                            with context.driving():  # callbacks of other futures may run, and must not wait here
                                self.on_readable()
            finally:
                self._reader = 0
                self.agent.resume_reading(self)
        finally:
            self._reading.release()
            if self.ended.is_set():
                self.close_descriptors()

    def after_fork(self) -> None:
        """In a forked child: the connection is the parent's, and closed here.  Does not block the host."""
        self._forked = True
        self.lock = _Entry(self)
        self.ready, self.ended, self._reading = threading.Event(), threading.Event(), threading.Lock()
        self.ready.set()
        self.ended.set()
        self.closed = Closed(graceful=False, reason="this process was forked")

    def close_descriptors(self) -> None:
        """Closes what only a reading caller uses, unless one is there, who then does.  Idempotent.  Does not block."""
        if self._reading.acquire(blocking=False):
            descriptor, self._reader_event = self._reader_event, -1
            self._reading.release()
            if descriptor >= 0:
                os.close(descriptor)

    def device_map(self) -> DeviceMap:
        """The connection's map; there once the handshake is done.  Raises `ClosedError`, `PeerLostError`."""
        if self.map is None:
            self._check_open()
            raise ClosedError(f"the connection to {self.name!r} is not open yet")
        return self.map

    def _check_open(self) -> None:
        if self.closed is not None:
            raise self.closed_error()

    def closed_error(self) -> TransportError | ClosedError:
        """The error that says why the connection is over.  Does not touch the device."""
        closed = self.closed
        if self._forked:
            return ClosedError(f"{self.name!r} is a peer of the parent process; spawn instead of fork, or connect here")
        if closed is None or closed.graceful:
            return ClosedError(f"the connection to {self.name!r} is closed; open a new one")
        if closed.version_mismatch:
            return VersionError(f"{self.name!r}: {closed.reason}")
        return PeerLostError(f"the connection to {self.name!r} is gone: {closed.reason}")

    # what the agent calls ---------------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        """The link may have messages.  Does not block the host."""
        with self.lock:
            if self.closed is not None:
                return
            now = self.agent.clock()
            try:
                while True:
                    messages = self.link.receive()
                    descriptors = self.link.taken_fds() if isinstance(self.link, DescriptorLink) else []
                    for frames in messages:
                        if descriptors and frames is messages[-1]:
                            self._take_descriptors(descriptors)
                        self.protocol.receive(frames, now)
                        self._work(now)
                    if not messages or not self.link.readable:
                        break
            except LinkBroken as broken:
                self.protocol.fact(PeerSuspected(str(broken) or "the link broke"), now)
            self._work(now)
        self._after()

    def on_writable(self) -> None:
        """The link takes bytes again.  Does not block the host."""
        with self.lock:
            if self.closed is not None:
                return
            now = self.agent.clock()
            try:
                self.link.flush()
            except LinkBroken as broken:
                self.protocol.fact(PeerSuspected(str(broken) or "the link broke"), now)
            self._work(now)
        self._after()

    def tick(self, now: float) -> None:
        """Does what is due, and looks at the devices.  Does not block the host."""
        with self.lock:
            if self.closed is not None:
                return
            due = self.protocol.next_timeout()
            if due is not None and due <= now:
                self.protocol.handle_timeout(now)
            self._work(now)
        self._after()

    def fact(self, fact: PeerGone | PeerSuspected | Frozen | Watched) -> None:
        """Tells the protocol what the agent learnt of the peer's process.  Does not block the host."""
        with self.lock:
            now = self.agent.clock()
            self.protocol.fact(fact, now)
            self._work(now)
        self._after()

    def goodbye(self) -> None:
        """Begins a graceful end.  Does not block the host; `ended` is set at the end."""
        with self.lock:
            if self.closed is None:
                now = self.agent.clock()
                self.protocol.command(Goodbye(), now)
                self._work(now)
        self._after()

    def abort(self, reason: str) -> None:
        """Ends at once: open calls fail with `PeerLostError`.  Does not block the host."""
        with self.lock:
            if self.closed is None:
                now = self.agent.clock()
                self.protocol.command(Abort(reason), now)
                self._work(now)
        self._after()

    def break_off(self, error: BaseException) -> None:
        """Ends the connection because work on it was broken off.  Under the lock; does not block the host."""
        self._in_effects = False
        if self.closed is None:
            reason = f"work on it was broken off by {type(error).__name__}"
            try:
                self.protocol.command(Abort(reason), self.agent.clock())
                self._work(self.agent.clock())
            except Exception:
                self.agent.log.exception("the connection to %s could not be ended in order", self.name)
            if self.closed is None:
                self._close(Closed(graceful=False, reason=reason))
        self.agent.call_soon(self._after)

    def next_timeout(self) -> float | None:
        """When `tick` has something to do, if nothing comes before.  Does not touch the device."""
        due = self.protocol.next_timeout()
        look = None if self.sharing is None else self.sharing.next_look()
        if due is None or look is None:
            return look if due is None else due
        return min(due, look)

    @property
    def polling(self) -> bool:
        """Whether a device has to be looked at: chunks that are not ready, copies that have not run.

        Also a full link that does not say when it takes more: ZeroMQ tells nobody that it has written a frame.
        """
        return bool(self._draining) or (bool(self._sending) and not (self._link_full and self.link.wants_write))

    def note_long_calls(self, now: float) -> None:
        """Logs, once each, the calls that have waited long: who waits for which call of whom.  Does not block."""
        for call in list(self._calls.values()):
            if not call.noted and now - call.started >= LONG_CALL_SECONDS:
                call.noted = True
                self.agent.log.info(
                    "%s has waited %.0f s for %s of %s", self.agent.name, now - call.started, call.name, self.name
                )

    @property
    def open_calls(self) -> int:
        """Calls of ours that have not ended.  Does not touch the device."""
        return len(self._calls)

    @property
    def running_calls(self) -> int:
        """Calls of the peer that run here.  Does not touch the device."""
        return len(self._running)

    # effects ----------------------------------------------------------------------------------------------------------

    def _work(self, now: float) -> None:
        """Carries out effects until there are none, and feeds the link.  Under the lock."""
        if self._in_effects:
            return
        self._in_effects = True
        try:
            while True:
                effects = self.protocol.drain()
                for effect in effects:
                    self._carry_out(effect, now)
                over = self.sharing.over(now) if self.sharing is not None else ()
                for key in over:
                    self._tell(Released(key), now)
                if not (effects or over or self._feed(now)):
                    break
            if self._draining:
                before = len(self._draining)
                self._draining = [incoming for incoming in self._draining if not self._drained(incoming)]
                self.moves += before - len(self._draining)
        finally:
            self._in_effects = False

    def _tell(self, fact: Fact, now: float) -> None:
        self.protocol.fact(fact, now)

    def _feed(self, now: float) -> bool:
        """Moves chunks that are ready into the link, transfers in turn; whether any moved."""
        moved = self._link_full = False
        for _ in range(len(self._sending)):
            key = self._sending[0]
            outgoing = self._outgoing.get(key)
            if outgoing is None or not outgoing.has_chunks():
                self._sending.popleft()
                continue
            if self.link.queued_bytes >= LINK_BYTES:
                self._link_full = True  # the link says when it takes more
                break
            self._sending.rotate(-1)
            try:
                chunk = outgoing.advance()
            except DeviceError as error:
                self._fail_transfer(key, error, now)
                continue
            if chunk is None:
                continue
            number, channel, offset, data = chunk
            self.bytes_out[channel] += len(data) if channel == STAGING else outgoing.prepared.headers[number].nbytes
            if channel == SHARED_MEMORY and self.sharing is not None:
                self.sharing.given(data)
            elif channel != STAGING:
                while self._handed and same_process.taken(self._handed[0]):
                    self._handed.popleft()
                self._handed.append(bytes(data))
            self._tell(DataReady(key, number, offset, data, channel), now)
            moved = True
            self.moves += 1
            if (
                not outgoing.has_chunks()
                and outgoing.by_reference
                and (self.sharing is None or self.sharing.went(key, now))
            ):
                self._tell(Released(key), now)
        return moved

    def _fail_transfer(self, key: Key, error: DeviceError, now: float) -> None:
        """A device has failed under what is being sent: that call ends, the others go on."""
        if key.outgoing:
            open_call = self._calls.get(key.call)
            if open_call is not None:
                self._completions.append(functools.partial(open_call.future.set_exception, error))
            self.protocol.command(CancelCall(key.call), now)
        else:
            type_name, message = describe_error(error)
            self.protocol.command(FailCall(key.call, type_name, message), now)
        self._completions.append(functools.partial(self.agent.device_failed, error))

    def _drained(self, incoming: Incoming) -> bool:
        try:
            return incoming.drained
        except DeviceError as error:  # who uses the value hears it from the device
            incoming.hold()
            self._completions.append(functools.partial(self.agent.device_failed, error))
            return True

    def _carry_out(self, effect: Effect, now: float) -> None:
        match effect:
            case Send():
                try:
                    self._send(effect.frames)
                except LinkBroken as broken:
                    self._tell(PeerSuspected(str(broken) or "the link broke"), now)
            case LeaseStreams():
                self._lease(effect, now)
            case Pull():
                self._pull(effect, now)
            case Launch():
                self._launch(effect)
            case Watch():
                try:
                    self._outgoing[effect.key].start(effect.buffers, effect.declined)
                except DeviceError as error:
                    self._fail_transfer(effect.key, error, now)
                if effect.key not in self._sending:
                    self._sending.append(effect.key)
            case FreeBuffers():
                if self.sharing is not None:
                    self.sharing.forget(effect.key)
                outgoing = self._outgoing.pop(effect.key, None)
                if outgoing is not None:
                    self._completions.append(functools.partial(outgoing.close, effect.sent))
                elif effect.key.call in self._notifies and effect.key.outgoing:
                    ended = self._notifies.pop(effect.key.call)
                    self._completions.append(functools.partial(_end_sent, ended, self, effect.sent))
            case EndFuture():
                self._end_future(effect)
            case StopCall():
                running = self._running.get(effect.call)
                if running is not None:
                    running.cancel(effect.reason)
                dropped = self._incoming.pop(Key(effect.call, False, Side.REQUEST), None)
                if dropped is not None and running is None:
                    dropped.abandon()
            case ReleaseSlot():
                if not effect.descriptor:
                    self._declined(effect)
                elif self.sharing is not None:
                    self.sharing.imports.release(effect.descriptor)
                else:
                    same_process.discard(effect.descriptor, ends.token_of(self.local_info))
            case Ready():
                self._handshake_done(effect)
            case Closed():
                self._close(effect)
            case Retired() | MarkLost() | ReleaseWords():
                return  # staging and same_process have no exported allocations and no words

    def _send(self, frames: tuple[memoryview | bytes, ...]) -> None:
        descriptors = self.sharing.descriptors(frames) if self.sharing is not None else ()
        if descriptors and isinstance(self.link, DescriptorLink):
            self.link.send(frames, descriptors)
        else:
            self.link.send(frames)

    def _take_descriptors(self, descriptors: list[int]) -> None:
        if self.sharing is not None:
            self.sharing.arrived(descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)

    def _declined(self, effect: ReleaseSlot) -> None:
        if (outgoing := self._outgoing.get(effect.key)) is not None:
            outgoing.declined(effect.buffer)
        if self.sharing is not None and self.sharing.refuse():
            self.agent.log.warning("%s cannot open our shared memory; arrays go to it over the link", self.name)

    def _lease(self, effect: LeaseStreams, now: float) -> None:
        role = ROLE_SEND if effect.key.outgoing else ROLE_SERVE
        local, remote = self.local_info, self.remote_info
        if any(header.channel == "same_process" for header in effect.buffers) and not ends.paired(local, remote):
            self.protocol.command(
                Abort("the peer hands memory over as inside one process, and is another process"), now
            )
            return
        imports = None if self.sharing is None else self.sharing.imports
        try:
            for header in effect.buffers:
                self._check_target(parse_device(header.device), reply=effect.key.outgoing)
            open_call = self._calls.get(effect.key.call) if effect.key.outgoing else None
            given = open_call.reply_streams if open_call is not None else {}
            self._incoming[effect.key] = Incoming(effect.buffers, role, given, ends.token_of(local), imports)
        except (StreamrtError, MemoryError) as error:
            self._tell(NoMemory(effect.key, str(error), type(error).__name__), now)
            return
        self._tell(StreamsGranted(effect.key), now)

    def _check_target(self, device: Device, *, reply: bool) -> None:
        """Before anything is opened for it: a peer puts arrays only where this side said that it may."""
        if not device.has_streams:
            return
        if reply:
            allowed: Collection[Device] = self.device_map().forward
        elif self.agent.devices is not None:
            allowed = self.agent.devices
        else:
            allowed = (*self.agent.visible_devices(), *self.device_map().forward)
        if device not in allowed:
            names = ", ".join(str(one) for one in sorted(allowed)) or "cpu alone"
            raise PlacementError(f"{device} is not for this connection; arrays may be put on {names}")

    def _pull(self, effect: Pull, now: float) -> None:
        incoming = self._incoming.get(effect.key)
        if incoming is None:
            return
        try:
            incoming.pull(effect.buffer, effect.offset, effect.payload, effect.channel)
        except OpenError as error:
            self.agent.log.info("%s: %s", self.name, error)
            self._tell(OpenFailed(effect.key, effect.buffer, str(error)), now)
            return
        except LifetimeError as error:  # in one process, the sender's close is seen before its last messages are
            self._tell(PeerSuspected(str(error)), now)
            return
        except (StreamrtError, MemoryError) as error:
            self._incoming.pop(effect.key).abandon()
            self._tell(NoMemory(effect.key, str(error), type(error).__name__), now)
            return
        if effect.channel == STAGING:
            self.bytes_in[effect.channel] += len(effect.payload)
        else:
            self.bytes_in[effect.channel] += incoming.headers[effect.buffer].nbytes
            self._tell(Pulled(effect.key, effect.buffer), now)

    def _handshake_done(self, effect: Ready) -> None:
        self.remote_info = effect.info
        ends.meet(self.local_info, effect.info)
        if can_share(self.local_info, effect.info):
            self.sharing = Sharing()
        try:
            self.peer_info = parse_hello(effect.info)
            self.name = self.name or self.peer_info.name or "peer"
            self.map = self._make_map(self.peer_info)
        except StreamrtError as error:
            self.refusal = error
            self.protocol.command(Abort(str(error)), self.agent.clock())
            return
        self._completions.append(self._announce_ready)

    def _announce_ready(self) -> None:
        if self.on_ready is not None:
            self.on_ready(self)
        self.ready.set()

    def _close(self, effect: Closed) -> None:
        self.closed = effect
        for key in list(self._incoming):
            self._incoming.pop(key).abandon()
        for incoming in self._draining:  # nobody looks at them again; their values are delivered
            incoming.hold()
        self._draining.clear()
        self._sending.clear()
        for descriptor in self._handed:  # on a link that is no more
            same_process.discard(descriptor, ends.token_of(self.remote_info))
        self._handed.clear()
        ends.forget(self.local_info)
        if self.sharing is not None:
            self.sharing.close()
        for call in list(self._calls):  # the protocol has ended them all, unless it was broken off
            lost = self._calls.pop(call)
            error = PeerLostError(f"{lost.name} on {self.name!r}: {effect.reason}; its outcome is unknown")
            self._completions.append(functools.partial(lost.future.set_exception, error))
        for key in list(self._outgoing):
            self._completions.append(functools.partial(self._outgoing.pop(key).close, False))
        self._completions.append(self._announce_closed)

    def _announce_closed(self) -> None:
        self.agent.forget(self)
        if self.on_closed is not None:
            self.on_closed(self)
        self.ready.set()
        self.ended.set()

    def _after(self) -> None:
        """Runs what must not run under the lock, then wakes the agent if it has to look at us."""
        completed = False
        broken: BaseException | None = None
        while self._completions:
            try:
                completion = self._completions.popleft()
            except IndexError:
                break
            try:
                completion()
            except BaseException as error:  # noqa: BLE001 - a callback's; the completions behind it are owed to others
                broken = error
            completed = True
        if completed and self._reader not in (0, threading.get_ident()):
            os.eventfd_write(self._reader_event, 1)
        self.agent.attend(self)
        if broken is not None:
            raise broken

    # the end of our calls ---------------------------------------------------------------------------------------------

    def _end_future(self, effect: EndFuture) -> None:
        open_call = self._calls.pop(effect.call, None)
        incoming = self._incoming.pop(Key(effect.call, True, Side.REPLY), None)
        if open_call is None:
            return
        if effect.outcome is Outcome.VALUE:
            self._completions.append(lambda: self._deliver(open_call, effect.body, incoming))
            if incoming is not None and not incoming.drained:
                self._draining.append(incoming)
            return
        if incoming is not None:
            incoming.abandon()
        error = self._error_of(effect, open_call)
        self._completions.append(lambda: open_call.future.set_exception(error))

    def _error_of(self, effect: EndFuture, call: OpenCall) -> BaseException:
        where = f"{call.name} on {self.name!r}"
        match effect.outcome:
            case Outcome.REMOTE_ERROR:
                return rebuild_error(effect.type_name, effect.message, effect.traceback_text, where)
            case Outcome.DEADLINE:
                return DeadlineError(f"{where}: {effect.message}")
            case Outcome.PROTOCOL:
                mismatch = self.closed is not None and self.closed.version_mismatch
                return (VersionError if mismatch else RemoteProtocolError)(f"{where}: {effect.message}")
            case Outcome.CANCELLED:
                return CancelledError(f"{where} was cancelled")
        return PeerLostError(f"{where}: {effect.message}")

    def _deliver(self, call: OpenCall, body: bytes, incoming: Incoming | None) -> None:
        """Rebuilds the reply's value with its streams current, and completes the future."""
        headers = incoming.headers if incoming is not None else ()
        streams = incoming.streams if incoming is not None else []
        try:
            metas, skeleton = payload.read_body(body, headers)
            kind = functools.partial(kind_on, call.kind)
            inherited = self.link.inherited
            if incoming is None or not streams:
                buffers = () if incoming is None else incoming.buffers
                call.future.set_ready(payload.rebuild(metas, skeleton, buffers, kind, allow_pickle=inherited))
            else:
                with guard.using(*streams):
                    value = payload.rebuild(metas, skeleton, incoming.buffers, kind, allow_pickle=inherited)
                call.future.set_result(value, streams=streams)
        except Exception as error:  # noqa: BLE001 - also no memory, or a class that unpickles badly: the future ends
            call.future.set_exception(error)
        finally:
            if incoming is not None:
                incoming.release()

    # running the peer's calls -----------------------------------------------------------------------------------------

    def _launch(self, effect: Launch) -> None:
        incoming = self._incoming.pop(Key(effect.call, False, Side.REQUEST), None)
        running = context.RunningCall(self, effect.call, effect.function, effect.deadline)
        self._running[effect.call] = running
        if incoming is not None and not incoming.drained:
            self._draining.append(incoming)
        self.agent.run((id(self.service), effect.function), lambda: self._serve(effect, incoming, running))

    def _serve(self, effect: Launch, incoming: Incoming | None, running: context.RunningCall) -> None:
        """Runs one call of the peer on a thread of the executor, and sends what became of it."""
        try:
            if running.cancelled:
                self._finish(FailCall(effect.call, "CancelledError", "cancelled before it ran"), None)
                return
            with context.entered(running, self.agent.executor):
                if incoming is None or not incoming.leases:
                    self._run(effect, incoming)
                else:
                    with guard.using(*incoming.streams):
                        self._run(effect, incoming)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: whatever it is, it is the caller's answer
            type_name, message = describe_error(error)
            text = "".join(traceback.format_exception(error))
            if effect.notify:
                self.agent.log.error("%s, notified by %s, raised:\n%s", effect.function, self.name, text.rstrip())
            elif not isinstance(error, StreamrtError):
                self.agent.log.info("%s for %s raised %s", effect.function, self.name, type_name)
            self._finish(FailCall(effect.call, type_name, message, text), None)
            self._check_devices(error, incoming)
        finally:
            if incoming is not None:
                incoming.release()

    def _check_devices(self, error: BaseException, incoming: Incoming | None) -> None:
        """Whether a function failed because a device has: a failed device fails for good, and ends a worker."""
        try:
            for stream in incoming.streams if incoming is not None else ():
                stream.query()
        except DeviceError as failed:
            error = failed
        if isinstance(error, DeviceError):
            self.agent.device_failed(error)

    def _run(self, effect: Launch, incoming: Incoming | None) -> None:
        headers = incoming.headers if incoming is not None else ()
        metas, skeleton = payload.read_body(effect.body, headers)
        inherited = self.link.inherited
        function = self.service.find(effect.function)

        def kind(device: Device) -> str:
            return kind_on(function.arrays, device)

        payload.check_holds(metas, [header.device for header in headers], kind)
        value = payload.rebuild(
            metas, skeleton, incoming.buffers if incoming is not None else (), kind, allow_pickle=inherited
        )
        if not isinstance(value, tuple) or len(value) != 2:
            raise CodecError("the peer sent a call without arguments")
        args, kwargs = value
        del value
        current: Device | None = None
        if incoming is not None:
            for device, event in incoming.ready().items():
                current = current or device
                event.require()  # plain code is about to see host arrays; nothing on a GPU
        self.service.check_arguments(function, tuple(args), kwargs)
        call = self.service.bind(function, str(current or self.agent.main_device or CPU))
        result = call(*args, **kwargs)
        del args, kwargs
        alone = unshared(result)

        # Plain code on a virtual device makes ordinary memory where CuPy would make memory of the current device.
        plain = current if current is not None and current.kind == "host" else CPU
        device_map = self.device_map()
        prepared = payload.prepare(
            result,
            device_map,
            device_map.reply,
            local=self.local_info,
            remote=self.remote_info,
            detach=True,
            allow_pickle=inherited,
            plain=plain,
            patient=True,
            unshared=alone,
            allocate_at=None if self.sharing is None else self.sharing.allocate,
        )
        outgoing = Outgoing(prepared, ends.token_of(self.remote_info)) if prepared.headers else None
        self._finish(FinishCall(effect.call, prepared.body, prepared.headers), outgoing)

    def _finish(self, command: FinishCall | FailCall, outgoing: Outgoing | None) -> None:
        key = Key(command.call, False, Side.REPLY)
        with self.lock:
            self._running.pop(command.call, None)
            if self.closed is not None:
                if outgoing is not None:
                    outgoing.close(False)
                return
            now = self.agent.clock()
            if outgoing is not None:
                self._outgoing[key] = outgoing
            try:
                self.protocol.command(command, now)
            except LocalProtocolError as error:
                if isinstance(command, FailCall):
                    raise
                if outgoing is not None:
                    self._outgoing.pop(key).close(False)
                self.protocol.command(FailCall(command.call, type(error).__name__, str(error)), now)
            self._work(now)
        self._after()


def kind_on(wanted: str | None, device: Device) -> str:
    """The kind of array for a device: the wanted one where it can live there, else CuPy on a GPU, NumPy elsewhere."""
    plain = "cupy" if device.kind == "cuda" else "numpy"
    if wanted is None or (wanted in ("numpy", "cupy", "numba") and wanted != plain and device.kind != "cuda"):
        return plain
    if wanted == "numpy" and device.kind == "cuda":
        return plain
    return wanted


def _end_sent(sent: Future[None] | None, driver: Driver, went: bool) -> None:
    if sent is None:
        return
    if went:
        sent.set_result(None)
    else:
        sent.set_exception(PeerLostError(f"the arguments were not sent to {driver.name!r}: the call was given up"))
