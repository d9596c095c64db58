"""The messages of the protocol, as values that nobody changes (not frozen: see `transport.events`).

How they become frames, and what they are held to, is `wire`'s.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.events import BufferHeader, Side

Frame = memoryview | bytes


@dataclass(slots=True)
class Hello:
    """The initiator's first message.  An empty `nonce` means that its later fields were of no shape we know."""

    minimum: int
    maximum: int
    nonce: bytes
    window: int
    info: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Welcome:
    """The acceptor's first message: the version of both, its nonce, and the bytes that it is ready to hold."""

    version: int
    nonce: bytes
    window: int
    info: dict[str, object] = field(default_factory=dict)


NOT_YET = "not_yet"
"""The code of a `Refuse` of who will soon be ready."""


@dataclass(slots=True)
class Refuse:
    """We end the connection and say why; `code` is one of `version`, `protocol`, `abort` and `NOT_YET`."""

    code: str
    reason: str
    minimum: int
    maximum: int


@dataclass(slots=True)
class Call:
    """A request.  `remaining` is the time to its deadline in seconds when it was sent; clocks are never compared."""

    call: int
    function: str
    body: bytes
    buffers: tuple[BufferHeader, ...]
    remaining: float | None
    notify: bool


@dataclass(slots=True)
class Data:
    """Bytes of a buffer of the sender's transfer (call, side), or, by another channel than staging, a descriptor."""

    call: int
    side: Side
    buffer: int
    offset: int
    channel: str
    payload: Frame


@dataclass(slots=True)
class Reply:
    """The value of a call."""

    call: int
    body: bytes
    buffers: tuple[BufferHeader, ...]


@dataclass(slots=True)
class Error:
    """The callee's error, in words."""

    call: int
    type_name: str
    message: str
    traceback_text: str


@dataclass(slots=True)
class Cancel:
    """The caller no longer wants the call."""

    call: int


@dataclass(slots=True)
class Credit:
    """`nbytes` of the receiver's window are free again."""

    nbytes: int


@dataclass(slots=True)
class Decline:
    """The receiver of a transfer cannot open one of its buffers; the next channel is wanted."""

    call: int
    side: Side
    buffer: int
    reason: str


@dataclass(slots=True)
class Retire:
    """An exported allocation is going; importers close their handles."""

    buffer_id: int


@dataclass(slots=True)
class Announce:
    """Where the sender's end of a channel is, so that the peer can send to it; empty: it has none that works."""

    channel: str
    payload: bytes


@dataclass(slots=True)
class Ping:
    """Sent after a time of silence; answered by `Pong`."""


@dataclass(slots=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(slots=True)
class Bye:
    """We start no more calls and all of ours have ended."""


@dataclass(slots=True)
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
