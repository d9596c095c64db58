"""How long who waits for a message looks again and again before it sleeps.

A core that sleeps wakes up late (50 to 200 us on a virtual machine), and waking it is dear for the sender too.  So it
pays to look on for what comes soon: a caller does for `LONG_SECONDS`.  Who has served a call does too, for the next
one, but where cores are few each look may take from the caller what it needs to make that.  So once it was in vain it
looks for `BRIEF_SECONDS` alone, until it is not.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import os

CORES = len(os.sched_getaffinity(0))
LONG_SECONDS = 1e-3 if CORES > 2 else 300e-6 if CORES > 1 else 0.0
BRIEF_SECONDS = LONG_SECONDS if CORES > 2 else min(LONG_SECONDS, 100e-6)


class Patience:
    """Of one who serves.  By one thread at a time."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = LONG_SECONDS
        """How long to look now."""

    def note(self, answered: bool) -> None:
        """Whether something came while it looked.  Does not touch the device."""
        self.seconds = LONG_SECONDS if answered else BRIEF_SECONDS
