"""The two rings of one link, one each way: how its ends agree on them, and when each is used.

One end makes the memory and passes its descriptor over the socket; the other maps it if it can.  Each way begins when
its writer says so on the socket: from there on both its ends count what goes by the socket, which gives the order of
the two.  What is said is a *signal*, a message of no frames, its kind in place of the number of descriptors.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

from streamrt.errors import UnavailableError
from streamrt.segment import Segment
from transport.links import Frame, LinkBroken
from transport.links.ring import MOST_BYTES, RingReader, RingWriter, attach, create, usable
from transport.links.socket_writer import SocketWriter

OFFER, TAKEN, BELL = 1, 2, 3
"""Signals: here is memory (with its descriptor); from here on I write there too; look there."""


class RingPair:
    """Nothing at first.  Not thread-safe, but for `glance` and `rouse`."""

    def __init__(self, socket: SocketWriter) -> None:
        self.writer: RingWriter | None = None
        self.reader: RingReader | None = None
        self.awake = False
        """Whether who reads looks into the ring by itself, and says so before it sleeps."""
        self._socket = socket
        self._memory: Segment | None = None
        self._made = False

    # agreeing

    def offer(self) -> None:
        """Makes the memory, where it can be had; `flush` the socket then.  Does not block the host."""
        if self._memory is None and usable():
            with contextlib.suppress(OSError, UnavailableError):  # no descriptor is left: the socket does
                self._memory = create()
                self._made = True
                self._socket.signal(OFFER, [self._memory.fd])

    def heed(self, signal: int, fds: collections.deque[int], starved: bool) -> bool:
        """Does what a signal of the peer says; False for one that is none, or cannot be here.

        `fds` have arrived; `starved`: others have found no room here.  Does not block the host.
        """
        if signal == BELL:
            return self.reader is not None
        if signal == TAKEN:
            if self._memory is None or self.reader is not None:
                return False
            self.reader = RingReader(self._memory, int(not self._made))
        elif signal != OFFER or self._memory is not None or not usable():
            return False
        elif not fds:
            return starved
        else:
            with contextlib.suppress(OSError, ValueError):  # then they are not used
                self._memory = attach(fds.popleft())
        if self._memory is not None and self.writer is None:
            self.writer = RingWriter(self._memory, int(self._made))
            self._socket.signal(TAKEN)
            with contextlib.suppress(LinkBroken):  # this end is reading, and will hear of it in its turn
                self._socket.flush()
        return True

    # sending

    def passes(self, writer: RingWriter, frames: Sequence[Frame], sizes: Sequence[int], total: int) -> bool:
        """Passes a message that has no descriptors, if it is small and its reader awake; else it goes by the socket.

        Raises `RingFault`, `LinkBroken`.  Does not block the host.
        """
        if writer.claim_bell() or total > MOST_BYTES or not writer.push(frames, sizes):
            return False  # whoever sleeps is better woken by the message than by a signal
        if writer.claim_bell() and not self._socket.waits:  # what waits wakes it, too
            self._socket.signal(BELL)
            self._socket.flush()
        return True

    # looking

    def glance(self, looks: int) -> bool:
        """Looks up to so many times: whether something lies there.  Keeps the interpreter.  Does not block the host."""
        reader = self.reader
        try:
            return reader is not None and reader.watch(looks)
        except ValueError:  # it was closed meanwhile, which reading tells
            return True

    def rouse(self) -> None:
        """Who reads looks by itself, until `doze`.  Does not block the host."""
        self.awake = True
        reader = self.reader
        if reader is not None:
            try:
                reader.rouse()
            except ValueError:
                return  # as above

    def doze(self) -> bool:
        """Whether who reads may sleep on the socket: whatever comes from now on wakes it.  Does not block the host."""
        self.awake = False
        return self.reader is None or self.reader.doze()

    def close(self) -> None:
        """Unmaps the memory.  Idempotent.  Does not block the host."""
        self.writer = self.reader = None
        if self._memory is not None:
            self._memory.close()
