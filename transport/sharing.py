"""What one connection shares: memory that we have exported to the peer, and the peer's that is mapped here.

Our segment's descriptor goes with the first message that names a block of it, once.  Until the peer has mapped it (it
says so in the segment itself), a transfer by reference is kept as it is, for the peer may still decline; from then on a
transfer is over when its descriptor has gone, and the block waits for its slot by itself.  So the user's array is free
as soon as its snapshot is taken, and nothing waits for what the peer's user keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from streamrt.device import Block, Device
from transport.channels import worth_sharing
from transport.channels.exports import DESCRIPTOR, Exports
from transport.channels.imports import Imports
from transport.events import Key

FIRST_LOOK_SECONDS = 0.001
LONGEST_LOOK_SECONDS = 0.1  # between two looks at whether a peer has mapped our segment, which it does once
_Named = tuple[int, int]  # of a block: its memory's number, and its slot's generation


class Sharing:
    """The exports, the imports, and the transfers that wait until the peer has mapped our segment.

    Used under the connection's lock, but for `allocate`.
    """

    def __init__(self) -> None:
        self.exports = Exports()
        self.imports = Imports()
        self._unannounced: list[object] = []
        self._unmapped: dict[Key, dict[int, _Named]] = {}  # by slot: what the peer had not mapped when it was named
        self.waiting: dict[Key, None] = {}
        """All of these transfers has gone, and may yet be declined."""
        self._pause = FIRST_LOOK_SECONDS
        self._next_look = 0.0

    def allocate(self, device: Device, nbytes: int) -> Block | None:
        """Memory for a snapshot that the peer can open; None: anywhere.  Thread-safe.  Does not touch the device."""
        return self.exports.allocate(nbytes, device) if worth_sharing(device, nbytes) else None

    # out

    def given(self, key: Key, descriptor: memoryview | bytes) -> None:
        """A block's descriptor is about to go.  Does not touch the device."""
        if not self.exports.announced:
            self._unannounced.append(descriptor)
        number, slot, generation, _, _ = DESCRIPTOR.unpack_from(descriptor)
        if not self.exports.mapped(number):
            self._unmapped.setdefault(key, {})[slot] = (number, generation)

    def descriptors(self, frames: Sequence[object]) -> tuple[int, ...]:
        """What has to go with a message: our segment, with the first that names a block of it."""
        if not self._unannounced or not any(frames[-1] is one for one in self._unannounced):
            return ()
        self._unannounced.clear()
        self.exports.announced = True
        return (self.exports.fd,)

    def went(self, key: Key, now: float) -> bool:
        """All of a transfer has gone: whether it is over now.  Else `over` names it later.  Does not block the host."""
        if self._settled(key):
            return True
        if not self.waiting:
            self._pause, self._next_look = FIRST_LOOK_SECONDS, now + FIRST_LOOK_SECONDS
        self.waiting[key] = None
        return False

    def over(self, now: float) -> list[Key]:
        """The transfers that are over since the peer has mapped our segment.  Does not touch the device."""
        if not self.waiting:
            return []
        keys = list(filter(self._settled, self.waiting))
        for key in keys:
            del self.waiting[key]
        if not keys and now >= self._next_look:
            self._pause = min(2 * self._pause, LONGEST_LOOK_SECONDS)
            self._next_look = now + self._pause
        return keys

    def forget(self, key: Key) -> None:
        """Nobody asks for a transfer any more.  Does not touch the device."""
        self.waiting.pop(key, None)
        self._unmapped.pop(key, None)

    def next_look(self) -> float | None:
        """When to ask `over` again, None if nothing waits.  Does not touch the device."""
        return self._next_look if self.waiting else None

    def declined(self, key: Key, slot: int, device: Device) -> bool:
        """The peer cannot open a block of a device: gives none of it any more, or none at all if it has mapped nothing.

        The block goes again, by another channel.  Whether the refusal is new.  Does not touch the device.
        """
        self._unmapped.get(key, {}).pop(slot, None)
        return self.exports.refuse(device if self.exports.mapped() else None)

    def _settled(self, key: Key) -> bool:
        """Whether no decline can come for what a transfer has named: it is mapped there, or was given back unused."""
        return all(
            self.exports.mapped(number) or self.exports.released(slot, generation)
            for slot, (number, generation) in self._unmapped.get(key, {}).items()
        )

    # in, and the end

    def arrived(self, fds: Sequence[int]) -> None:
        """Takes over the descriptors that came with a message.  Does not block the host."""
        for fd in fds[1:]:
            os.close(fd)
        self.imports.attach(fds[0])

    def close(self, gone: Callable[[], bool]) -> None:
        """The connection has ended; `gone` says whether the peer's process has.  Idempotent.  Does not block."""
        self.exports.close(gone)
        self.imports.close()
        self.waiting.clear()
