"""The messages of the protocol, as values.  How they become frames, and what they are held to, is `wire`'s.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.events import BufferHeader, Side

Frame = memoryview | bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """The initiator's first message.  An empty `nonce` means that its later fields were of no shape we know."""

    minimum: int
    maximum: int
    nonce: bytes
    window: int
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's first message: the version of both, its nonce, and the bytes that it is ready to hold."""

    version: int
    nonce: bytes
    window: int
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refuse:
    """We end the connection and say why; `code` is one of `version`, `protocol`, `abort`."""

    code: str
    reason: str
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Call:
    """A request.  `remaining` is the time to its deadline in seconds when it was sent; clocks are never compared."""

    call: int
    function: str
    body: bytes
    buffers: tuple[BufferHeader, ...]
    remaining: float | None
    notify: bool


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a buffer of the sender's transfer (call, side), or, by another channel than staging, a descriptor."""

    call: int
    side: Side
    buffer: int
    offset: int
    channel: str
    payload: Frame


@dataclass(frozen=True, slots=True)
class Reply:
    """The value of a call."""

    call: int
    body: bytes
    buffers: tuple[BufferHeader, ...]


@dataclass(frozen=True, slots=True)
class Error:
    """The callee's error, in words."""

    call: int
    type_name: str
    message: str
    traceback_text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer wants the call."""

    call: int


@dataclass(frozen=True, slots=True)
class Credit:
    """`nbytes` of the receiver's window are free again."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Decline:
    """The receiver of a transfer cannot open one of its buffers; the next channel is wanted."""

    call: int
    side: Side
    buffer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """An exported allocation is going; importers close their handles."""

    buffer_id: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Where the sender's end of a channel is, so that the peer can send to it; empty: it has none that works."""

    channel: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """Sent after a time of silence; answered by `Pong`."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(frozen=True, slots=True)
class Bye:
    """We start no more calls and all of ours have ended."""


@dataclass(frozen=True, slots=True)
class ByeAck:
    """We heard `Bye`, and every call of yours has ended here with its reply sent."""


Message = (
    Hello
    | Welcome
    | Refuse
    | Call
    | Data
    | Reply
    | Error
    | Cancel
    | Credit
    | Decline
    | Retire
    | Announce
    | Ping
    | Pong
    | Bye
    | ByeAck
)
