"""What both halves of stream order know of a connection's words: how many, how a descriptor names one, how they go.

A segment of words is pinned for each device whose streams use it, and the driver unpins it only while no stream of the
process has work to do, holding up other calls meanwhile.  So it is given back on a thread that may block, not while one
waits for a peer, as far as is known, and for a minute at most not while one of the runtime's does anything (what
libraries have on streams of their own is not asked).
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from streamrt import forks
from streamrt.device import backend_of
from streamrt.errors import DeviceError
from streamrt.segment import STRIDE, Segment
from streamrt.timeline import Point
from transport.channels import retired

WORDS = 512
SEGMENT_BYTES = WORDS * STRIDE
SIGNAL = struct.Struct("<IIQ")
"""What a descriptor says of its signal: the word's index, its bits (and `DERIVED`), the value."""
IDLE_SECONDS = 60.0
"""For which a segment that could go waits for a moment in which nothing runs; then it goes all the same."""
DERIVED = 1 << 8
"""Set beside the bits where the sender's own streams wait for a third process's: it may be lost with that."""


class Waiting(Protocol):
    """The waits for one connection's peer (`waits.Waits`)."""

    def collect(self) -> bool:
        """Whether a stream still waits.  Does not block the host."""

    def unreached(self) -> list[tuple[Point, bool]]:
        """What is waited for and not there, or lost, and whether it is derived.  Does not block the host."""


class Deriving(Protocol):
    """The signals for one connection's peer (`signals.Signals`), some of them behind points of others."""

    def spoil(self) -> None:
        """Marks those lost that are behind a lost point."""


waiting: dict[Waiting, None] = {}
"""Those whose streams wait for a peer, as far as was looked."""
deriving: dict[Deriving, None] = {}
"""Those of whose signals some are behind points of others, and have not run as far as was looked."""
forks.renew(sys.modules[__name__], waiting=dict, deriving=dict)


def note(table: Segment, point: Point) -> None:
    """Writes a point's value beside its word's number, for whoever maps the table.  Does not touch the device."""
    entry = point.word.index * STRIDE // 8
    table.words[entry] = point.value
    table.words[entry + 1] = point.word.bits  # last: until then nobody looks at the value


def retire(segment: Segment, kinds: Iterable[str], over: Callable[[], bool]) -> None:
    """Takes a segment away from the devices of these kinds once `over()`.  Does not block the host.

    Whoever still has a word of it keeps its memory.
    """
    kinds = tuple(kinds)
    pinned = "cuda" in kinds
    looks = iter([False] if pinned else [])  # the first look is the caller's own, whom nothing may hold up
    late: list[float] = []

    def free() -> bool:
        if not next(looks, True) or not over():
            return False
        if not pinned:
            return True
        if any(one.collect() for one in tuple(waiting)):
            return False
        if not late:
            late.append(time.monotonic() + IDLE_SECONDS)
        return time.monotonic() >= late[0] or not busy()

    def busy() -> bool:
        """The driver unpins when all streams have come to their ends, and holds up everybody else's calls till then."""
        with contextlib.suppress(DeviceError):  # a failed device has let go of everything
            return not all(backend_of(kind).idle() for kind in kinds)
        return False

    retired.keep(segment, free, functools.partial(_unmap, segment, kinds))


def _unmap(segment: Segment, kinds: Iterable[str]) -> None:
    for kind in kinds:
        with contextlib.suppress(DeviceError):  # a failed device has let go of everything
            backend_of(kind).unmap_segment(segment)
