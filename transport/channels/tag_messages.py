"""One connection's transfers by UCX's tag messages: both ends' addresses, the tags, and the two halves of a transfer.

The end that receives draws a secret and tells it over the link, together with the address of its UCX worker
(`Announce`).  The tag of a transfer is a keyed hash of what the transfer is, under the receiver's secret: both ends
know it, nobody else can guess it, and no two transfers have the same.

The sender gives the message to UCX when the bytes are ready, and then says so over the link by a descriptor; that is
when the receiver begins to expect it.  When it has come, the receiver sends back a receipt, an empty message under a
tag of the sender's secret.  Until then the sender keeps the bytes: that UCX is done with them is no proof that they
have come, and a transfer that fails on the way is declined and goes again by another channel.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from streamrt import hooks, memory
from streamrt.buffer import Buffer
from streamrt.device import Device
from streamrt.event import Event, event_pool
from streamrt.stream import Stream
from transport.channels import Chunk, OpenError, Source
from transport.channels.ucx import MAX_ADDRESS_BYTES
from transport.channels.ucx_messages import End, Message
from transport.channels.ucx_worker import process_worker
from transport.events import Key
from transport.lend import Lent

SECRET_BYTES = 16
START_SECONDS = 30.0  # for the peer to import ucxx, which it does at the first transfer, and to say where it is
SENT = b"S"
"""The descriptor of a buffer that UCX has; any other says why it could not be sent."""
MAX_REASON_BYTES = 512
SEND_EDGE = "ucx.send"
RECEIVE_EDGE = "ucx.receive"


class TagPath:
    """What one connection knows of UCX.  Used under the connection's lock."""

    def __init__(self, moved: Callable[[], None], gone: Callable[[], bool], *, near: bool = True) -> None:
        """`moved` is called by UCX's thread when something here has to be looked at, `gone` says whether the peer's
        process has ended, if it is `near`: on this host.  Does not touch the device, and imports nothing yet."""
        self.broken = ""
        """Why it cannot be used, if so."""
        self.deadline: float | None = None
        """Until when the peer has to say where it is."""
        self._moved = moved
        self._gone = gone if near else _far
        self._near = near
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._their_secret = b""
        self._end: End | None = None
        self._worker = process_worker()
        self._started = False
        self._announced = False
        self._told = False

    # both ends' addresses

    def start(self, device: Device, now: float) -> None:
        """It is to be used: starts UCX here, which takes a moment, on a device that a buffer comes from or goes to.

        Does not block the host.
        """
        if self._started:
            return
        self._started = True
        self.deadline = None if self._end is not None else now + START_SECONDS
        self._worker.start(device, self._moved)

    def announcement(self) -> bytes | None:
        """What to tell the peer now, once: the secret and the address; empty where there is no UCX here.

        Does not touch the device.
        """
        if self._announced or not self._started:
            return None
        if self._worker.failure:
            self.broken = self.broken or self._worker.failure
            self._announced = True
            return b""
        if not self._worker.address:
            return None
        self._announced = True
        return self._secret + self._worker.address

    def heard(self, payload: bytes) -> None:
        """What the peer tells of itself.  What it has told before stays.  Does not touch the device."""
        self.deadline = None
        if self._end is not None:
            return
        if not SECRET_BYTES < len(payload) <= SECRET_BYTES + MAX_ADDRESS_BYTES:
            self.broken = self.broken or "the peer has no UCX that works"
            return
        self._their_secret = payload[:SECRET_BYTES]
        self._end = self._worker.connect(payload[SECRET_BYTES:])

    def check(self, now: float) -> None:
        """Gives up a peer that does not say where it is.  Does not touch the device."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self.broken = self.broken or f"the peer has not told where its UCX is within {START_SECONDS:g} s"

    def complain(self) -> str:
        """Why it is not used any more, once; empty before and after.  Does not touch the device."""
        if not self.broken or self._told:
            return ""
        self._told = True
        return self.broken

    # transfers

    def message(
        self,
        key: Key,
        buffer: int,
        *,
        sending: bool,
        address: int,
        nbytes: int,
        device: Device,
        held: object,
        ready: Callable[[], bool],
    ) -> Message | None:
        """One buffer's message, None until both ends have said where they are.  Does not touch the device."""
        self.broken = self.broken or self._worker.failure
        if self.broken or self._end is None or not self._announced:
            return None
        theirs, ours = (self._their_secret, self._secret) if sending else (self._secret, self._their_secret)
        return Message(
            self._end,
            tag_of(theirs, key, buffer),
            tag_of(ours, key, buffer, receipt=True),
            address=address,
            nbytes=nbytes,
            device=device,
            memory=held,
            ready=ready,
            changed=self._moved,
            gone=self._gone,
        )

    def send(self, message: Message) -> None:
        """Does not block the host."""
        self._worker.send(message)

    def receive(self, message: Message) -> None:
        """Does not block the host."""
        self._worker.receive(message)

    def abandon(self, message: Message) -> None:
        """Nobody waits for it any more.  Does not block the host."""
        self._worker.abandon(message)

    def refuse(self, key: Key, buffer: int) -> None:
        """Nobody will ask for a buffer that the peer has sent.  Does not block the host."""
        if self._end is not None:
            self._worker.refuse(self._end, tag_of(self._secret, key, buffer))

    def close(self, *, graceful: bool) -> None:
        """The connection has ended.  Does not block the host."""
        self.broken = self.broken or "the connection has ended"
        self._told = True
        self.deadline = None
        end, self._end = self._end, None
        if end is not None:
            self._worker.leave(end, died=self._near and not graceful and self._gone())


