"""Stream order on one connection: what is decided about it, and what is done when the peer is lost.

Everything here runs under the driver's lock, but for `foreign` and `outgoing_of` (on the thread that makes a message,
before it takes the lock), `waits_first` and `waits_again` (also under that of the waits), `derives_first` (under that
of the signals) and what is only read.  Never blocks on a device.
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING

from streamrt.errors import again
from streamrt.segment import Segment
from transport import ordering
from transport.channels import ends, waits
from transport.channels.signals import Signals
from transport.channels.waits import NOTHING, Foreign, Waits
from transport.errors import PeerLostError
from transport.events import BufferHeader, MarkLost
from transport.payload import Prepared
from transport.releaser import Watched, releaser
from transport.sharing import Sharing
from transport.transfer import AUTO, HOST, Outgoing

if TYPE_CHECKING:
    from transport.driver import Driver


class Ordered:
    """The order of one connection's streams.  `agreed` is what both sides have come to (`transport.ordering`)."""

    def __init__(self, driver: Driver) -> None:
        self.agreed = HOST
        self.out: collections.Counter[str] = collections.Counter()
        """Buffers of devices that went by shared memory, by order."""
        self.come: collections.Counter[str] = collections.Counter()
        """Those that came."""
        self._by_pair: dict[tuple[str, str], str] = {}
        self._driver = driver
        self._signals: Signals | None = None
        self._waits: Waits | None = None

    def share(self) -> Sharing:
        """The two share memory: agrees on an order for it.  Does not touch the device."""
        self.agreed = ordering.agreed(self._driver.local_info, self._driver.remote_info)
        sharing = Sharing(self.agreed)
        self._waits, self._signals = sharing.waits, sharing.signals
        self._waits.on_first, self._waits.on_pending = self.waits_first, self.waits_again
        if self._signals is not None:
            self._signals.on_derived = self.derives_first
        return sharing

    def waits_first(self) -> None:
        """A stream here waits for the peer's: from now on another process sees to it that it does not for ever."""
        driver, found = self._driver, self._waits
        if found is None or driver.peer_info is None or found.words is None or found.table is None:
            return
        peer = driver.peer_info
        number = releaser().watch(Watched(peer.pid, peer.started, found.words, found.table, driver.peer_timeout))
        found.on_end = functools.partial(releaser().forget, number)

    def waits_again(self) -> None:
        """A stream here waits for the peer's, where none did a moment ago: the agent looks after it."""
        self._driver.agent.ordered[self._driver] = None

    def derives_first(self, signalled: Segment, derived: Segment) -> bool:
        """A stream here is about to signal behind a third process's: the same process has to mark that before it
        releases.  Whether it knows."""
        number = releaser().derive(signalled, derived)
        if number is not None and self._signals is not None:
            self._signals.on_end = functools.partial(releaser().forget, number)
        return number is not None

    # out

    def foreign(self) -> Foreign:
        """The points of other peers on which what this process makes now may depend.  Does not block the host.

        Raises `PeerLostError`, once, where this thread has taken a value whose bytes turned out never to come: what it
        sends next may be made of them.
        """
        found = waits.foreign(self._waits)
        if (error := waits.untold()) is not None:  # asked last: a loss in between shows here, for marks stay
            raise again(error)
        return found

    @property
    def clear(self) -> bool:
        """Whether nothing that this process makes now depends on other peers.  Does not block the host."""
        return not waits.foreign(self._waits).points

    def outgoing_of(
        self, prepared: Prepared, looks: int = 1, foreign: Foreign = NOTHING, *, nested: bool = False
    ) -> Outgoing | None:
        """The transfer of a message that is about to be given to the protocol, None without buffers.

        `foreign` is what was asked for before the value was prepared, `nested` says that a call is made by a function
        of a peer.  Enqueues signals on leased streams, in stream order.  Does not block the host, but for as many
        `looks` at whether copies have run.  Raises `PeerLostError` where its bytes may be made of what is lost.
        """
        if prepared.fetched and foreign.lost:
            raise self.lost()
        if not prepared.headers:
            return None
        if not any(source.info.device.has_streams for source in prepared.snapshots):
            foreign = NOTHING  # what is in ordinary memory was there when it was copied
        signals = None if foreign.deep else self._signals
        choose = self._order_nested if nested else self._order_of
        token = ends.token_of(self._driver.remote_info)
        outgoing = Outgoing(prepared, token, looks, signals, choose, foreign.points, foreign.own)
        outgoing.wake = self._driver.agent.wake
        if foreign.lost:  # what it names may be wrong, if it is there, or is signalled all the same
            outgoing.close(False)
            raise self.lost()
        return outgoing

    def may_hold(self, foreign: Foreign) -> bool:
        """Whether a message may wait here for its bytes: in host order, in which its streams would not go ahead of
        them anyway, and with nothing in it that may be lost meanwhile.  Does not touch the device."""
        return self.agreed == HOST and not foreign.points and not foreign.own

    def _order_of(self, header: BufferHeader) -> str:
        pair = (header.source, header.device)
        order = self._by_pair.get(pair)
        if order is None:
            local, remote = self._driver.local_info, self._driver.remote_info
            order = HOST if self.agreed == AUTO and not ordering.pays(local, remote, *pair) else self.agreed
            self._by_pair[pair] = order
        return order

    def _order_nested(self, header: BufferHeader) -> str:
        """A nested call may need this process's own host, which a call of the driver's may hold up meanwhile."""
        return HOST if self.agreed == AUTO else self.agreed

    def lost(self) -> PeerLostError:
        """The error of an array that must not go.  Does not touch the device."""
        return PeerLostError(
            f"an array was not sent to {self._driver.name!r}: it may be made of what a peer was to put there, "
            "who was lost before, or whose stream failed"
        )

    @property
    def signalling(self) -> bool:
        """Whether streams of ours have yet to signal something to the peer.  Does not touch the device."""
        return self._signals is not None and self._signals.pending > 0

    @property
    def ready(self) -> bool:
        """Whether `end_signalled` would find something.  Needs no lock.  Does not block the host."""
        return self._signals is not None and self._signals.ready

    def end_signalled(self) -> int:
        """Tells who waits for our own signals that they have run; how many had.  Does not block the host."""
        if self._signals is None:
            return 0
        before = self._signals.pending
        for callback in self._signals.look():
            self._driver.complete(callback)
        return before - self._signals.pending

    # in

    @property
    def awaiting(self) -> bool:
        """Whether streams of ours wait for the peer's.  Does not block the host."""
        return self._waits is not None and self._waits.pending > 0 and self._waits.collect()

    def mark_lost(self, effect: MarkLost) -> None:
        """The connection has failed; if the peer is certainly lost, so are its points.  Does not touch the device."""
        if self._waits is not None and (effect.certain or self._driver.peer_gone()):
            self._waits.mark()

    def release_words(self) -> None:
        """Lets streams go on that wait for what is marked.  Does not touch the device."""
        if self._waits is not None:
            self._waits.release()

    def release_given_up(self) -> None:
        """Lets streams go on that wait for a word which its writer has marked: its stream has failed, or another
        process is lost.  Does not block the host."""
        if self._waits is not None and self._waits.pending and self._waits.given_up():
            self._waits.release()
