"""How long who waits for a message looks again and again before it sleeps.

A core that sleeps wakes up late (50 to 200 us on a virtual machine), and waking it is dear for the sender too.  So it
pays to look on for what comes soon: a caller does for `LONG_SECONDS`.  Who has served a call does too, for the next
one; where that has come a little later, as it does when a caller has several workers in turn, for `LONGEST_SECONDS`
from then on.  But where cores are few each look may take from the caller what it needs to make that call.  So there,
once it was in vain, it looks for `BRIEF_SECONDS` alone, until it is not.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import os

CORES = len(os.sched_getaffinity(0))
MANY_CORES = CORES > 2
LONG_SECONDS = 1e-3 if MANY_CORES else 300e-6 if CORES > 1 else 0.0
LONGEST_SECONDS = 4e-3 if MANY_CORES else LONG_SECONDS
BRIEF_SECONDS = LONG_SECONDS if MANY_CORES else min(LONG_SECONDS, 100e-6)


class Patience:
    """Of one who serves.  By one thread at a time."""

    __slots__ = ("_brief", "_long", "_longest", "seconds")

    def __init__(
        self, long: float = LONG_SECONDS, longest: float = LONGEST_SECONDS, brief: float = BRIEF_SECONDS
    ) -> None:
        self._long, self._longest, self._brief = long, longest, brief
        self.seconds = long
        """How long to look now."""

    def note(self, waited: float) -> None:
        """After how many seconds something has come, for which it has looked at first.  Does not touch the device."""
        if waited <= min(self.seconds, self._long):
            self.seconds = self._long
        elif self._long < self._longest and waited <= self._longest:
            self.seconds = self._longest
        else:
            self.seconds = self._brief