def _far() -> bool:
    """A process of another host maps none of our memory, and its network card none that UCX has let go."""
    return True


def tag_of(secret: bytes, key: Key, buffer: int, *, receipt: bool = False) -> int:
    """The tag of a buffer's message, or of its receipt, under the secret of the end that gets it.

    Requests that an end gets are numbered by its peer, replies by itself, so call and side name one.
    """
    what = b"%d %d %d %d" % (key.call, key.side, buffer, receipt)
    return int.from_bytes(hashlib.blake2b(what, digest_size=8, key=secret).digest(), "little")


class Sending:
    """The sending half: the snapshot's bytes are UCX's once its event has been seen as done."""

    def __init__(self, path: TagPath | None, key: Key, buffer: int, source: Source) -> None:
        """`path` is None where the peer turned out not to have UCX.  Does not touch the device."""
        self._path = path
        self._key = key
        self._buffer = buffer
        self._source: Source | None = source
        self._message: Message | None = None
        self._over = False
        self.finished = False

    def advance(self) -> Chunk | None:
        """The descriptor, when UCX has the message, or cannot have it.  Does not block the host."""
        if self.finished or (path := self._path) is None:
            return None if self.finished else self._say(b"there is no UCX between these two")
        if self._message is None and not path.broken:
            self._begin(path)
        message = self._message
        if message is not None and message.error:
            path.broken = path.broken or message.error
        if message is not None and message.posted:
            return self._say(SENT)
        if path.broken:
            return self._say(path.broken.encode()[:MAX_REASON_BYTES])
        return None

    def _say(self, descriptor: bytes) -> Chunk:
        self.finished = True
        return 0, descriptor

    def _begin(self, path: TagPath) -> None:
        source = self._source
        assert source is not None
        info, event = source.info, source.event
        self._message = path.message(
            self._key,
            self._buffer,
            sending=True,
            address=info.address,
            nbytes=info.nbytes,
            device=info.device,
            held=(source, source.reader() if isinstance(source, Lent) else None),
            ready=lambda: has_run(event, SEND_EDGE),
        )
        if self._message is not None:
            self._source = None
            path.send(self._message)

    @property
    def underway(self) -> bool:
        """Whether the receiver may still want the bytes, by another channel too.  Does not touch the device."""
        return not self._over and (self._message is None or not self._message.done)

    def abandon(self) -> None:
        """Nobody asks for it any more: what UCX reads is held until it has.  Does not block the host."""
        self._over = True
        message, self._message, self._source = self._message, None, None
        if message is not None and self._path is not None:
            self._path.abandon(message)


class Receiving:
    """The receiving half, and the memory that UCX writes to."""

    def __init__(
        self, path: TagPath | None, key: Key, buffer: int, device: Device, nbytes: int, stream: Stream | None
    ) -> None:
        """Takes memory of the device.  Enqueues a record on the leased stream; does not block the host.

        Raises `ExhaustedError`, `MemoryError`.
        """
        self.memory: Buffer = memory.allocate(device, nbytes, stream)
        busy = stream is not None and not stream.query()  # else whatever used the memory before is over
        self._free: Event | None = stream.record(event_pool(device).lease()) if stream is not None and busy else None
        self._path = path
        self._key = key
        self._buffer = buffer
        self._nbytes = nbytes
        self._message: Message | None = None
        self._pulled = False

    def reserve(self, offset: int, nbytes: int) -> memoryview | None:
        """None: what comes is a descriptor.  Does not touch the device."""
        return None

    def pull(self, offset: int, payload: memoryview | bytes) -> None:
        """Begins to expect the message, which `arrived` tells of.  Does not block the host.  Raises `OpenError`."""
        path = self._path
        self._pulled = True
        if path is None or path.broken:
            raise OpenError(path.broken if path is not None else "there is no UCX between these two")
        if bytes(payload) != SENT:
            reason = bytes(payload[:MAX_REASON_BYTES]).decode(errors="replace")
            path.broken = f"the peer cannot send by it: {reason}"
            raise OpenError(path.broken)
        free = self._free
        self._message = path.message(
            self._key,
            self._buffer,
            sending=False,
            address=self.memory.address,
            nbytes=self._nbytes,
            device=self.memory.device,
            held=self.memory,
            ready=lambda: has_run(free, RECEIVE_EDGE),
        )
        if self._message is None:
            raise OpenError(self._path_fault())
        path.receive(self._message)

    def _path_fault(self) -> str:
        broken = "" if self._path is None else self._path.broken
        return broken or "the peer has sent by UCX and has not said where its own is"

    @property
    def begun(self) -> bool:
        """Whether the message was ever expected.  Does not touch the device."""
        return self._message is not None

    @property
    def arrived(self) -> bool | str:
        """Whether the bytes are there, or why they are not to come.  Does not touch the device."""
        message = self._message
        if message is None:
            return "it was given up"
        return message.done or message.error

    @property
    def drained(self) -> bool:
        """Nothing is enqueued.  Does not touch the device."""
        return True

    def abandon(self) -> None:
        """Nobody asks for it any more: UCX's thread holds the memory while it is written to.  Does not block."""
        message, self._message = self._message, None
        if self._path is None:
            return
        if message is not None and not message.done:
            self._path.abandon(message)
        elif not self._pulled:  # UCX may have the message already, and the peer not be able to say so any more
            self._path.refuse(self._key, self._buffer)


def has_run(event: Event | None, edge: str) -> bool:
    """Whether UCX may touch the bytes.  Raises `DeviceError`.  Does not block the host."""
    return event is None or edge in hooks.dropped or event.query()
