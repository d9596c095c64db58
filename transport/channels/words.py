"""What both halves of stream order know of a connection's words: how many, how a descriptor names one, how they go.

A segment of words is pinned for each device whose streams use it, and the driver unpins it only while no stream of the
process waits for anything.  So it is given back on a thread that may block, once nothing of it is pending.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable

from streamrt.device import backend_of
from streamrt.segment import STRIDE, Segment
from transport.channels import retired

WORDS = 512
SEGMENT_BYTES = WORDS * STRIDE
SIGNAL = struct.Struct("<IIQ")
"""What a descriptor says of its signal: the word's index, its bits, the value."""


def retire(segment: Segment, kinds: Iterable[str], over: Callable[[], bool]) -> None:
    """Takes a segment away from the devices of these kinds once `over()`.  Does not block the host.

    Whoever still has a word of it keeps its memory.
    """
    kinds = tuple(kinds)
    looks = iter([False]) if "cuda" in kinds else iter([])  # the first look is the caller's, whom nothing may hold up
    retired.keep(segment, lambda: next(looks, True) and over(), functools.partial(_unmap, segment, kinds))


def _unmap(segment: Segment, kinds: Iterable[str]) -> None:
    for kind in kinds:
        backend_of(kind).unmap_segment(segment)
