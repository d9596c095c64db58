"""What goes into the sans-io connection and what comes out of it.

The protocol sees ids and byte counts, never words, handles or streams.  A `Key` names one transfer: the call's id and
its direction.  Commands come from the application, facts from the driver, effects go to the driver, in order.

Nobody changes one once it is made.  They are not frozen all the same: that would make each six times as dear to make,
and a call takes a dozen.

Standard library only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Side(enum.IntEnum):
    """Which of a call's two messages a transfer belongs to."""

    REQUEST = 0
    REPLY = 1


class Key(NamedTuple):
    """One transfer of one connection.  `call` is unique per connection and caller; `outgoing`: we made the call."""

    call: int
    outgoing: bool
    side: Side


@dataclass(slots=True)
class BufferHeader:
    """One buffer as it stands in a message's header.

    `device` is the device *at the receiver* (already mapped by the sender), `channel` the data path,
    `source` the device at the sender (by which a reply of the receiver is ordered and named in errors).  `descriptor`
    is *enclosed* where the bytes are there already and the receiver can surely open it: then nothing follows, and
    nothing is declined.
    """

    nbytes: int
    device: str
    channel: str
    source: str
    descriptor: bytes = b""


class Outcome(enum.Enum):
    """How a call that we made has ended."""

    VALUE = "value"
    REMOTE_ERROR = "remote error"
    DEADLINE = "deadline"
    PEER_LOST = "peer lost"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"


# Commands -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StartCall:
    """Begin a call.  `body` is the encoded skeleton, `deadline` an absolute time of the `now` clock or None.

    `held` names the `HoldCall` that this is the rest of, 0 none.
    """

    call: int
    function: str
    body: bytes
    buffers: tuple[BufferHeader, ...] = ()
    deadline: float | None = None
    notify: bool = False
    held: int = 0


@dataclass(slots=True)
class HoldCall:
    """Begin a call whose body is not there yet: its time runs and it may be cancelled, but nothing goes to the peer.

    `call` is an id for this side alone: they begin at -1 and fall strictly.  A `StartCall` that names it gives the call
    one of the wire's.
    """

    call: int
    function: str
    deadline: float | None = None


@dataclass(slots=True)
class CancelCall:
    """The caller gives up; the callee is told."""

    call: int


@dataclass(slots=True)
class FinishCall:
    """Our function returned: send the reply of an incoming call."""

    call: int
    body: bytes
    buffers: tuple[BufferHeader, ...] = ()


@dataclass(slots=True)
class FailCall:
    """Our function raised, or could not be run: send an error as the reply of an incoming call.

    Also after `FinishCall`, while the reply's bytes are on their way: the error takes their place.
    """

    call: int
    type_name: str
    message: str
    traceback_text: str = ""


@dataclass(slots=True)
class Goodbye:
    """Begin a graceful end: no new calls; `Closed` follows when both sides have nothing open."""


@dataclass(slots=True)
class Abort:
    """End at once: open calls end with PEER_LOST and `reason`.  `not_yet`: the peer may soon connect again."""

    reason: str
    not_yet: bool = False


@dataclass(slots=True)
class Retire:
    """An allocation that we exported is going: tell the peer, who closes its handles (`Retired` there)."""

    buffer_id: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the peer where our end of a channel is (`Announced` there)."""

    channel: str
    payload: bytes


Command = StartCall | HoldCall | CancelCall | FinishCall | FailCall | Goodbye | Abort | Retire | Announce

# Facts ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DataReady:
    """Bytes [offset, offset + len(payload)) of an outgoing buffer can be sent; `payload` is bytes-like, not copied.

    By another channel than staging: `offset` is 0 and `payload` the descriptor of the whole buffer.  Bytes for a
    channel that the buffer no longer goes by (it was declined meanwhile) are dropped.
    """

    key: Key
    buffer: int
    offset: int
    payload: memoryview | bytes
    channel: str = "staging"


@dataclass(slots=True)
class Released:
    """The last use of a transfer's memory is over.

    Outgoing, by another channel than staging: the slots are released, `FreeBuffers` may follow.  Incoming: its credit
    goes back to the peer, if it has not already.
    """

    key: Key


@dataclass(slots=True)
class Pulled:
    """An incoming buffer that came as a descriptor (not by staging) is opened and its pull is enqueued."""

    key: Key
    buffer: int


@dataclass(slots=True)
class OpenFailed:
    """A channel could not open a buffer that came by `Pull`; the sender is asked to resend it by the next channel.

    Its slot is not written: the decline tells the sender that it is free.  One that was enclosed in its header cannot
    be declined: the call ends with an error, and `ReleaseSlot` says what to write.
    """

    key: Key
    buffer: int
    reason: str


@dataclass(slots=True)
class NoMemory:
    """There is no room, device or stream for an incoming transfer; the call ends with an error of the class named."""

    key: Key
    reason: str
    type_name: str = "ExhaustedError"


@dataclass(slots=True)
class StreamsGranted:
    """Streams and destination memory of an incoming transfer are there: data may be pulled.

    `opened`: so many of the buffers with an enclosed descriptor, in their order, are opened, their pulls enqueued.  For
    the others `Pull` follows.
    """

    key: Key
    opened: int = 0


@dataclass(slots=True)
class PeerSuspected:
    """An end of file or a broken link; without a certain fact the connection ends and outcomes are unknown.

    `not_yet`: nobody was there, so that somebody may be soon.
    """

    reason: str
    not_yet: bool = False


@dataclass(slots=True)
class PeerGone:
    """The peer's process is certainly gone (its pidfd fired)."""

    reason: str


