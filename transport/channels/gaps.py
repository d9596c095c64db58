"""Which parts of a range are free: first fit, low addresses first, for those are the ones that were touched already."""

from __future__ import annotations

import bisect


class Gaps:
    """The free parts of [start, end), as (offset, bytes) in order, never touching each other."""

    __slots__ = ("_free",)

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end - start)] if end > start else []

    @property
    def nbytes(self) -> int:
        """How many bytes are free.  Does not touch the device."""
        return sum(nbytes for _, nbytes in self._free)

    def find(self, nbytes: int) -> int | None:
        """Where `take` would take them, None where no gap is large enough.  Does not touch the device."""
        return next((offset for offset, room in self._free if room >= nbytes), None)

    def take(self, nbytes: int) -> int | None:
        """Takes `nbytes` and returns their offset, None where no gap is large enough.  Does not touch the device."""
        for at, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[at : at + 1] = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Gives back what `take` took.  Does not touch the device."""
        free = self._free
        at = bisect.bisect(free, (offset, 0))
        if at < len(free) and free[at][0] == offset + nbytes:
            nbytes += free.pop(at)[1]
        if at and sum(free[at - 1]) == offset:
            at -= 1
            before = free.pop(at)
            offset, nbytes = before[0], before[1] + nbytes
        free.insert(at, (offset, nbytes))
