"""One connection as it runs: the sans-io protocol, its link, and what is done about effects.

The protocol decides, the driver does.  Whoever has something for the connection (a calling thread, the agent's thread,
a thread that ran a function) takes the lock, tells the protocol, carries out what it wants, and lets go; so a call goes
to the link on the caller's own thread, with no hop.  Futures are completed after the lock is let go, because their
callbacks are the user's.

A driver has three parts, each with its own tables: `calls` (ours), `served` (the peer's) and `transfers` (both ways).

Rules:

- Nothing here blocks on a device or on the peer.
- A value is rebuilt and a function is run with the leased streams of its message current, behind all its pulls.
- What was leased for a message goes back when the message is done with, whatever became of it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from streamrt.errors import ClosedError, StreamrtError
from transport import context, process
from transport.calling import Calling
from transport.channels import can_share
from transport.deadlines import earlier
from transport.device_map import DeviceMap
from transport.ending import Ending
from transport.errors import PeerLostError, TransportError, VersionError
from transport.events import (
    Abort,
    Announced,
    Closed,
    Command,
    Effect,
    EndFuture,
    FreeBuffers,
    Frozen,
    Goodbye,
    Key,
    Launch,
    LeaseStreams,
    MarkLost,
    Outcome,
    PeerGone,
    PeerSuspected,
    Pull,
    Ready,
    ReleaseSlot,
    ReleaseWords,
    Retired,
    Send,
    Side,
    StopCall,
    Watch,
    Watched,
)
from transport.hello import PeerInfo, parse_hello
from transport.links import Link, LinkBroken, RingLink, SinkLink, Unreached
from transport.moving import Moving
from transport.protocol import Connection
from transport.running import Running
from transport.service import Service

if TYPE_CHECKING:
    from transport.agent import Agent


class _Whole:
    """Inside the driver's lock.  Work that is broken off there, by Ctrl-C above all, is half done: the connection ends.

    The lock itself has no Python code of its own, before or behind which Ctrl-C could come and leave it held for ever.
    """

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StreamrtError):
            self._driver.break_off(error)


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
        self.lock = threading.RLock()
        self.whole = _Whole(self)
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.closed: Closed | None = None
        self.refusal: StreamrtError | None = None
        self.local_info = local_info
        self.remote_info: dict[str, object] = {}
        self.peer_info: PeerInfo | None = None
        self.map: DeviceMap | None = None
        self.on_ready: Callable[[Driver], None] | None = None
        self.ending: Ending | None = None  # of the peer's process, if that is a child of ours
        self.due: float | None = None
        """When something is to be done, as it was when the agent's thread has looked."""
        self.look_again = 0.0
        """When the agent's thread looks into the link's ring once more, if nothing happens before."""
        self.rings = link if local_info.get("rings") is True and isinstance(link, RingLink) else None
        self.attended = False
        """A calling thread looks after the link's arrivals, and says when it leaves that to the agent's thread."""
        self.broke = False  # the link did, or the peer's process has ended: nobody has ended the connection
        self.calls = Calling(self)
        self.served = Running(self)
        self.transfers = Moving(self)
        self._make_map = make_map
        self._completions: collections.deque[Callable[[], None]] = collections.deque()
        self._in_effects = False
        self._forked = False
        if isinstance(link, SinkLink):
            link.sink = self.transfers.sink

    # what it is -------------------------------------------------------------------------------------------------------

    def device_map(self) -> DeviceMap:
        """The connection's map; there once the handshake is done.  Raises `ClosedError`, `PeerLostError`."""
        if self.map is None:
            self.check_open()
            raise ClosedError(f"the connection to {self.name!r} is not open yet")
        return self.map

    def check_open(self) -> None:
        """Raises `ClosedError` or `PeerLostError` when the connection is over.  Does not touch the device."""
        if self.closed is not None:
            raise self.closed_error()

    def closed_error(self) -> TransportError | ClosedError:
        """The error that says why the connection is over.  Does not touch the device."""
        closed = self.closed
        if self._forked:
            return ClosedError(f"{self.name!r} is a peer of the parent process; spawn instead of fork, or connect here")
        if closed is None or closed.graceful:
            how = "" if self.ending is None else self.ending.known(graceful=True)
            return ClosedError(f"the connection to {self.name!r} is closed{how or '; open a new one'}")
        if closed.version_mismatch:
            return VersionError(f"{self.name!r}: {closed.reason}")
        how = "; connect again" if self.ending is None else self.ending.known() if self.broke else ""
        return PeerLostError(f"the connection to {self.name!r} is gone: {closed.reason}{how}")

    @property
    def polling(self) -> bool:
        """Whether the agent has to look at a device: chunks that are not ready, copies that have not run, no caller
        that looks itself."""
        return self.transfers.polling and not self.calls.looking

    def next_timeout(self) -> float | None:
        """When `tick` has something to do, if nothing comes before.  Does not touch the device."""
        due, look = self.protocol.next_timeout(), self.transfers.next_look()
        return due if look is None else earlier(due, look)

    # what the agent calls ---------------------------------------------------------------------------------------------

    def on_readable(self, *, attend: bool = True) -> None:
        """The link may have messages.  Without `attend` the caller sees to it that the agent looks at us in time.

        Does not block the host.
        """
        with self.lock, self.whole:
            if self.closed is not None:
                return
            now, worked = self.agent.clock(), False
            try:
                while True:
                    messages = self.link.receive()
                    descriptors = self.transfers.taken_descriptors()
                    for frames in messages:
                        if descriptors and frames is messages[-1]:
                            self.transfers.descriptors_came(descriptors)
                        self.protocol.receive(frames, now)
                        self.work(now)
                    worked = worked or bool(messages)
                    if not messages or not self.link.readable:
                        break
            except LinkBroken as broken:
                self._suspect(broken, now)
                worked = False
            if not worked:  # else all was done behind the last message
                self.work(now)
        self.after(attend=attend)

    def on_writable(self) -> None:
        """The link takes bytes again.  Does not block the host."""
        with self.lock, self.whole:
            if self.closed is not None:
                return
            now = self.agent.clock()
            try:
                self.link.flush()
            except LinkBroken as broken:
                self._suspect(broken, now)
            self.work(now)
        self.after()

    def tick(self, now: float) -> None:
        """Does what is due, and looks at the devices.  Does not block the host."""
        with self.lock, self.whole:
            if self.closed is not None:
                return
            due = self.protocol.next_timeout()
            if due is not None and due <= now:
                self.protocol.handle_timeout(now)
            self.work(now)
        self.after()

    def look(self) -> None:
        """Looks at the devices, for a caller that waits.  Does not block the host."""
        with self.lock, self.whole:
            if self.closed is not None:
                return
            self.work(self.agent.clock())
        self.after(attend=False)

    def offer_rings(self) -> None:
        """Lets small messages go by memory of both processes, where both can.  Does not block the host."""
        with self.lock, self.whole:
            if self.rings is None or self.closed is not None or self.remote_info.get("rings") is not True:
                return
            if not can_share(self.local_info, self.remote_info):
                return
            try:
                self.rings.offer_rings()
            except LinkBroken as broken:
                self._suspect(broken, self.agent.clock())
        self.after()

    def doze(self) -> bool:
        """Whether who reads may sleep until the link's descriptor can be read.  Does not block the host."""
        if self.rings is None:
            return True
        with self.lock, self.whole:
            return self.closed is not None or self.rings.doze()

    def moved(self) -> None:
        """UCX has moved something.  Does not block the host.

        What it has taken is told to the peer at once.  What has come is delivered after all that the peer has said
        before has been read: perhaps that it wants it no longer, and has written to what it had lent.
        """
        with context.driving():  # callbacks of futures may run, and must not wait here: UCX would stand still
            try:
                with self.lock, self.whole:
                    if self.closed is None:
                        self.work(self.agent.clock())
                self.on_readable(attend=False)
                with self.lock, self.whole:
                    if self.closed is None:
                        now = self.agent.clock()
                        self.transfers.moved(now)
                        self.work(now)
            except Exception as error:
                self.agent.log.exception("the connection to %s failed", self.name)
                self.abort(f"a fault of this side: {type(error).__name__}: {error}")
            self.after()

    def fact(self, fact: PeerGone | PeerSuspected | Frozen | Watched) -> None:
        """Tells the protocol what the agent learnt of the peer's process.  Does not block the host."""
        with self.lock, self.whole:
            now = self.agent.clock()
            self.broke |= self.closed is None and isinstance(fact, PeerGone)
            self.protocol.fact(fact, now)
            self.work(now)
        self.after()

    def command(self, command: Command) -> None:
        """Tells the protocol what this side wants; nothing when the connection is over.  Does not block the host."""
        with self.lock, self.whole:
            if self.closed is None:
                now = self.agent.clock()
                self.protocol.command(command, now)
                self.work(now)
        self.after()

    @property
    def peer_timeout(self) -> float:
        """After how many seconds a peer that is silent or stopped is given up.  Does not touch the device."""
        return self.protocol.limits.peer_timeout

    def peer_gone(self) -> bool:
        """Whether the peer's process is over, where it is of this host.  Does not block the host."""
        peer = self.peer_info
        return peer is None or process.ended(peer.pid, peer.started)

    def goodbye(self) -> None:
        """Begins a graceful end.  Does not block the host; `ended` is set at the end."""
        self.command(Goodbye())

    def abort(self, reason: str, *, not_yet: bool = False) -> None:
        """Ends at once: open calls fail with `PeerLostError`.  `not_yet` lets the peer connect again soon.

        Does not block the host.
        """
        self.command(Abort(reason, not_yet))

    def break_off(self, error: BaseException) -> None:
        """Ends the connection because work on it was broken off.  Under the lock; does not block the host."""
        self._in_effects = False
        if self.closed is None:
            reason = f"work on it was broken off by {type(error).__name__}"
            try:
                self.protocol.command(Abort(reason), self.agent.clock())
                self.work(self.agent.clock())
            except Exception:
                self.agent.log.exception("the connection to %s could not be ended in order", self.name)
            if self.closed is None:
                self._close(Closed(graceful=False, reason=reason), self.agent.clock())
        self.agent.call_soon(self.after)

    def after_fork(self) -> None:
        """In a forked child: the connection is the parent's, and closed here.  Does not block the host."""
        self._forked = True
        self.lock = threading.RLock()
        self.calls.after_fork()
        self.ready, self.ended = threading.Event(), threading.Event()
        self.ready.set()
        self.ended.set()
        self.closed = Closed(graceful=False, reason="this process was forked")

    # effects ----------------------------------------------------------------------------------------------------------

    def work(self, now: float) -> None:
        """Carries out effects until there are none, and feeds the link.  Under the lock; does not block the host."""
        if self._in_effects:
            return
        self._in_effects = True
        self.agent.touched[self] = None
        try:
            protocol, transfers = self.protocol, self.transfers
            while (effects := protocol.drain()) or transfers.move(now):
                for effect in effects:
                    CARRY_OUT[type(effect)](self, effect, now)
            transfers.look()
        finally:
            self._in_effects = False

    def _suspect(self, broken: LinkBroken, now: float) -> None:
        self.broke |= self.closed is None
        self.protocol.fact(PeerSuspected(str(broken) or "the link broke", isinstance(broken, Unreached)), now)

    def complete(self, completion: Callable[[], None]) -> None:
        """Runs something once the lock is let go: what is the user's, or may wait.  Does not block the host."""
        self._completions.append(completion)

    def after(self, *, attend: bool = True) -> None:
        """Runs what must not run under the lock, then wakes the agent if it has to look at us (and `attend`)."""
        completed = False
        broken: BaseException | None = None
        try:
            while self._completions:
                try:
                    completion = self._completions.popleft()
                except IndexError:
                    break
                try:
                    completion()
                except BaseException as error:  # noqa: BLE001 - a callback's; those behind it are owed to others
                    broken = error
                completed = True
            if completed:
                self.calls.wake_reader()
            if attend:
                self.agent.attend(self)
        except BaseException:  # Ctrl-C between two of them: the agent's thread does the others
            self.agent.call_soon(self.after)
            raise
        if broken is not None:
            raise broken

    def _send(self, effect: Send, now: float) -> None:
        try:
            self.transfers.send(effect.frames)
        except LinkBroken as broken:
            self._suspect(broken, now)

    def _launch(self, effect: Launch, now: float) -> None:
        self.served.launch(effect, self.transfers.take(Key(effect.call, False, Side.REQUEST)))

    def _end_future(self, effect: EndFuture, now: float) -> None:
        key, transfers = Key(effect.call, True, Side.REPLY), self.transfers
        whole = effect.outcome is Outcome.VALUE
        self.calls.end(effect, transfers.take(key) if whole else transfers.incoming.pop(key, None))

    def _stop_call(self, effect: StopCall, now: float) -> None:
        self.served.stop(effect, self.transfers.incoming.pop(Key(effect.call, False, Side.REQUEST), None))

    def _free(self, effect: FreeBuffers, now: float) -> None:
        self.transfers.freed(effect)
        self.calls.freed(effect)

    def _handshake_done(self, effect: Ready, now: float) -> None:
        self.remote_info = effect.info
        self.transfers.meet()
        try:
            self.peer_info = parse_hello(effect.info)
            self.name = self.name or self.peer_info.name or "peer"
            self.map = self._make_map(self.peer_info)
        except StreamrtError as error:
            self.refusal = error
            self.protocol.command(Abort(str(error)), now)
            return
        self.complete(self._announce_ready)

    def _announce_ready(self) -> None:
        try:
            if self.on_ready is not None:
                self.on_ready(self)
        finally:
            self.ready.set()

    def _close(self, effect: Closed, now: float) -> None:
        self.closed = effect
        self.calls.lose(effect.reason)
        self.served.close()
        self.transfers.close()
        self.complete(self._announce_closed)

    def _announce_closed(self) -> None:
        self.ready.set()
        self.ended.set()  # before the agent forgets it: a reader that leaves between would keep its descriptor
        self.agent.forget(self)


CARRY_OUT: Final[dict[type[Effect], Callable[[Driver, Any, float], None]]] = {
    Send: Driver._send,
    LeaseStreams: lambda driver, effect, now: driver.transfers.lease(effect, now),
    Pull: lambda driver, effect, now: driver.transfers.pull(effect, now),
    Launch: Driver._launch,
    Watch: lambda driver, effect, now: driver.transfers.watch(effect, now),
    FreeBuffers: Driver._free,
    EndFuture: Driver._end_future,
    StopCall: Driver._stop_call,
    ReleaseSlot: lambda driver, effect, now: driver.transfers.released(effect),
    Ready: Driver._handshake_done,
    Closed: Driver._close,
    Retired: lambda driver, effect, now: driver.transfers.retired(effect.buffer_id),
    Announced: lambda driver, effect, now: driver.transfers.announced(effect),
    MarkLost: lambda driver, effect, now: driver.transfers.ordered.mark_lost(effect),
    ReleaseWords: lambda driver, effect, now: driver.transfers.ordered.release_words(),
}
"""What carries out each effect, under the driver's lock."""
