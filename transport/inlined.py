"""Small arrays of devices that travel inside a message's body, as those of ordinary memory do.

A buffer of its own costs a second message, a slot and a transfer, which for a few bytes is several times the work of
the call itself.  So their bytes are fetched to pinned memory on the stream that the array is on (a copy that is the
snapshot), and go into the body if they are there soon: who calls waits for the reply anyway, and a function that has
returned has most often launched little.  What is not there soon *holds* its message, which then goes by itself when
the bytes are there (`Late`); nobody waits.  Where a message may not be held (its stream may go ahead of its bytes, too
many are held already, other arrays go apart) such arrays go as buffers, as if they had never been fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamrt import buffers, memory
from streamrt.libraries import ArrayInfo
from streamrt.stream import Stream
from transport.pinned import pinned_pool

MOST = 64
"""How many arrays of one message are fetched: each takes a chunk of pinned memory."""
MOST_LATE = 8
"""How many of one message may be late and hold it: past that one buffer for all costs less than a copy of each."""
HOLD_LOOKS = 4
"""At their bytes before a message is held, which costs more: on an idle stream they are there by then."""


class Fetched:
    """One array on its way to the host.  Dropped early, it leaves what the copy needs until that has run."""

    __slots__ = ("_chunk", "_copy", "_event")

    def __init__(self, array: Any, info: ArrayInfo) -> None:
        """Enqueues the copy on the array's current stream.  Does not block the host, but for the first pinned memory.

        Raises `CaptureError`.
        """
        self._copy: memory.Fetch | None = None
        self._chunk = pinned_pool(info.device.backend).take(info.nbytes)
        self._copy = memory.fetch(array, info, self._chunk.address)
        self._event = self._copy.event

    @property
    def there(self) -> bool:
        """Whether the bytes are.  Does not block the host."""
        return self._event.query()

    def take(self) -> bytes:
        """The bytes, which are `there`; lets go of the array.  Does not touch the device."""
        self._copy = None
        return self.content()

    def leave(self) -> None:
        """Nobody looks at once, and perhaps nobody ever: what the copy needs is held for it.  Does not block the host.

        So the array, which is the user's, is not let go of by who looks later, with locks held perhaps.
        """
        copy, self._copy = self._copy, None
        if copy is not None:
            memory.hold_until([copy.source, self._chunk], copy.event, copy.stream)

    def content(self) -> bytes:
        """The bytes.  Does not touch the device: `there` has said so."""
        return bytes(self._chunk.view)

    def __del__(self, keep: Callable[[object, Stream], None] = buffers.leave) -> None:
        if self._copy is not None:  # something has gone wrong before anybody looked
            keep((self._copy.source, self._chunk), self._copy.stream)


def settle(fetched: Sequence[Fetched], looks: int) -> list[bytes | None]:
    """The bytes of each that is there after as many `looks` at all of them, None for the others.

    A look takes some microseconds of the host.  They are counted and not timed, so that a run can be replayed.
    """
    waiting = list(fetched)
    for _ in range(looks):
        waiting = [one for one in waiting if not one.there]
        if not waiting:
            break
    for one in waiting:
        one.leave()
    late = set(map(id, waiting))
    return [None if id(one) in late else one.take() for one in fetched]


class Late:
    """Arrays on their way to the host for the sake of one message's body, which they hold."""

    __slots__ = ("_body", "_fetched", "_waiting")

    def __init__(self, fetched: Sequence[Fetched], body: Callable[[list[bytes]], bytes]) -> None:
        """`body` makes the message's body of the bytes of each.  Does not touch the device."""
        self._fetched = tuple(fetched)
        self._waiting = tuple(fetched)  # never changed in place: two threads may look at once
        self._body = body

    @property
    def there(self) -> bool:
        """Whether all bytes are.  Needs no lock; does not block the host.  Raises `DeviceError`."""
        waiting = self._waiting
        while waiting and waiting[-1].there:
            waiting = waiting[:-1]
        self._waiting = waiting
        return not waiting

    def body(self) -> bytes:
        """The message's body.  Does not touch the device: `there` has said so."""
        return self._body([one.content() for one in self._fetched])
