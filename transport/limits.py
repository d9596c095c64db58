"""What a connection may be told, and what it tells of itself.

Standard library only.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from transport.errors import LocalProtocolError

STAGING = "staging"
"""The one channel whose bytes travel in the messages; it serves every device and is the last of every order."""

VERSIONS = (1, 1)
"""The lowest and highest version of the protocol that this package speaks."""

NO_DEADLINE = ", or None for no deadline"
"""What `check_seconds` adds where a timeout may be left out."""

FOREVER = " (math.inf switches it off)"
"""What it adds for what always has a limit."""


def check_seconds(name: str, value: object, remedy: str) -> None:
    """Raises `LocalProtocolError` unless the value is a number of seconds above 0.  Does not touch the device."""
    try:
        wrong = not (isinstance(value, numbers.Real) and float(value) > 0)
    except OverflowError:  # an integer beyond all floats
        wrong = True
    if wrong:
        raise LocalProtocolError(f"{name}={value!r}; give a number of seconds above 0{remedy}")


def check_flag(name: str, value: object, remedy: str) -> None:
    """Raises `LocalProtocolError` unless the value is True or False: a word that says "no" would be taken for yes.

    Does not touch the device.
    """
    if value is not True and value is not False:
        raise LocalProtocolError(f"{name}={value!r} is neither True nor False: {remedy}")


def check_count(name: str, value: object) -> None:
    """Raises `LocalProtocolError` unless the value is a whole number above 0.  Does not touch the device."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LocalProtocolError(f"{name}={value!r}: give a whole number, 1 at least")


@dataclass(frozen=True, slots=True)
class Limits:
    """The tunables of one connection; each side has its own, the window is told to the peer.

    `window`: bytes of requests and replies that we are ready to hold before they are launched or pulled (256 MiB: four
    of the 64 MiB messages of the benchmarks).  `heartbeat`: seconds of our own silence after which we send a ping.
    `peer_timeout`: seconds after which a silent peer (of another host) or a stopped one (of this host) is lost; long
    enough for a kernel's first compilation under the GIL.  `handshake_timeout`: seconds to the peer's first message.
    `max_transfer`: bytes of one message's buffers, since memory for them is taken on the word of a header; an agent
    lowers it to the memory of the host.  `same_host`: silence alone is no proof of loss, the agent watches
    the process instead.  `channels`: the order in which channels are tried after a decline.
    """

    window: int = 256 * 1024 * 1024
    heartbeat: float = 2.0
    peer_timeout: float = 30.0
    handshake_timeout: float = 10.0
    max_transfer: int = 1 << 40
    same_host: bool = False
    channels: tuple[str, ...] = ("same_process", "shared_memory", "ucx", STAGING)
    versions: tuple[int, int] = VERSIONS

    def __post_init__(self) -> None:
        if not 1 <= self.window < 1 << 62:
            raise LocalProtocolError(f"a window of {self.window} bytes; give 1 to 2^62")
        for name in ("heartbeat", "peer_timeout", "handshake_timeout"):
            check_seconds(name, getattr(self, name), FOREVER)
        if not self.channels or self.channels[-1] != STAGING:
            raise LocalProtocolError(
                f"channels={self.channels}; the last one must be {STAGING!r}, which never declines"
            )
        if not 1 <= self.versions[0] <= self.versions[1]:
            raise LocalProtocolError(f"versions={self.versions}; give (lowest, highest)")


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """A snapshot of a connection.  At quiescence `calls`, `serving`, `waiting`, `sending` and `held` are 0.

    `calls`: our calls that have not ended; `serving`: the peer's; `waiting`: messages without credit; `sending`:
    transfers whose bytes are not all gone.  `outstanding`: bytes that the peer still counts against us; `available`:
    what is left of its window; `held` and `owed`: the peer's bytes that we hold, and those freed but not yet told.
    """

    state: str
    version: int
    calls: int
    serving: int
    waiting: int
    sending: int
    outstanding: int
    available: int
    held: int
    owed: int
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    duplicates: int
    late_replies: int
    declines: int
