"""What one connection shares: memory that we have exported to the peer, and the peer's that is mapped here.

Our segment's descriptor goes with the first message that names a block of it, once (with it that of the words that our
streams signal, unless the connection is in host order).  Until the peer has mapped it (it says so in the segment
itself), a transfer by reference is kept as it is, for the peer may still decline; from then on a transfer is over when
its descriptor has gone, and the block waits for its slot by itself.  So the user's array is free as soon as its
snapshot is taken, and nothing waits for what the peer's user keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from streamrt.device import Block, Device
from transport.channels import bounds, worth_sharing
from transport.channels.exports import DESCRIPTOR, LENT, ORDERED, Export, Exports
from transport.channels.imports import Imports
from transport.channels.signals import Signals
from transport.channels.waits import Waits
from transport.events import Key

FIRST_LOOK_SECONDS = 0.001
MOST_LATE = 256  # transfers that have ended and of which a decline may still come
FIRST_LENT_SECONDS = 100e-6
LONGEST_LENT_SECONDS = 0.01  # between two looks at whether a peer has done with what was lent
LONGEST_LOOK_SECONDS = 0.1  # between two looks at whether a peer has mapped our segment, which it does once
_Named = tuple[int, int, int]  # of a block: its memory's number, its slot, and that slot's generation


class Sharing:
    """The exports, the imports, and the transfers that wait until the peer has mapped our segment.

    Used under the connection's lock, but for `allocate`.
    """

    def __init__(self, order: str = "host") -> None:
        """`order` is the connection's (`transport.ordering`).  Takes no memory.  Does not touch the device."""
        self.exports = Exports()
        self.imports = Imports()
        self.signals: Signals | None = None if order == "host" else Signals()
        self.waits = Waits()
        self._unannounced: list[object] = []
        self._unmapped: dict[Key, dict[int, _Named]] = {}  # by buffer: what the peer had not mapped when it was named
        self._late: dict[Key, dict[int, _Named]] = {}  # the same of transfers that have ended
        self.waiting: dict[Key, None] = {}
        """All of these transfers has gone, and may yet be declined."""
        self._pause = FIRST_LOOK_SECONDS
        self._next_look = 0.0
        self._lent = 0  # blocks that were lent at the last look

    def allocate(self, device: Device, nbytes: int) -> Block | None:
        """Memory for a snapshot that the peer can open; None: anywhere.  Thread-safe.  Does not touch the device."""
        return self.exports.allocate(nbytes, device) if worth_sharing(device, nbytes) else None

    def lend(self, device: Device, address: int, nbytes: int, keep: object) -> Export | None:
        """The user's own memory as a block that the peer can open; None where that cannot be.  Thread-safe.

        Does not block the host.
        """
        return self.exports.lend(device, address, nbytes, keep) if device.kind != "cpu" else None

    # out

    def given(self, key: Key, buffer: int, descriptor: memoryview | bytes) -> None:
        """A block's descriptor is about to go.  Does not touch the device."""
        if not self.exports.announced:
            self._unannounced.append(descriptor)
        number, slot, generation, _, _ = DESCRIPTOR.unpack_from(descriptor)
        number &= ~(LENT | ORDERED)
        if not self.exports.mapped(number):
            self._unmapped.setdefault(key, {})[buffer] = (number, slot, generation)

    def descriptors(self, frames: Sequence[object]) -> tuple[int, ...]:
        """What has to go with a message: our segment, with the first that names a block of it."""
        if not self._unannounced or not any(frames[-1] is one for one in self._unannounced):
            return ()
        self._unannounced.clear()
        self.exports.announced = True
        signals = -1 if self.signals is None else self.signals.fd
        return (self.exports.fd,) if signals < 0 else (self.exports.fd, signals)

    def went(self, key: Key, now: float) -> bool:
        """All of a transfer has gone: whether it is over now.  Else `over` names it later.  Does not block the host."""
        if self._settled(key):
            return True
        if not self.waiting:
            self._look_again(FIRST_LOOK_SECONDS, now)
        self.waiting[key] = None
        return False

    @property
    def watching(self) -> bool:
        """Whether the peer's words are to be looked at, or memory given back for whose release it waits.

        Does not touch the device.
        """
        return bool(self.waiting or self.exports.lent or self.imports.awaited)

    def over(self, now: float) -> list[Key]:
        """The transfers that are over since the peer has mapped our segment; also takes back what was lent and is free.

        Does not touch the device.
        """
        keys = [key for key in self.waiting if self._settled(key)]
        for key in keys:
            del self.waiting[key]
        lent = self.exports.lent
        if lent:
            self.exports.collect()
        if lent > self._lent:
            self._look_again(FIRST_LENT_SECONDS, now)
        elif not keys and now >= self._next_look:
            longest = LONGEST_LENT_SECONDS if lent or self.imports.awaited else LONGEST_LOOK_SECONDS
            self._look_again(min(2 * self._pause, longest), now)
        self._lent = self.exports.lent
        return keys

    def _look_again(self, pause: float, now: float) -> None:
        self._pause, self._next_look = pause, now + pause

    def retiring(self) -> list[int]:
        """The allocations that the peer is to unmap, each once.  Does not touch the device."""
        numbers = list(self.exports.retiring)
        self.exports.retiring.clear()
        return numbers

    def forget(self, key: Key) -> None:
        """Nobody asks for a transfer any more.  Does not touch the device."""
        self.waiting.pop(key, None)
        named = self._unmapped.pop(key, None)
        if named:  # a decline may be on its way
            self._late[key] = named
            if len(self._late) > MOST_LATE:
                del self._late[next(iter(self._late))]

    def next_look(self) -> float | None:
        """When to ask `over` again, None if nothing waits.  Does not touch the device."""
        return self._next_look if self.watching else None

    def declined_late(self, key: Key, buffer: int) -> None:
        """The peer cannot open a block of a transfer that has ended, and will not write its word: it is free.

        Does not touch the device.
        """
        named = self._late.get(key, {}).pop(buffer, None)
        if named is not None:
            _, slot, generation = named
            self.exports.give_up(slot, generation)

    def declined(self, key: Key, buffer: int, device: Device) -> bool:
        """The peer cannot open a block of a device: gives none of it any more, or none at all if it has mapped nothing.

        The block goes again, by another channel.  Whether the refusal is new.  Does not touch the device.
        """
        self._unmapped.get(key, {}).pop(buffer, None)
        return self.exports.refuse(device if self.exports.mapped() else None)

    def _settled(self, key: Key) -> bool:
        """Whether no decline can come for what a transfer has named: it is mapped there, or was given back unused."""
        return all(
            self.exports.mapped(number) or self.exports.released(slot, generation)
            for number, slot, generation in self._unmapped.get(key, {}).values()
        )

    # in, and the end

    def arrived(self, fds: Sequence[int]) -> None:
        """Takes over the descriptors that came with a message.  Does not block the host."""
        ours = 1 if self.signals is None else 2
        for fd in fds[ours:]:
            os.close(fd)
        self.imports.attach(fds[0])
        if len(fds[:ours]) == 2:
            self.waits.attach(fds[1])

    def close(self, gone: Callable[[], bool], seconds: float = 0.0) -> list[Callable[[], None]]:
        """The connection has ended; `gone` says whether the peer's process has, `seconds` how long streams may still
        wait for it.  Whom to call, with no lock held.  Idempotent.  Does not block the host."""
        self.exports.close(gone)
        self.imports.close()
        self.waits.close(bounds.Bound(gone, bounds.clock() + seconds))
        self.waiting.clear()
        return [] if self.signals is None else self.signals.close()
