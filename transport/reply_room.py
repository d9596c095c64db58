"""Room for the replies of one connection.

A peer that does not read must not fill this process with results for it, nor hold up anybody else's calls.  So replies
are counted for each connection: past `limit` a function's thread waits with its result (its turn goes to others while
it does), and no further call of that peer is begun.  One reply of any size passes when there is no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamrt.callbacks import blocking

DEFAULT_LIMIT = 1 << 30
LOOK_SECONDS = 0.1  # how often a waiting thread asks whether its caller has given up


class ReplyRoom:
    """Bytes of replies that a connection holds.  Thread-safe."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self._held = 0
        self._waiting = 0
        self._condition = threading.Condition(threading.Lock())

    @property
    def short(self) -> bool:
        """Whether a result waits for room.  Does not block the host."""
        return self._waiting > 0

    def share(self, given_up: Callable[[], bool]) -> Share:
        """One reply's part, empty yet; `given_up` tells that nobody wants it any more.  Does not block the host."""
        return Share(self, given_up)

    def _fits(self, nbytes: int) -> bool:
        return not self._held or self._held + nbytes <= self.limit

    def _take(self, nbytes: int, given_up: Callable[[], bool]) -> None:
        with self._condition:
            if self._fits(nbytes):
                self._held += nbytes
                return
            self._waiting += 1
        try:
            with blocking(lambda: self._fits(nbytes) or given_up()), self._condition:
                while not self._fits(nbytes) and not given_up():
                    self._condition.wait(LOOK_SECONDS)
                self._held += nbytes
        finally:
            with self._condition:
                self._waiting -= 1

    def _give_back(self, nbytes: int) -> None:
        with self._condition:
            self._held -= nbytes
            self._condition.notify_all()


class Share:
    """The room of one reply."""

    __slots__ = ("_given_up", "_room", "nbytes")

    def __init__(self, room: ReplyRoom, given_up: Callable[[], bool]) -> None:
        self.nbytes = 0
        self._room = room
        self._given_up = given_up

    def take(self, nbytes: int) -> None:
        """Takes room, also when the caller has given up meanwhile.  Blocks the host until there is some."""
        self._room._take(nbytes, self._given_up)
        self.nbytes = nbytes

    def give_back(self) -> None:
        """The reply is out, or was dropped.  Idempotent.  Does not block the host."""
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes:
            self._room._give_back(nbytes)
