"""Links inside one process, for simulation: deterministic, with faults, in a time that is the caller's.

No threads, no descriptors.  A message is copied when it is sent, as if the operating system had taken it, and can be
received once its time has come.  Order is kept: a delayed message delays those behind it.  `Faults` draws from one
seed, so the same seed and the same calls give the same run.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transport.links import Frame, LinkBroken, PeerCredentials, check_frames


@dataclass
class Faults:
    """What goes wrong on a pair of links: probabilities a message, and seconds.  Fields may be changed while it runs.

    `drop`: it never arrives.  `repeat`: it arrives twice.  `delay`: (least, most) seconds until it arrives.
    `kill_after`: the end that sends the message of this number (from 1, both ends counted together) dies right after.
    """

    seed: int = 0
    drop: float = 0.0
    repeat: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    kill_after: int | None = None
    dropped: int = field(default=0, init=False)
    repeated: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._sent = 0

    def copies(self) -> int:
        """How often the next message arrives: 0, 1 or 2.  Does not touch the device."""
        self._sent += 1
        draw_drop, draw_repeat = self._random.random(), self._random.random()  # both, whatever the first one says
        if draw_drop < self.drop:
            self.dropped += 1
            return 0
        if draw_repeat < self.repeat:
            self.repeated += 1
            return 2
        return 1

    def latency(self) -> float:
        """Seconds until the next message arrives.  Does not touch the device."""
        return self._random.uniform(*self.delay)

    @property
    def kills(self) -> bool:
        """Whether the end that sent the last message dies now.  Does not touch the device."""
        return self.kill_after is not None and self._sent == self.kill_after


class MemoryLink:
    """One end of a pair.  `kill()` ends it as if its process had died."""

    same_host = True
    level_triggered = False
    inherited = False

    def __init__(self, name: str, faults: Faults, clock: Callable[[], float]) -> None:
        self.name = name
        self.faults = faults
        self._clock = clock
        self._peer: MemoryLink = self
        self._arriving: collections.deque[tuple[float, list[Frame]]] = collections.deque()
        self._latest = float("-inf")
        self._gone: str | None = None
        self._peer_gone: str | None = None

    def __repr__(self) -> str:
        return f"<MemoryLink {self.name} {self._gone or 'open'}>"

    @property
    def connected(self) -> bool:
        """Whether both ends live.  Does not touch the device."""
        return self._gone is None and self._peer_gone is None

    def fileno(self) -> int:
        """-1: there is nothing to poll.  Does not touch the device."""
        return -1

    def send(self, frames: Sequence[Frame]) -> None:
        """Copies one message to the other end.  Raises `LinkBroken`.  Does not block the host."""
        self._check()
        check_frames(frames)
        if self._peer_gone is not None:
            raise LinkBroken(self._peer_gone)
        message: list[Frame] = [bytes(frame) for frame in frames]
        for _ in range(self.faults.copies()):
            self._peer._latest = max(self._peer._latest, self._clock() + self.faults.latency())
            self._peer._arriving.append((self._peer._latest, list(message)))
        if self.faults.kills:
            self.kill()

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """The messages whose time has come, at most `limit`.  Raises `LinkBroken` after the last one of a lost peer.

        Does not block the host.
        """
        self._check()
        now = self._clock()
        messages: list[list[Frame]] = []
        while len(messages) < limit and self._arriving and self._arriving[0][0] <= now:
            messages.append(self._arriving.popleft()[1])
        if not messages and not self._arriving and self._peer_gone is not None:
            raise LinkBroken(self._peer_gone)
        return messages

    @property
    def readable(self) -> bool:
        """Whether `receive` would return something now, or raise.  Does not touch the device."""
        if self._gone is not None:
            return False
        if self._arriving:
            return self._arriving[0][0] <= self._clock()
        return self._peer_gone is not None

    @property
    def next_arrival(self) -> float | None:
        """The time at which the next message can be received, None when there is none.  Does not touch the device."""
        return self._arriving[0][0] if self._arriving else None

    @property
    def wants_write(self) -> bool:
        """Never: a message is taken as a whole.  Does not touch the device."""
        return False

    @property
    def queued_bytes(self) -> int:
        """Always 0.  Does not touch the device."""
        return 0

    def flush(self) -> None:
        """Nothing to write.  Raises `LinkBroken` when this end is closed.  Does not block the host."""
        self._check()

    def credentials(self) -> PeerCredentials | None:
        """None.  Does not touch the device."""
        return None

    def close(self, linger: float = 0.0) -> None:
        """Ends the link; what was sent still arrives.  Idempotent.  Does not block the host."""
        self._end("this end is closed", "the peer closed the connection")

    def kill(self) -> None:
        """Ends this end as if its process had died: what was sent still arrives.  Does not block the host."""
        self._end("this end was killed", "the peer died")

    def _end(self, here: str, there: str) -> None:
        if self._gone is None:
            self._gone = here
            self._arriving.clear()
            self._peer._peer_gone = there

    def _check(self) -> None:
        if self._gone is not None:
            raise LinkBroken(self._gone)


def pair(
    faults: Faults | None = None, clock: Callable[[], float] = lambda: 0.0, *, names: tuple[str, str] = ("a", "b")
) -> tuple[MemoryLink, MemoryLink]:
    """Two connected ends in one process.  `clock` gives the caller's time in seconds.  Does not block the host."""
    faults = faults if faults is not None else Faults()
    first, second = (MemoryLink(name, faults, clock) for name in names)
    first._peer, second._peer = second, first
    return first, second
