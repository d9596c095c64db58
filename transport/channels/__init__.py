"""Channels: data paths for the buffers of messages, chosen per buffer by a pure function.

A channel has two halves.  The sender's yields chunks (bytes for `staging`, one descriptor for the others) as the data
becomes ready on the sender's leased stream; the receiver's enqueues the pull of each chunk on the receiver's.  A
channel that cannot serve a buffer declines, and the next one in the order is used; `staging` serves everything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from streamrt.device import Device
from streamrt.libraries import ArrayInfo
from streamrt.stream import Event, Stream
from transport.errors import LocalProtocolError, TransportError
from transport.limits import STAGING

SAME_PROCESS = "same_process"
SHARED_MEMORY = "shared_memory"
UCX = "ucx"
Chunk = tuple[int, memoryview | bytes]


class SourceMemory(Protocol):
    """The memory of a source."""

    def use(self, stream: Stream) -> None:
        """Says that `stream` reads it.  Does not touch the device."""


class Source(Protocol):
    """What is sent: a snapshot, or a lent array.  `info` describes it (C-contiguous), `event` is when it is ready."""

    @property
    def info(self) -> ArrayInfo:
        """What it is and where."""

    @property
    def event(self) -> Event | None:
        """After which it may be read; None: now."""

    @property
    def buffer(self) -> SourceMemory:
        """Its memory."""

    def host_view(self) -> memoryview:
        """Its bytes, where the host can read them."""


class SendHalf(Protocol):
    """One buffer on its way out.  All methods are called under the connection's lock and never block the host."""

    def advance(self) -> Chunk | None:
        """The next chunk that is ready, as (offset, payload); None when none is, or all are out."""

    @property
    def ready(self) -> bool:
        """Whether `advance` has something to give, or an error to raise.  Asked without the lock too."""

    @property
    def finished(self) -> bool:
        """Whether every chunk was returned by `advance`."""

    def abandon(self) -> None:
        """Nobody will ask for more: holds what enqueued copies still write to.  Does not block the host."""


class ReceiveHalf(Protocol):
    """One buffer on its way in."""

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """Memory into which a link may receive a chunk's payload, so that `pull` need not move it; None: anywhere."""

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        """Enqueues on the leased stream the pull of one chunk.  Does not block the host."""

    @property
    def drained(self) -> bool:
        """Whether every pull has run, so that what it reads from may be reused.  Does not block the host."""

    def abandon(self) -> None:
        """Nobody will ask again: holds what pulls that have not run still read from.  Does not block the host."""


class OpenError(TransportError):
    """A receiver cannot open what came by reference; the sender is asked to send it by the next channel."""


SERVED = (SHARED_MEMORY, UCX, STAGING)
"""The channels that there are between processes, in the order in which they are tried after a decline."""
CHANNELS_VARIABLE = "STREAMRT_CHANNELS"
"""Names those that this process uses, in its own order: ``STREAMRT_CHANNELS=ucx,staging``.  UCX is used only where an
end names it so."""
SHARED_BYTES = 64 * 1024
"""Up to here a buffer is copied through the socket in less time than its slot, its map and its release cost."""


def choose(source: Device, target: Device, nbytes: int, *, one_process: bool, shares: bool, tags: bool = False) -> str:
    """The channel for a buffer.  `one_process`: both ends are in this process; `shares` and `tags`: see `shares_first`
    and `can_tag`.  Does not touch the device.

    Two ends in one process hand the snapshot over (`same_process`), but for a device's array that becomes ordinary
    memory, where somebody has to wait for the copy.  Arrays of a GPU go to a GPU of another process of the host by
    `shared_memory`, and so do large ones in host memory; everything else goes by `ucx` where an end asks for that, else
    through pinned host memory.
    """
    if one_process:
        return STAGING if source.has_streams and not target.has_streams else SAME_PROCESS
    alike = (source.kind == "cuda") == (target.kind == "cuda")
    if shares and alike and worth_sharing(source, nbytes):
        return SHARED_MEMORY
    return UCX if tags and nbytes else STAGING


def worth_sharing(source: Device, nbytes: int) -> bool:
    """Whether memory that both processes map costs less than a copy over the link.  Does not touch the device."""
    return source.kind == "cuda" or nbytes > SHARED_BYTES


def asked() -> tuple[str, ...] | None:
    """The channels that `CHANNELS_VARIABLE` names, staging at the end; None where it names none.

    Does not touch the device.  Raises `LocalProtocolError` for a name that is none.
    """
    names = tuple(name.strip() for name in os.environ.get(CHANNELS_VARIABLE, "").split(",") if name.strip())
    if unknown := [name for name in names if name not in SERVED]:
        raise LocalProtocolError(f"{CHANNELS_VARIABLE} names {unknown[0]!r}; use some of {', '.join(SERVED)}")
    if not names:
        return None
    return (*dict.fromkeys(name for name in names if name != STAGING), STAGING)


def used(local: Mapping[str, object], remote: Mapping[str, object]) -> tuple[str, ...]:
    """The channels that two ends may use, in the order of the end that asks for one.  Does not touch the device."""
    lists = [_asked_by(info) for info in (local, remote)]
    order = next((names for names in lists if names is not None), list(SERVED))
    return tuple(name for name in order if all(names is None or name in names for names in lists))


def _asked_by(info: Mapping[str, object]) -> list[str] | None:
    names = info.get("channels")
    return [name for name in names if name in SERVED] if isinstance(names, list) else None


def can_share(local: Mapping[str, object], remote: Mapping[str, object]) -> bool:
    """Whether two ends are processes of one user on one host, with a link that carries descriptors.

    Does not touch the device.
    """
    if SHARED_MEMORY not in used(local, remote):
        return False
    same = all(local.get(name) == remote.get(name) for name in ("boot", "pid_namespace", "uid", "descriptors"))
    return same and local.get("descriptors") is True and local.get("process") != remote.get("process")


def can_tag(local: Mapping[str, object], remote: Mapping[str, object]) -> bool:
    """Whether two ends may send each other UCX's tag messages: both have it, an end asks for it, and neither is a
    stranger.

    UCX trusts what it is sent.  So the link has to have shown that its other end is of our user (AF_UNIX does), or both
    ends have to ask.  Does not touch the device.
    """
    both = local.get(UCX) is True and remote.get(UCX) is True and UCX in used(local, remote)
    asking = [_asked_by(info) is not None for info in (local, remote)]
    wanted = any(asking) if local.get("descriptors") is True else all(asking)
    return both and wanted and local.get("process") != remote.get("process")


def shares_first(local: Mapping[str, object], remote: Mapping[str, object]) -> bool:
    """Whether what can go by shared memory does; not where UCX was named in front of it.  Does not touch the device."""
    order = used(local, remote)
    if not can_share(local, remote):
        return False
    return not can_tag(local, remote) or order.index(SHARED_MEMORY) < order.index(UCX)
