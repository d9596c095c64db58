"""Links: one control path to one peer, as a non-blocking message pipe.

A link moves whole messages (a few frames each), in order, or breaks.  It never blocks, never interprets a frame, and is
driven by an agent: the agent polls `fileno()`, calls `receive` when it is readable, and `flush` when `wants_write`.
All methods of one link are called under the connection's lock, from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from transport.errors import LocalProtocolError

Frame = memoryview | bytes
MAX_FRAMES = 64
MAX_FRAME_BYTES = 64 << 20
"""A link's bound on one frame.  Bulk data travel in chunks of about a megabyte, so a longer frame is a broken peer."""


class LinkBroken(Exception):
    """The link is gone (end of file, reset, unreachable); internal to transport, an agent turns it into a fact."""


class Unreached(LinkBroken):
    """Nobody listens at the address, or not yet, or no more: who was there has ended before it said anything."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who the operating system says is at the other end: AF_UNIX only, None elsewhere."""

    pid: int
    uid: int
    gid: int


class Link(Protocol):
    """One control path.  `same_host`: both ends share a kernel, so silence alone proves nothing.

    `inherited`: an AF_UNIX socketpair to our own child or parent, over which functions and pickled values may go.
    `level_triggered`: a poll of `fileno()` by any thread tells that there is something to receive.
    """

    same_host: bool
    inherited: bool
    level_triggered: bool

    @property
    def connected(self) -> bool:
        """Whether the peer's end was reached and has not been lost since, as far as is known."""

    def fileno(self) -> int:
        """The descriptor to poll for reading; it stays readable until `receive` has taken what is there.

        -1 where there is none (memory links).  Never poll it for writing unless `wants_write` says so.
        """

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
        """Whether `receive` would return something, or raise, without new bytes from outside."""

    @property
    def wants_write(self) -> bool:
        """Whether `fileno` should be polled for writing, and `flush` called then.

        Always false for ZeroMQ links: what they could not pass on yet goes out by itself when they become readable.
        """

    @property
    def queued_bytes(self) -> int:
        """Bytes that `send` accepted and whose frames are still held; at 0 all memory that was given may be reused."""

    def flush(self) -> None:
        """Writes what can be written without blocking.  Raises `LinkBroken`."""

    def credentials(self) -> PeerCredentials | None:
        """The peer's credentials where the operating system gives them."""

    def close(self, linger: float = 0.0) -> None:
        """Ends the link; waits at most `linger` seconds for queued bytes.  Idempotent."""


@runtime_checkable
class SinkLink(Protocol):
    """A link that can receive a large second frame in place: `sink(header, nbytes)` says where, or None."""

    sink: Callable[[bytes, int], memoryview | None] | None


@runtime_checkable
class OwningLink(Protocol):
    """A link that can make what it has queued its own: who lent it memory may then write to that again."""

    def own_queued(self) -> None:
        """Copies what is queued.  Does not touch the device."""


GLANCES = 32
"""At a ring, by who looks there, between two polls, which let others have the interpreter: a microsecond or two."""
LOOK_AGAIN_SECONDS = 0.1
"""After which who sleeps looks into the ring once more: no bell that is missed costs more."""


@runtime_checkable
class RingLink(Protocol):
    """A link that small messages may pass through memory of both processes, to a reader that is awake.

    Who reads by polling `fileno` needs to know nothing of this.  Who says `rouse` looks there by itself, with `glance`,
    and says `doze` before it sleeps.
    """

    @property
    def takes_rings(self) -> bool:
        """Whether this machine can.  Does not touch the device."""

    def offer_rings(self) -> None:
        """Makes such memory, which the peer uses if it can.  One end offers, once.  Raises `LinkBroken`."""

    def glance(self, looks: int) -> bool:
        """Whether something lies there, at one of up to `looks` looks.  Keeps the interpreter, needs no lock."""

    def rouse(self) -> None:
        """Who reads looks by itself from now on.  Needs no lock.  Does not block the host."""

    def doze(self) -> bool:
        """Whether who reads may sleep on `fileno` now; else something is to be received.  Does not block the host."""


@runtime_checkable
class DescriptorLink(Protocol):
    """A link that carries open descriptors beside a message's frames."""

    def send(self, frames: Sequence[Frame], fds: Sequence[int] = ()) -> None:
        """As `Link.send`; `fds` are duplicated."""

    def taken_fds(self) -> list[int]:
        """Those that came with the last message that `receive` returned; the caller closes them."""


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


def check_frames(frames: Sequence[Frame]) -> int:
    """The message's size in bytes.  Does not block the host.

    Raises `LocalProtocolError` for what no link would carry: too many or too large frames, memory in pieces.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise LocalProtocolError(f"a message of {len(frames)} frames; a link carries 1 to {MAX_FRAMES}")
    total = 0
    for frame in frames:
        if isinstance(frame, memoryview):
            if not frame.c_contiguous:
                raise LocalProtocolError("a frame that is not contiguous; make a contiguous copy")
            nbytes = frame.nbytes
        else:
            nbytes = len(frame)
        if nbytes > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {nbytes} bytes; a link carries {MAX_FRAME_BYTES}: send it in chunks")
        total += nbytes
    return total
