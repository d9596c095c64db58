"""Credit and lease slots, by ids and counts only.

**Credit.**  Each side tells at the handshake how many bytes it is ready to hold: its window.  A request or reply costs
its buffers, its body and a fixed overhead (so that a flood of empty calls is bounded too).  The receiver gives the cost
back when a request is launched (never later: nested calls would wait for each other) and when a reply is all pulled.
It saves small amounts up, so that a small call costs no extra message; two rules keep that free of deadlock:

* the receiver tells as soon as it owes an eighth of the window, the `slack`;
* the sender may send when the message fits, or when at most `slack` is outstanding (so one of any size passes).

A blocked sender has more than `slack` outstanding; when the receiver holds none of that, it owes all of it and tells.

**Slots.**  One slot is one word and a generation, named by the exporter of a buffer in its descriptor.  Whoever ends
the use writes the generation into the word; the exporter reads the word and the slot is free again.  Generations count
up without end and are compared cyclically, since a word may have only 32 bits.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from transport.errors import LocalProtocolError, RemoteProtocolError

MESSAGE_COST = 256
"""Bytes that any request or reply costs besides its own: about what an open call takes in our tables."""


def slack_of(window: int) -> int:
    """Bytes of `window` that its owner may leave untold.  Does not touch the device."""
    return window // 8


class SendWindow:
    """What we may send: the peer's window less what it has not yet given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.outstanding = 0
        self._slack = slack_of(size)

    def admits(self, cost: int) -> bool:
        """Whether a message of `cost` bytes may go now.  Does not touch the device."""
        return self.outstanding + cost <= self.size or self.outstanding <= self._slack

    def take(self, cost: int) -> None:
        """Counts a message that goes.  Does not touch the device."""
        self.outstanding += cost

    def give_back(self, nbytes: int) -> None:
        """The peer's `Credit`.  Raises `RemoteProtocolError` when it is more than we used."""
        if nbytes > self.outstanding:
            raise RemoteProtocolError(f"the peer gave back {nbytes} bytes of credit where {self.outstanding} were used")
        self.outstanding -= nbytes


class ReceiveWindow:
    """What the peer may send us: `held` bytes are in use here, `owed` are free but the peer does not know it yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self.owed = 0
        self._slack = slack_of(size)

    def accept(self, cost: int) -> None:
        """Counts a message that came.  Raises `RemoteProtocolError` if the peer had no credit for it."""
        outstanding = self.held + self.owed
        if outstanding + cost > self.size and outstanding > self._slack:
            raise RemoteProtocolError(f"the peer sent {cost} bytes with {outstanding} of {self.size} outstanding")
        self.held += cost

    def release(self, cost: int) -> None:
        """A message's bytes are free.  Does not touch the device."""
        self.held -= cost
        self.owed += cost

    def due(self) -> int:
        """Bytes to tell the peer now, or 0; they count as told.  Does not touch the device."""
        if self.owed < max(1, self._slack):
            return 0
        told, self.owed = self.owed, 0
        return told


class LeaseSlot(NamedTuple):
    """One use of a word: the slot is free when the word at index `word` has reached `generation`."""

    word: int
    generation: int


class SlotTable:
    """Which of `capacity` words are leased, and under which generation.

    The slot that was freed longest ago is leased next.  `first` is the last generation already written (the value of
    the words at the start), `bits` the width of the words.
    """

    def __init__(self, capacity: int, *, bits: int = 64, first: int = 0) -> None:
        if capacity < 1 or bits not in (32, 64):
            raise LocalProtocolError(f"a slot table of {capacity} slots and {bits} bits; give at least 1, and 32 or 64")
        self._modulus = 1 << bits
        self._generations = [first % self._modulus] * capacity
        self._leased: set[int] = set()
        self._free = deque(range(capacity))

    def __len__(self) -> int:
        return len(self._leased)

    def lease(self) -> LeaseSlot | None:
        """A slot of a new generation, or None when all are leased.  Does not touch the device."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._generations[index] = (self._generations[index] + 1) % self._modulus
        self._leased.add(index)
        return LeaseSlot(index, self._generations[index])

    def leased(self) -> tuple[LeaseSlot, ...]:
        """The slots whose words are to be read.  Does not touch the device."""
        return tuple(LeaseSlot(index, self._generations[index]) for index in sorted(self._leased))

    def is_leased(self, index: int, generation: int) -> bool:
        """Whether a slot is leased under this generation.  Does not touch the device."""
        return index in self._leased and self._generations[index] == generation

    def observe(self, index: int, value: int) -> bool:
        """The word at `index` was read as `value`: frees the slot and says True if its generation is reached.

        A value of an older generation, or of a slot that is not leased, changes nothing.  Does not touch the device.
        """
        if index not in self._leased:
            return False
        ahead = (value - self._generations[index]) % self._modulus
        if ahead >= self._modulus // 2:
            return False
        if ahead:
            raise RemoteProtocolError(f"slot {index} was released for a generation that was never leased ({value})")
        self._leased.remove(index)
        self._free.append(index)
        return True

    def quarantine(self) -> int:
        """The peer is lost but may still run: leased slots are never used again.  Returns how many."""
        count = len(self._leased)
        self._leased.clear()
        return count
