"""When a peer is lost by silence, and when we break ours.

[Note: silence]  A peer on another host is lost after `peer_timeout` without a message.  On the same host silence proves
nothing (a GIL held, a compiler running): there the agent knows the process's state, and its word (`Frozen`) starts the
same time.  Whatever the peer says ends both.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from transport.deadlines import earlier
from transport.limits import Limits

WATCHED_FACTOR = 5


class Liveness:
    """The clockwork of one connection; `opened`: the handshake is done."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._begun = now
        self._heard = now
        self._frozen: float | None = None
        self._watched = False
        self._interval = limits.heartbeat
        self.opened = False

    def heard(self, now: float) -> None:
        """A message has come.  Does not touch the device."""
        self._heard = now
        self._frozen = None

    def watch(self) -> None:
        """The peer's process is watched by other means than its messages.  Does not touch the device.

        So it is of this host and most likely watches us too: pings are for the rare one that cannot, and many idle
        connections shall cost nothing.
        """
        self._watched = True
        slow = min(WATCHED_FACTOR * self._limits.heartbeat, self._limits.peer_timeout / 3)
        self._interval = max(self._limits.heartbeat, slow)

    def freeze(self, now: float) -> None:
        """The peer's process is stopped; saying so again changes nothing.  Does not touch the device."""
        if self._frozen is None:
            self._frozen = now

    def lost_at(self) -> float | None:
        """When the peer is lost if nothing comes, or None.  Does not touch the device."""
        silent: float | None = None
        if not self.opened:
            silent = self._begun + self._limits.handshake_timeout
        elif not (self._watched or self._limits.same_host):
            silent = self._heard + self._limits.peer_timeout
        if self._frozen is None:
            return silent
        return earlier(silent, self._frozen + self._limits.peer_timeout)

    def ping_at(self, last_sent: float) -> float | None:
        """When our own silence is to be broken.  Does not touch the device."""
        return last_sent + self._interval if self.opened else None

    def due(self, last_sent: float) -> float | None:
        """The earlier of `lost_at` and `ping_at`.  Does not touch the device."""
        if self._watched and self.opened and self._frozen is None:
            return last_sent + self._interval
        return earlier(self.lost_at(), self.ping_at(last_sent))

    def loss(self) -> str:
        """Why the peer is lost, in words.  Does not touch the device."""
        if not self.opened:
            return f"no handshake within {self._limits.handshake_timeout:g} s"
        what = "was silent" if self._frozen is None else "was stopped"
        return f"the peer {what} for {self._limits.peer_timeout:g} s"
