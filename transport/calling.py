"""Our calls over one connection: how they start, what they wait for, and how they end.

A caller that waits reads the link itself (`read_until`), so that its reply needs no thread's hop.  Everything here runs
under the driver's lock, but for the preparation of arguments, the reading, and what completes futures.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from streamrt import guard
from streamrt.device import Device, quiet
from streamrt.errors import LifetimeError
from streamrt.future import DeviceFuture
from streamrt.stream import Stream
from transport import context, lend, payload
from transport.channels.ucx_worker import progressing
from transport.channels.waits import Loss
from transport.codec import Names
from transport.errors import DeadlineError, PeerLostError, RemoteProtocolError, VersionError
from transport.events import CancelCall, EndFuture, FreeBuffers, HoldCall, Key, Outcome, Side, StartCall
from transport.links import GLANCES, LOOK_AGAIN_SECONDS, OwningLink
from transport.patience import LONG_SECONDS
from transport.remote_errors import rebuild_error
from transport.responsive import responsive
from transport.transfer import Incoming, Outgoing, read_message

if TYPE_CHECKING:
    from transport.driver import Driver

LONG_CALL_SECONDS = 5.0
CALL_LOOKS = 30  # at the bytes of small arrays, by a caller that waits anyway, to save a message: some 100 us
LONGEST_POLL = 1 << 30  # milliseconds; the system takes 31 bits
MANY_CALLS = 16  # open at once, from which on it is their number a second that counts


class _Number:
    """By which id the protocol knows a call that is held: another once it goes.

    Apart from the call, which a future's `on_cancel` must not keep: it would be a cycle.
    """

    __slots__ = ("now",)

    def __init__(self, held: int) -> None:
        self.now = held


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


class Calling:
    """The calls of ours that have not ended, by id."""

    def __init__(self, driver: Driver) -> None:
        self.open: dict[int, OpenCall] = {}
        link = driver.link
        self._owning_link = link if isinstance(link, OwningLink) else None
        self._driver = driver
        self._last = 0
        self._last_held = 0
        self._notifies: dict[int, Future[None]] = {}  # those without buffers that have not gone yet
        self._reading = threading.Lock()
        self._reader = 0  # the thread that reads its own reply
        self._reader_event = -1  # wakes it when another thread has brought that
        self._poll: select.poll | None = None  # of the link and of that
        self._event_lock = threading.RLock()  # so that nobody writes to it once it is closed
        self.looking = False
        """Whether that thread looks at the devices too, in the agent's place."""

    @property
    def reading(self) -> bool:
        """Whether a thread reads its own reply now.  Does not touch the device."""
        return self._reader != 0

    @property
    def lends(self) -> bool:
        """Whether a call that waits may lend ordinary memory: what it leaves in the link can be taken back.

        Does not touch the device.
        """
        return self._owning_link is not None

    # starting

    def submit(
        self,
        function: str,
        value: object,
        *,
        timeout: float | None,
        copy: bool | None,
        detach: bool,
        notify: bool,
        reply_streams: Mapping[Device, Stream],
        root: Names,
        waits: bool = False,
    ) -> DeviceFuture[Any]:
        """Starts a call of ``(args, kwargs)``, which are called `root` in messages.

        With `waits` the calling thread comes to `read_until` next, and does itself what the agent would be woken for.
        Enqueues snapshots on the current streams; does not block the host.
        """
        driver = self._driver
        driver.check_open()
        device_map = driver.device_map()
        lend.drain()
        running = context.running_call()
        foreign = driver.transfers.ordered.foreign()
        if running is not None and (error := running.lost()) is not None:  # asked last: marks stay
            raise error
        prepared = payload.prepare(
            value,
            device_map,
            device_map.request,
            channel_of=driver.transfers.channel,
            copy=copy,
            detach=detach,
            allow_pickle=driver.link.inherited,
            root=root,
            looks=CALL_LOOKS if waits else 0,
            allocate_at=driver.transfers.allocator,
            lend_at=driver.transfers.lender,
            hold=not notify and driver.transfers.may_hold(foreign),
        )
        sent: Future[None] | None = None  # what is in the body may be written
        if prepared.headers or prepared.late is not None or notify:
            sent = Future()
            sent.set_running_or_notify_cancel()  # nobody cancels it: it says what has become of memory
        future: DeviceFuture[Any] = DeviceFuture(sent=sent)
        if self._owning_link is not None and not notify:
            future.fetch = self.fetch
        now = driver.agent.clock()
        outgoing: Outgoing | None = None
        try:
            looks = CALL_LOOKS if waits else 1  # at whether snapshots have run
            outgoing = driver.transfers.ordered.outgoing_of(prepared, looks, foreign, nested=running is not None)
            headers = () if outgoing is None else outgoing.headers
            if outgoing is not None and sent is not None:
                outgoing.done = functools.partial(self._end_sent, sent)
            with driver.lock, driver.whole:
                driver.check_open()
                kind = driver.arrays or prepared.first_kind
                deadline = None if timeout is None else now + timeout
                if prepared.late is None:
                    self._last = call = self._last + 1
                    driver.protocol.command(StartCall(call, function, prepared.body, headers, deadline, notify), now)
                else:
                    self._last_held = call = self._last_held - 1
                    driver.protocol.command(HoldCall(call, function, deadline), now)
                if outgoing is not None:
                    driver.transfers.outgoing[Key(call, True, Side.REQUEST)] = outgoing
                elif notify and sent is not None:
                    self._notifies[call] = sent
                if not notify:
                    self.open[call] = opened = OpenCall(future, function, kind, reply_streams, now)
                    driver.agent.open_calls[opened] = None
                if prepared.late is None:
                    future.on_cancel = lambda _: driver.command(CancelCall(call))
                else:
                    number = _Number(call)
                    future.on_cancel = functools.partial(self._cancel_held, number)
                    send = functools.partial(self._send_held, number, deadline)
                    driver.transfers.hold(Key(call, True, Side.REQUEST), prepared.late, send)
                driver.work(now)
        except BaseException:
            if outgoing is not None and outgoing not in driver.transfers.outgoing.values():
                outgoing.close(False)  # nobody else has it: what was given is ours again
            raise
        driver.after(attend=not waits)
        if len(driver.agent.open_calls) >= MANY_CALLS and not waits:
            self._leave_alone()
        return future

    def _send_held(self, number: _Number, deadline: float | None, body: bytes, now: float) -> None:
        """The bytes of a call that was held are there: it goes.  Under the driver's lock."""
        held = number.now
        opened = self.open.pop(held)
        self._last = number.now = self._last + 1
        self.open[number.now] = opened
        command = StartCall(number.now, opened.name, body, (), deadline, held=held)
        self._driver.protocol.command(command, now)
        self._driver.complete(functools.partial(self._end_sent, opened.future.sent, True))

    def _cancel_held(self, number: _Number, _: object) -> None:
        """The future of a call that was held is cancelled.  Does not block the host."""
        known = number.now
        self._driver.command(CancelCall(known))
        if number.now != known:  # it has gone meanwhile
            self._driver.command(CancelCall(number.now))

    def give_up(self, future: DeviceFuture[Any]) -> None:
        """The caller stops waiting for its call: cancels it, and makes sure that nobody reads what it lent any more.

        Does not block the host.
        """
        future.cancel()
        if self._owning_link is not None:
            with self._driver.lock, self._driver.whole:
                self._owning_link.own_queued()

    # waiting

    def read_until(self, future: DeviceFuture[Any], timeout: float | None = None) -> None:
        """Reads the link on the calling thread until the future has ended, so that its reply needs no thread's hop.

        Asks the link and the devices for a while before it sleeps and leaves the devices to the agent (`patience`).
        Returns at once where another thread reads already: it then brings the reply.  Blocks the host for the message,
        `timeout` seconds at most.

        The agent's thread leaves the link alone for a moment more (`untended`).
        """
        driver = self._driver
        if future.done() or not self._reading.acquire(blocking=False):
            driver.agent.attend(driver)
            return
        try:
            self._read(future, None if timeout is None else time.monotonic() + timeout)
        finally:
            self._reading.release()
            driver.agent.attend(driver)
            if driver.ended.is_set():
                self.close_descriptors()

    def fetch(self, future: DeviceFuture[Any], timeout: float | None = None) -> None:
        """`read_until`, for who waits for a future of ours (`DeviceFuture.fetch`)."""
        with quiet(), responsive():
            self.read_until(future, timeout)

    def _read(self, future: DeviceFuture[Any], deadline: float | None) -> None:
        driver = self._driver
        driving = context.driving()  # callbacks of other futures may run, and must not wait here
        try:
            with driving:  # what is dropped may be the user's, and have a finaliser: the agent still has the link
                driver.agent.drain_memory()  # while the peer works, and not when the next message is made
            with driver.lock, driver.whole:
                if driver.closed is not None:
                    return
                try:
                    poll = self._poll or self._make_poll()
                except OSError:
                    return  # no descriptor is left: the agent reads
                if not driver.agent.pause_reading(driver):
                    return
                driver.agent.untended.tend(driver)
            self._reader = threading.get_ident()
            rings = driver.rings
            self.looking = True
            spinning = attended = time.monotonic() + LONG_SECONDS
            while not future.done() and driver.closed is None:
                if (now := time.monotonic()) > attended:  # also where there is always something to receive
                    attended = now + LONG_SECONDS
                    if self._leave_devices(now, deadline):
                        return
                if self.looking and driver.transfers.polling and driver.transfers.ready:
                    with driving:
                        driver.look()
                if rings is not None and self.looking and rings.glance(GLANCES):
                    self._receive(driving)
                    if future.done():
                        break  # else it may be one that waits for the socket
                arrived = poll.poll(0)
                if not arrived and (now > spinning or progressing()):
                    if self._leave_devices(now, deadline):
                        return
                    if not driver.doze():
                        self._receive(driving)
                        continue
                    longest = LONGEST_POLL if rings is None else 1000 * LOOK_AGAIN_SECONDS
                    arrived = poll.poll(longest if deadline is None else min(1000 * (deadline - now) + 1, longest))
                for ready, _ in arrived:
                    if ready == self._reader_event:
                        os.eventfd_read(self._reader_event)
                    else:
                        self._receive(driving)
        except BaseException:
            driving.__exit__()  # else this thread could never wait again
            raise
        finally:
            self._reader = 0
            self.looking = False
            try:
                if driver.agent.untended.ready():
                    driver.agent.untended.leave(driver)
                else:
                    driver.agent.resume_reading(driver)
            except BaseException:
                driver.agent.resume_reading(driver)  # Ctrl-C, perhaps before the alarm was set
                raise

    def _leave_devices(self, now: float, deadline: float | None) -> bool:
        """Leaves devices and what is due to the agent; whether the reading caller's own time is over."""
        self.looking = False
        self._driver.agent.attend(self._driver)
        return deadline is not None and now >= deadline

    def _receive(self, driving: context.driving) -> None:
        """Receives on the reading caller's thread, which sees to the agent itself before it sleeps or leaves."""
        with driving:
            self._driver.on_readable(attend=False)

    def _make_poll(self) -> select.poll:
        """What a reading caller sleeps on: the link, and what wakes it when others have brought its reply."""
        self._reader_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = poll = select.poll()
        poll.register(self._driver.link.fileno(), select.POLLIN)
        poll.register(self._reader_event, select.POLLIN)
        return poll

    def _leave_alone(self) -> None:
        """Many calls are open and this thread starts more: what has come is read a little later, many at once."""
        agent = self._driver.agent
        if self._poll is None or self._reader or not agent.untended.ready():
            return
        if agent.untended.hold(self._driver):
            with self._driver.lock, self._driver.whole:
                agent.pause_reading(self._driver)
            agent.untended.hold(self._driver)  # the alarm may have rung for it meanwhile, when it was not paused yet

    def wake_reader(self) -> None:
        """Futures have ended on the calling thread: whoever reads for one of them looks again.  Does not block."""
        if self._reader in (0, threading.get_ident()):
            return
        with self._event_lock:
            if self._reader_event >= 0:  # else the reader has left meanwhile
                os.eventfd_write(self._reader_event, 1)

    def close_descriptors(self) -> None:
        """Closes what only a reading caller uses, unless one is there, who then does.  Idempotent.  Does not block."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            with self._event_lock:
                descriptor, self._reader_event, self._poll = self._reader_event, -1, None
                if descriptor >= 0:
                    os.close(descriptor)
        finally:
            self._reading.release()

    def after_fork(self) -> None:
        """In a forked child: nobody reads here.  Does not block the host."""
        self._reading, self._event_lock = threading.Lock(), threading.RLock()

    def note_long(self, now: float) -> None:
        """Logs, once each, the calls that have waited long: who waits for which call of whom.  Does not block."""
        agent = self._driver.agent
        for call in list(self.open.values()):
            if not call.noted and now - call.started >= LONG_CALL_SECONDS:
                call.noted = True
                waited = now - call.started
                agent.log.info("%s has waited %.0f s for %s of %s", agent.name, waited, call.name, self._driver.name)

    # ending

    def freed(self, effect: FreeBuffers) -> None:
        """A request without buffers has gone, or was dropped: the end of a notify."""
        if effect.key.outgoing and effect.key.call in self._notifies:
            sent = self._notifies.pop(effect.key.call)
            self._driver.complete(functools.partial(self._end_sent, sent, effect.sent))

    def end(self, effect: EndFuture, incoming: Incoming | None) -> None:
        """A call has ended: its future will, once the lock is let go."""
        call = self.open.get(effect.call)
        if call is not None and effect.outcome is Outcome.VALUE:
            self._driver.complete(functools.partial(self._deliver, call, effect.body, incoming))
        else:
            if incoming is not None:
                incoming.abandon()
            if call is not None and effect.outcome is Outcome.PEER_LOST:
                self._end_lost(call, f"{call.name} on {self._driver.name!r}: {effect.message}")
            elif call is not None:
                self._driver.complete(functools.partial(call.future.set_exception, self._error_of(effect, call)))
        self._forget(effect.call)  # last: if this is broken off, `lose` ends it

    def lose(self, reason: str) -> None:
        """The connection is over: what is still open ends, which is nothing unless it was broken off."""
        for number, call in list(self.open.items()):
            self._end_lost(call, f"{call.name} on {self._driver.name!r}: {reason}; its outcome is unknown")
            self._forget(number)
        for sent in self._notifies.values():
            self._driver.complete(functools.partial(self._end_sent, sent, False))
        self._notifies.clear()

    def _forget(self, number: int) -> None:
        call = self.open.pop(number, None)
        if number < 0:
            self._driver.transfers.drop_held(Key(number, True, Side.REQUEST))
            if call is not None:
                self._driver.complete(functools.partial(self._end_sent, call.future.sent, False))
        if call is not None:
            self._driver.agent.open_calls.pop(call, None)

    def _end_lost(self, call: OpenCall, reason: str) -> None:
        """Ends a call whose outcome is unknown; where a child died, as soon as it is known how."""
        driver = self._driver

        def end(how: str) -> None:
            call.future.set_exception(PeerLostError(reason + how))

        if driver.ending is not None and driver.broke:
            driver.complete(functools.partial(driver.ending.tell, end))
        else:
            driver.complete(functools.partial(end, ""))

    def _error_of(self, effect: EndFuture, call: OpenCall) -> BaseException:
        where = f"{call.name} on {self._driver.name!r}"
        match effect.outcome:
            case Outcome.REMOTE_ERROR:
                return rebuild_error(effect.type_name, effect.message, effect.traceback_text, where)
            case Outcome.DEADLINE:
                return DeadlineError(f"{where}: {effect.message}")
            case Outcome.PROTOCOL:
                closed = self._driver.closed
                mismatch = closed is not None and closed.version_mismatch
                return (VersionError if mismatch else RemoteProtocolError)(f"{where}: {effect.message}")
            case Outcome.CANCELLED:
                return CancelledError(f"{where} was cancelled")
        return PeerLostError(f"{where}: {effect.message}")

    def _deliver(self, call: OpenCall, body: bytes, incoming: Incoming | None) -> None:
        """Rebuilds the reply's value with its streams current, and completes the future."""
        try:
            metas, skeleton = read_message(body, incoming)
            kind = functools.partial(payload.kind_on, call.kind)
            inherited = self._driver.link.inherited
            transfers = self._driver.transfers
            targets = transfers.inlined_targets(metas, reply=True)
            if targets:
                incoming = transfers.lease_inlined(targets, incoming, reply=True, given=call.reply_streams)
            buffers = () if incoming is None else incoming.buffers
            streams = [] if incoming is None else incoming.streams
            if incoming is None or not streams:
                call.future.set_ready(payload.rebuild(metas, skeleton, buffers, kind, allow_pickle=inherited))
            else:
                with guard.using(*streams):
                    inlined = incoming.fill(metas)
                    value = payload.rebuild(metas, skeleton, buffers, kind, inlined=inlined, allow_pickle=inherited)
                points = incoming.points
                lost = Loss(points, f"{call.name} on {self._driver.name!r}") if points else None
                call.future.set_result(value, streams=streams, lost=lost)
        except Exception as error:  # noqa: BLE001 - also no memory, or a class that unpickles badly: the future ends
            call.future.set_exception(error)
        except BaseException as broken:  # Ctrl-C on this thread: the future may be another's
            where, why = f"{call.name} on {self._driver.name!r}", type(broken).__name__
            call.future.set_exception(LifetimeError(f"{where}: its value is lost, {why} broke off its rebuilding"))
            raise
        finally:
            if incoming is not None:
                incoming.release()

    def _end_sent(self, sent: Future[None], went: bool) -> None:
        with contextlib.suppress(InvalidStateError):  # the user has it, and may have ended it
            if went:
                sent.set_result(None)
            else:
                name = self._driver.name
                sent.set_exception(PeerLostError(f"the arguments were not sent to {name!r}: the call was given up"))
