"""Deadlines of calls: a heap that forgets lazily.

Most calls end long before their deadline, so ending one only drops it from a dict; the heap's stale entries are passed
over, and swept when they are the greater part.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import heapq

SWEEP_FLOOR = 64
"""Below this many entries a sweep costs more than it saves."""


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times, where None is never.  Does not touch the device."""
    if one is None:
        return other
    return one if other is None else min(one, other)


class Deadlines:
    """The deadlines of calls by id, in absolute seconds of the connection's clock; those that are `known`."""

    __slots__ = ("_heap", "known")

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def add(self, call: int, when: float) -> None:
        """Notes that `call` ends at `when`.  Does not touch the device."""
        self.known[call] = when
        heapq.heappush(self._heap, (when, call))

    def discard(self, call: int) -> None:
        """Forgets `call`, if it is known.  Does not touch the device."""
        if (
            self.known
            and self.known.pop(call, None) is not None
            and len(self._heap) > max(SWEEP_FLOOR, 2 * len(self.known))
        ):
            self._heap = [(when, one) for one, when in self.known.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, or None.  Does not touch the device."""
        while self._heap and self.known.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[int]:
        """The calls whose deadline has come, earliest first; they are forgotten.  Does not touch the device."""
        calls = []
        while (when := self.next()) is not None and when <= now:
            call = heapq.heappop(self._heap)[1]
            del self.known[call]
            calls.append(call)
        return calls
