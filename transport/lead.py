"""Who polls: one thread of an agent leads, another stands by (Schmidt et al., "Leader/Followers", PLoP 2000).

The thread that reads a call can run its function itself, with no hop to another.  Reading must go on meanwhile, so:

- before a function that is known to take long, the leader leaves the lead, and the thread that stands by takes it;
- a function that was quick the last time is run while leading.  Should it take longer than `TAKE_OVER_SECONDS` after
  all, the thread that stands by takes the lead away; should it wait for something of the runtime, it gives the lead
  away first.  So a quick call wakes no thread, and a slow one holds nothing up for longer than that.

While quick functions come, the thread that stands by looks every `WATCH_SECONDS`; when none has come for
`QUIET_WATCHES` of these, it sleeps until one does.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import threading
import time

TAKE_OVER_SECONDS = 0.002
WATCH_SECONDS = 0.002
QUIET_WATCHES = 100


class Lead:
    """The role.  Threads are known by their ids; 0 is nobody."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._leader = 0
        self._standing_by: set[int] = set()
        self._busy_since = 0.0
        self._watching = False
        self._ended = False

    @property
    def mine(self) -> bool:
        """Whether the calling thread leads."""
        return self._leader == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether the leader runs something that should be quick."""
        return self._busy_since > 0.0

    @property
    def relieved(self) -> bool:
        """Whether somebody stands by."""
        return bool(self._standing_by)

    def stand_by(self) -> bool:
        """Blocks the host until the lead is the calling thread's (True), or `end` (False)."""
        watches, own = 0, threading.get_ident()
        with self._condition:
            self._standing_by.add(own)
            try:
                while not self._ended:
                    busy = self._busy_since
                    if not self._leader or (busy and time.monotonic() - busy > TAKE_OVER_SECONDS):
                        self._leader, self._busy_since = own, 0.0
                        return True
                    watches = 0 if busy else watches + 1
                    if watches > QUIET_WATCHES:
                        self._watching = False
                    self._condition.wait(WATCH_SECONDS if self._watching else None)
                return False
            finally:
                self._standing_by.discard(own)

    def leave(self) -> None:
        """Gives the lead to whoever stands by; nothing if it is not the calling thread's."""
        with self._condition:
            if self.mine:
                self._leader, self._busy_since = 0, 0.0
                self._condition.notify()

    def begin_task(self) -> None:
        """The leader runs something that should be quick."""
        self._busy_since = time.monotonic()
        if not self._watching:
            with self._condition:
                self._watching = True
                self._condition.notify()

    def end_task(self) -> bool:
        """It is done: whether the calling thread still leads."""
        with self._condition:
            if not self.mine:
                return False
            self._busy_since = 0.0
            return True

    def end(self) -> frozenset[int]:
        """Nobody leads any more.  The threads that led or stood by, and have nothing left to do: others may run
        something yet."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()
            return frozenset({self._leader, *self._standing_by})
