"""Links: one control path to one peer, as a non-blocking message pipe.

A link moves whole messages (a few frames each), in order, or breaks.  It never blocks, never interprets a frame, and is
driven by an agent: the agent polls `fileno()`, calls `receive` when it is readable, and `flush` when `wants_write`.
All methods of one link are called under the connection's lock, from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Frame = memoryview | bytes
MAX_FRAMES = 64


class LinkBroken(Exception):
    """The link is gone (end of file, reset, unreachable); internal to transport, an agent turns it into a fact."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who the operating system says is at the other end: AF_UNIX only, None elsewhere."""

    pid: int
    uid: int
    gid: int


class Link(Protocol):
    """One control path.  `same_host`: both ends share a kernel, so silence alone proves nothing.

    `inherited`: an AF_UNIX socketpair to our own child or parent, over which functions and pickled values may go.
    """

    same_host: bool
    inherited: bool

    def fileno(self) -> int:
        """The descriptor to poll for reading (a ZeroMQ link's is edge-triggered).  Does not touch the device."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues one message and writes as much as goes without blocking; frames are kept until they are written.

        Raises `LinkBroken`.  Does not block the host.
        """

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        """Returns the messages that are there, at most `limit`; an empty list when there are none.

        Raises `LinkBroken` at the end of file, after all that came before it was returned.  Does not block the host.
        """

    @property
    def readable(self) -> bool:
        """Whether `receive` would return something without new bytes from outside (edge-triggered links)."""

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has something to write."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that `send` accepted and the operating system has not."""

    def flush(self) -> None:
        """Writes what can be written without blocking.  Raises `LinkBroken`."""

    def credentials(self) -> PeerCredentials | None:
        """The peer's credentials where the operating system gives them."""

    def close(self, linger: float = 0.0) -> None:
        """Ends the link; waits at most `linger` seconds for queued bytes.  Idempotent."""


class Listener(Protocol):
    """Accepts links.  `address` is the bound one (a port of 0 resolved)."""

    address: str

    def fileno(self) -> int:
        """The descriptor to poll for reading."""

    def accept(self) -> list[Link]:
        """The links that are new since the last call.  Does not block the host."""

    def pump(self) -> None:
        """Moves what arrived on a shared socket into its links (ZeroMQ's ROUTER); a no-op elsewhere."""

    def close(self) -> None:
        """Stops listening; links live on.  Idempotent."""
