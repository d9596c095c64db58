"""The messages of one connection that wait for the bytes of small arrays, which go in their bodies.

A look must cost little however many wait, and none may wait for another's stream: each look asks the oldest few, since
those of one stream come in order, and of the others a few in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from streamrt.errors import CaptureError, DeviceError
from transport.events import Key
from transport.inlined import Late

MAX_HELD = 256
"""How many messages of a connection wait; further ones send such arrays as buffers."""
OLDEST = 4
"""How many of the oldest are asked in one look."""
IN_TURN = 2
"""How many of those behind them."""


class HeldMessage(NamedTuple):
    """A message that waits for its bytes, and what sends it then: under the lock, given its body and the time."""

    late: Late
    send: Callable[[bytes, float], None]


class Found(NamedTuple):
    """A message that waits no longer: its bytes are there, or never will be, for the device has failed, or a
    graph has taken them."""

    key: Key
    message: HeldMessage
    error: DeviceError | CaptureError | None


class Held:
    """The messages that wait, oldest first.  Changed under the driver's lock."""

    def __init__(self) -> None:
        self.messages: dict[Key, HeldMessage] = {}
        """By key; whoever asks often whether there are any looks here."""
        self._turn = OLDEST

    def add(self, key: Key, late: Late, send: Callable[[bytes, float], None]) -> None:
        """One more, the newest.  Does not touch the device."""
        self.messages[key] = HeldMessage(late, send)

    def drop(self, key: Key) -> bool:
        """Forgets a message; whether it was there.  Does not touch the device."""
        return self.messages.pop(key, None) is not None

    def clear(self) -> None:
        """Forgets all.  Does not touch the device."""
        self.messages.clear()

    def take(self) -> Found | None:
        """One that waits no longer, taken out; None if a look finds none.  Does not block the host."""
        found = self.find()
        if found is not None:
            del self.messages[found.key]
        return found

    def find(self) -> Found | None:
        """One that waits no longer, as far as one look sees.  Needs no lock; does not block the host.

        Raises `RuntimeError` where another thread changes the table meanwhile.
        """
        count = len(self.messages)
        for key, message in itertools.islice(self.messages.items(), OLDEST):
            if (found := _ask(key, message)) is not None:
                return found
        if count <= OLDEST:
            return None
        turn = self._turn if OLDEST <= self._turn < count else OLDEST
        for key, message in itertools.islice(self.messages.items(), turn, turn + IN_TURN):
            if (found := _ask(key, message)) is not None:
                return found  # with the turn as it is: who comes to take it finds it
        self._turn = turn + IN_TURN
        return None


def _ask(key: Key, message: HeldMessage) -> Found | None:
    try:
        return Found(key, message, None) if message.late.there else None
    except (DeviceError, CaptureError) as error:  # the second: its record became part of a graph, and tells nothing
        return Found(key, message, error.with_traceback(None))  # which has this message, and so its pinned memory