@dataclass(slots=True)
class Watched:
    """The agent watches the peer's process by its pidfd: from now on silence alone proves nothing."""


@dataclass(slots=True)
class Frozen:
    """The peer's process is stopped; it is lost at `peer_timeout` or at a call's deadline, not before."""


Fact = (
    DataReady | Released | Pulled | OpenFailed | NoMemory | StreamsGranted | PeerSuspected | PeerGone | Frozen | Watched
)

# Effects --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Send:
    """Write one message, frames in order, to the link."""

    frames: tuple[memoryview | bytes, ...]


@dataclass(slots=True)
class LeaseStreams:
    """An incoming transfer begins: lease a stream per device, take memory for the buffers; of a request: what for.

    Not given for a message without buffers.  Answer `StreamsGranted` or `NoMemory`; a late answer holds the peer back,
    for its credit is used until the launch.
    """

    key: Key
    buffers: tuple[BufferHeader, ...]
    function: str = ""


@dataclass(slots=True)
class Pull:
    """Bytes of an incoming buffer arrived: enqueue their copy to the destination on the leased stream.

    By another channel than staging `payload` is the descriptor; answer `Pulled` or `OpenFailed`.
    """

    key: Key
    buffer: int
    offset: int
    payload: memoryview | bytes
    channel: str = "staging"


@dataclass(slots=True)
class Launch:
    """All transfers of an incoming call are enqueued: run the function."""

    call: int
    function: str
    body: bytes
    deadline: float | None
    notify: bool


@dataclass(slots=True)
class Watch:
    """An outgoing transfer has its credit: watch its points and report `DataReady` chunk by chunk.

    `declined` is the index of the one buffer that goes again, by the channel now in its header; None: all of them.
    Not given for a transfer without bytes, whose `FreeBuffers` follows at once.
    """

    key: Key
    buffers: tuple[BufferHeader, ...]
    declined: int | None = None


@dataclass(slots=True)
class FreeBuffers:
    """The transfer needs its memory no longer: all of it is sent, or the transfer was given up (`sent` says which).

    Exactly once for each `StartCall` and `FinishCall` that was accepted, also without buffers.  "Sent" means handed to
    the link by the `Send` effects before this one: the link may still hold the frames.  What went by another channel
    than staging is free only when its slot is released too.
    """

    key: Key
    sent: bool


@dataclass(slots=True)
class StopCall:
    """The caller cancelled, or is lost: an incoming call's function should stop; its reply will be dropped.

    After `Launch`: `FinishCall` or `FailCall` is still awaited.  Before it (also when the deadline passed): the
    transfer is dropped, its leases and memory go back, and nothing is awaited.
    """

    call: int
    reason: str


@dataclass(slots=True)
class ReleaseSlot:
    """Whoever ends the use of a leased slot writes its generation (channels with words; staging has none).

    Given when nothing was enqueued (cancelled, expired, refused): `descriptor` is what the sender gave.  For an
    outgoing transfer: the peer declined the buffer, so the slot that we gave for it is free and nobody will write its
    word.
    """

    key: Key
    buffer: int
    descriptor: memoryview | bytes = b""


@dataclass(slots=True)
class Retired:
    """The peer's exported allocation is going: close its handles."""

    buffer_id: int


@dataclass(slots=True)
class Announced:
    """The peer says where its end of a channel is."""

    channel: str
    payload: bytes


@dataclass(slots=True)
class MarkLost:
    """Mark all points that depend on the peer as lost, before any word is released.

    `certain`: its process has ended, or it was given up after its time.  Else it may live, and what it has enqueued may
    still come.
    """

    reason: str
    certain: bool = False


@dataclass(slots=True)
class ReleaseWords:
    """Only after `MarkLost` (and after the peers that were told have acknowledged): write the words."""


@dataclass(slots=True)
class EndFuture:
    """A call of ours has ended; exactly once a call.  On VALUE the transfer (call, True, REPLY) holds the data."""

    call: int
    outcome: Outcome
    body: bytes = b""
    message: str = ""
    type_name: str = ""
    traceback_text: str = ""


@dataclass(slots=True)
class Ready:
    """The handshake is complete; `info` is what the peer said of itself in its hello."""

    info: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Closed:
    """The connection has ended: gracefully, or with a reason (and `version_mismatch` where that was it).

    `not_yet`: nobody was there, or the peer was not ready, so that another connection may soon be answered.
    """

    graceful: bool
    reason: str = ""
    version_mismatch: bool = False
    not_yet: bool = False


Effect = (
    Send
    | LeaseStreams
    | Pull
    | Launch
    | Watch
    | FreeBuffers
    | StopCall
    | ReleaseSlot
    | Retired
    | Announced
    | MarkLost
    | ReleaseWords
    | EndFuture
    | Ready
    | Closed
)

Frames = Sequence[memoryview | bytes]
