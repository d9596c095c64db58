"""The memory and the streams of one message, on their way out and on their way in.

`Outgoing` holds a message's snapshots and the leased streams that wait for them; `Incoming` holds the destination
memory and the leased streams on which it is filled.  Both are driven by the connection's driver, under its lock.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrt import memory
from streamrt.buffer import Buffer
from streamrt.buffers import leave
from streamrt.device import CPU, Device, open_device, parse_device
from streamrt.errors import CaptureError, DeviceError, StreamrtError
from streamrt.event import Event
from streamrt.pool import Role, StreamLease, stream_pool
from streamrt.stream import Stream
from streamrt.timeline import Point
from transport.channels import SAME_PROCESS, SHARED_MEMORY, UCX, ReceiveHalf, SendHalf, Source
from transport.channels.exports import Export
from transport.channels.imports import Imports
from transport.channels.same_process import HandOver, Taker
from transport.channels.shared_memory import Opener, Sharer, export_of, has_run
from transport.channels.signals import Signal, Signals
from transport.channels.staging import DeviceReceiver, DeviceSender, HostReceiver, HostSender
from transport.channels.tag_messages import Receiving, Sending, TagPath
from transport.channels.waits import Waits
from transport.events import BufferHeader, Key
from transport.lend import Lent
from transport.limits import STAGING
from transport.payload import ArrayMeta, Prepared, read_body
from transport.pinned import MAX_CHUNK_BYTES, SLOT_BYTES, PinnedChunk, Slots, pinned_pool

HOST, STREAM, AUTO = "host", "stream", "auto"
"""The orders between processes: an agent looks before it sends, a stream of the receiver waits, or the second where the
first has to wait."""
ROLE_SEND: Role = "caller"
ROLE_SERVE: Role = "callee"
SEND_EDGE = "send.wait"
_BY_EVENT = (SHARED_MEMORY, UCX)
"""Channels whose sending half looks at the snapshot's event itself: no leased stream waits for it."""


class Outgoing:
    """One message's buffers on their way out.

    The leased streams of what is copied wait for the snapshots when the message is made, on the caller's thread (so
    that the order is that of the call); the transfer itself starts at `start`, when there is credit.
    """

    def __init__(
        self,
        prepared: Prepared,
        to: str = "",
        looks: int = 1,
        signals: Signals | None = None,
        order_of: Callable[[BufferHeader], str] | None = None,
        foreign: tuple[Point, ...] = (),
        own: tuple[Point, ...] = (),
    ) -> None:
        """`to` is the token of the other end of the connection, for what is handed over inside the process.

        `signals` are there where the peer's streams may wait for ours, `order_of` says for which buffers they do: a
        buffer in `AUTO` order if its bytes are not there within the `looks`.  `foreign` are points of others on which
        the bytes may depend, `own` those of the peer itself.

        Does not block the host, but for `looks` at snapshots that go by shared memory.
        """
        self.prepared = prepared
        self.headers = prepared.headers
        self.enclosed_bytes = 0
        """Of the arrays whose descriptors stand in `headers`: all of them, or none."""
        self.behind = foreign + own
        """The points on which the bytes may depend."""
        self._foreign, self._own = foreign, own
        self._to = to
        self._signals = signals
        self._signalled: dict[int, Signal] = {}  # by buffer
        self.done: Callable[[bool], None] | None = None
        self.wake: Callable[[], None] = _nobody
        self._leases: dict[Device, StreamLease] = {}
        self._halves: collections.deque[tuple[int, str, SendHalf]] = collections.deque()
        self._tagged: dict[int, Sending] = {}
        for header, snapshot in zip(prepared.headers, prepared.snapshots, strict=True):
            if snapshot.info.device.has_streams and header.channel not in _BY_EVENT:
                self._stream_behind(snapshot)
        staged = bool(self._leases)
        if signals is not None and order_of is not None:
            looks = self._order(signals, order_of, looks)
        if not staged:
            self._enclose(looks)

    def orders(self) -> list[str]:
        """The order of each buffer of a device that goes by shared memory.  Does not touch the device."""
        return [STREAM if number in self._signalled else HOST for number, _, _ in self._shared()]

    def _shared(self) -> list[tuple[int, BufferHeader, Source]]:
        """The buffers that lie in a device's exported memory."""
        return [
            (number, header, snapshot)
            for number, (header, snapshot) in enumerate(zip(self.headers, self.prepared.snapshots, strict=True))
            if header.channel == SHARED_MEMORY and header.nbytes and snapshot.info.device.has_streams
        ]

    def _order(self, signals: Signals, order_of: Callable[[BufferHeader], str], looks: int) -> int:
        """Has leased streams signal what is to go in stream order; how many looks are left.

        One signal a device, behind all its snapshots.  A leased stream that is busy is left alone: the peer would wait
        for that, too.
        """
        chosen: dict[Device, list[int]] = {}
        soon: dict[Device, list[Event | None]] = {}
        for number, header, snapshot in self._shared():
            device, order = snapshot.info.device, order_of(header)
            if order == HOST or snapshot.event is None or header.device == str(CPU) or export_of(snapshot) is None:
                continue
            chosen.setdefault(device, []).append(number)
            if order == AUTO:
                soon.setdefault(device, []).append(snapshot.event)
        for device, numbers in chosen.items():
            left = self._look(soon.get(device, ()), looks) if device in soon else 0
            if left:
                looks = left
            elif device not in self._leases and signals.takes(device):
                self._signal(signals, device, numbers)
        return looks

    def _signal(self, signals: Signals, device: Device, numbers: Sequence[int]) -> None:
        lease = stream_pool(device, ROLE_SEND).lease()
        try:
            busy = not lease.stream.query()
        except DeviceError:  # told where the transfer ends its call
            busy = True
        if busy:
            lease.release()
            return
        self._leases[device] = lease
        for number in numbers:
            self._stream_behind(self.prepared.snapshots[number])
        signal = signals.signal(lease.stream, self._foreign, self._own)
        if signal is not None:
            self._signalled.update(dict.fromkeys(numbers, signal))

    def _look(self, events: Iterable[Event | None], looks: int) -> int:
        """Looks at whether copies have run; how many looks are left, 0 if they have not within these."""
        try:
            for event in events:
                while not has_run(event):
                    looks -= 1
                    if looks <= 0:
                        return 0
        except DeviceError:  # told where the transfer ends its call
            return 0
        return max(looks, 1)

    def _enclose(self, looks: int) -> None:
        """Puts descriptors into the headers, if the peer can open all of them, and what is in host order has run within
        `looks`."""
        shared = []
        events = {}
        for number, (header, snapshot) in enumerate(zip(self.headers, self.prepared.snapshots, strict=True)):
            export = export_of(snapshot) if header.channel == SHARED_MEMORY and header.nbytes else None
            if export is None or not export.mapped:
                return
            signal = self._signalled.get(number)
            shared.append((header, export, b"" if signal is None else signal.packed))
            if signal is None:
                events[id(snapshot.event)] = snapshot.event
        if events and not self._look(events.values(), looks):
            return
        enclosed = []
        for header, export, packed in shared:
            nbytes, device, channel = header.nbytes, header.device, header.channel
            enclosed.append(BufferHeader(nbytes, device, channel, header.source, export.give(nbytes, packed)))
            self.enclosed_bytes += nbytes
        self.headers = tuple(enclosed)

    def _stream_behind(self, snapshot: Source) -> Stream:
        """The leased stream of a snapshot's device, which waits for the snapshot."""
        device = snapshot.info.device
        if device not in self._leases:
            self._leases[device] = stream_pool(device, ROLE_SEND).lease()
        stream = self._leases[device].stream
        if snapshot.event is not None:
            stream.wait(snapshot.event, edge=SEND_EDGE)
        return stream

    def start(
        self, key: Key, headers: Sequence[BufferHeader], declined: int | None = None, tags: TagPath | None = None
    ) -> None:
        """Begins to make chunks; with `declined`, of that buffer again, by the channel now in its header.

        `key` is the transfer's, and `tags` how UCX goes to its peer, for what goes so.  Enqueues on the leased streams;
        does not block the host.
        """
        for number, (header, snapshot) in enumerate(zip(headers, self.prepared.snapshots, strict=True)):
            if not header.nbytes or declined not in (None, number):
                continue
            if header.channel == UCX:
                self._tagged[number] = Sending(tags, key, number, snapshot)
            else:
                self._halves.append((number, header.channel, self._half(number, header, snapshot)))

    def _half(self, number: int, header: BufferHeader, snapshot: Source) -> SendHalf:
        if header.channel == SAME_PROCESS:
            return HandOver(snapshot, self._to)
        if header.channel == SHARED_MEMORY and (export := export_of(snapshot)) is not None:
            return Sharer(export, header.nbytes, snapshot.event, self._signalled.get(number))
        device = snapshot.info.device
        if not device.has_streams:
            return HostSender(snapshot.host_view(), snapshot)
        lease = self._leases.get(device)
        stream = self._stream_behind(snapshot) if lease is None else lease.stream  # none yet where it was declined
        return DeviceSender(snapshot.info.address, header.nbytes, stream, snapshot)

    def advance(self) -> tuple[int, str, int, memoryview | bytes] | None:
        """The next chunk that is ready, as (buffer, channel, offset, payload), buffers in turn; None if none is."""
        for _ in range(len(self._halves)):
            number, channel, half = self._halves[0]
            chunk = half.advance()
            if half.finished:
                self._halves.popleft()
            else:
                self._halves.rotate(-1)
            if chunk is not None:
                return number, channel, chunk[0], chunk[1]
        return None

    @property
    def ready(self) -> bool:
        """Whether `advance` has something to give, or an error to raise.  Needs no lock; does not block the host."""
        try:
            halves = [half for _, _, half in tuple(self._halves)]
            return not halves or any(half.ready for half in halves)
        except (DeviceError, RuntimeError):  # it is told under the lock; they change just now
            return True

    def declined(self, buffer: int) -> Export | None:
        """The receiver has not opened a buffer that was given to it, and never will: the block that is ours again.

        Does not touch the device.
        """
        if (sending := self._tagged.pop(buffer, None)) is not None:
            sending.abandon()
            return None
        export = export_of(self.prepared.snapshots[buffer])
        if export is not None:
            export.take_back()
        return export

    def by_tag(self, buffer: int) -> bool:
        """Whether a buffer goes by UCX.  Does not touch the device."""
        return buffer in self._tagged

    @property
    def underway(self) -> bool:
        """Whether UCX has yet to bring a buffer to the receiver.  Does not touch the device."""
        return any(sending.underway for sending in self._tagged.values())

    def tagged_chunks(self) -> list[tuple[int, str, int, memoryview | bytes]]:
        """As `advance`, what there is of the buffers that go by UCX, which says by itself when to look."""
        chunks = [(number, sending.advance()) for number, sending in self._tagged.items() if not sending.finished]
        return [(number, UCX, *chunk) for number, chunk in chunks if chunk is not None]

    def has_tagged_chunks(self) -> bool:
        """Whether `tagged_chunks` will have more.  Does not block the host."""
        return not all(sending.finished for sending in self._tagged.values())

    def has_chunks(self) -> bool:
        """Whether `advance` will have more.  Does not block the host."""
        return bool(self._halves)

    @property
    def by_reference(self) -> bool:
        """Whether a buffer goes as a descriptor: its memory is the receiver's business once that is out."""
        return any(header.channel != STAGING for header in self.prepared.headers)

    def close(self, sent: bool) -> None:
        """Gives the leases back and drops the sources, whose memory is safe until their streams are done with it.

        `done` hears of it when nobody reads lent memory any more: a link may hold the last frames a little longer.
        """
        for _, _, half in self._halves:
            half.abandon()
        self._halves.clear()
        for sending in self._tagged.values():
            sending.abandon()
        self._tagged.clear()
        if self.enclosed_bytes and not sent:
            for number in range(len(self.headers)):
                self.declined(number)
        sources = self.prepared.snapshots
        for lease in self._leases.values():
            for source in sources:
                if source.info.device == lease.stream.device:
                    source.buffer.use(lease.stream)
            lease.release()
        self._leases.clear()
        self.prepared = Prepared(b"", (), (), None)
        done, self.done = self.done, None
        if done is None:
            return
        lent = [source for source in sources if isinstance(source, Lent)]
        signalled = list(dict.fromkeys(self._signalled.values())) if sent else []
        if not lent and not signalled:
            done(sent)
            return
        free = _Countdown(len(lent) + len(signalled), lambda: done(sent))
        for source in lent:
            source.when_free(free, self.wake)
        for signal in signalled:  # in host order the snapshot's copy has run by now
            assert self._signals is not None
            self._signals.when_run(signal, free)


class _Countdown:
    """Calls back at the last of so many calls."""

    def __init__(self, left: int, callback: Callable[[], None]) -> None:
        self._left = left
        self._callback = callback
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._callback()


def _nobody() -> None:
    """Whom to wake where nobody waits for `done`."""


class GivenStream:
    """A stream of the user's in the place of a leased one (`reply_stream=`)."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def release(self) -> None:
        """Nothing: it is the user's.  Does not touch the device."""


def even(nbytes: int) -> int:
    """The next even number: what a copy engine takes, however few (`Backend.upload`)."""
    return nbytes + nbytes % 2


class _Filler:
    """Brings bytes that are in the host's hands to one device, through as few pieces of pinned memory as hold them:
    many small arrays share one.

    `coming`: how many bytes are still to come, an `even` number for each array.
    """

    __slots__ = ("_address", "_chunks", "_end", "_slots", "_stream", "coming")

    def __init__(self, stream: Stream) -> None:
        self.coming = 0
        self._stream = stream
        self._address = self._end = 0  # of the pinned memory that is left
        self._chunks: list[PinnedChunk] = []
        self._slots: Slots | None = None

    def fill(self, content: bytes) -> Buffer:
        """Memory for these bytes.  Enqueues the copies.  Raises `ExhaustedError`, `MemoryError`."""
        stream, nbytes = self._stream, even(len(content))
        buffer = memory.allocate(stream.device, nbytes, stream)
        start = 0
        while start < nbytes:
            if self._address == self._end:
                self._take()
            part = min(nbytes - start, self._end - self._address)
            piece = content[start : start + part] if part < nbytes else content
            ctypes.memmove(self._address, piece, len(piece))
            stream.upload(buffer.address + start, self._address, part)
            self._address += part
            self.coming -= part
            start += part
        return buffer

    def _take(self) -> None:
        """Pinned memory for what is coming."""
        pool = pinned_pool(self._stream.device.backend)
        if self.coming <= SLOT_BYTES and self._stream.lasting:
            self._slots, self._address = pool.slot(self._stream)
            self._end = self._address + SLOT_BYTES
            return
        chunk = pool.take(min(self.coming, MAX_CHUNK_BYTES))
        self._chunks.append(chunk)
        self._address, self._end = chunk.address, chunk.address + chunk.nbytes

    def hold(self) -> None:
        """All is enqueued: keeps the chunks until the copies have run.  Enqueues a record where there are any."""
        if self._chunks:
            memory.hold_until(self._chunks, self._stream.record(), self._stream)
            self._chunks = []

    def abandon(self) -> None:
        """The same where something has failed, and nothing can be enqueued perhaps.  Does not touch the device."""
        if self._chunks:
            leave(self._chunks, self._stream)
            self._chunks = []


class Incoming:
    """One message's buffers on their way in: leased streams, destination memory, and the pulls."""

    def __init__(
        self,
        headers: Sequence[BufferHeader],
        role: Role,
        given: Mapping[Device, Stream] | None = None,
        end: str = "",
        imports: Imports | None = None,
        borrows: Callable[[Device], bool] | None = None,
        tags: TagPath | None = None,
        key: Key | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Leases and allocates; `given` are streams of the user's, used in place of leased ones; `end` is the token of
        this end, to which a peer in this process hands over; `imports` is what the peer has exported to us, `borrows`
        says on which devices it is read in place, `tags` is how UCX goes between the two ends, `key` the transfer's,
        `waits` those for the peer's signals.
        Does not block the host, but for the first use of a device.

        Raises `ExhaustedError`, `PlacementError`, `MemoryError` where there is no room or no such device,
        `CaptureError` where a stream that was given captures a graph.
        """
        self.headers = tuple(headers)
        self.leases: dict[Device, StreamLease | GivenStream] = {}
        self.failure: StreamrtError | MemoryError | None = None  # what the last of the pulls met
        self._role = role
        self._given = given or {}
        self._end = end
        self._imports = imports
        self._borrows = borrows
        self._tags = tags
        self._key = key
        self._waits = waits
        self.buffers: list[Any] = []
        self._halves: list[ReceiveHalf] = []
        try:
            for number, header in enumerate(headers):
                memory, half = self._opened(number, header)
                self.buffers.append(memory)
                self._halves.append(half)
        except BaseException:
            self.release()
            raise

    def lease(self, device: Device) -> None:
        """Leases a stream of a device that no buffer is on.  Does not block the host, but for the first use of it.

        Raises as the constructor.
        """
        self._stream(device)

    def fill(self, metas: Sequence[ArrayMeta]) -> list[Buffer]:
        """Memory of devices for the bytes that came in the message's body, in their order.  Enqueues the copies on the
        leased streams, which are best current: memory is taken for them.

        Does not block the host.  Raises `ExhaustedError`, `MemoryError` where there is no room.
        """
        given = [meta for meta in metas if meta.inline is not None and meta.target.has_streams]
        fillers: dict[Device, _Filler] = {}
        for meta in given:
            if meta.target not in fillers:
                fillers[meta.target] = _Filler(self._stream(meta.target))
            fillers[meta.target].coming += even(meta.nbytes)
        try:
            buffers = [fillers[meta.target].fill(meta.inline or b"") for meta in given]
            for filler in fillers.values():
                filler.hold()
        except BaseException:
            for filler in fillers.values():
                filler.abandon()
            raise
        return buffers

    def _stream(self, device: Device) -> Stream:
        if device not in self.leases:
            open_device(device)
            own = self._given.get(device)
            if own is not None and own.capturing:
                raise CaptureError(f"{own!r}, the reply_stream, captures a graph, and a reply cannot be part of one")
            self.leases[device] = stream_pool(device, self._role).lease() if own is None else GivenStream(own)
        return self.leases[device].stream

    def _opened(self, number: int, header: BufferHeader) -> tuple[Any, ReceiveHalf]:
        """A buffer's memory, and what fills it."""
        device = parse_device(header.device)
        stream = self._stream(device) if device.has_streams else None
        if header.channel == SAME_PROCESS and header.nbytes:
            taker = Taker(device, header.nbytes, stream, self._end, parse_device(header.source))
            return taker, taker
        if header.channel == UCX and header.nbytes and self._key is not None:
            receiving = Receiving(self._tags, self._key, number, device, header.nbytes, stream)
            return receiving.memory, receiving
        if header.channel != STAGING and header.nbytes:
            borrow = self._borrows is not None and self._borrows(device)
            opener = Opener(device, header.nbytes, stream, self._imports, borrow=borrow, waits=self._waits)
            return opener, opener
        return _staged(device, header.nbytes, stream)

    def reserve(self, buffer: int, offset: int, nbytes: int) -> memoryview | None:
        """Memory into which a link may receive a chunk's payload; None: anywhere.  Does not block the host."""
        return self._halves[buffer].reserve(offset, nbytes) if buffer < len(self._halves) else None

    def pull(self, buffer: int, offset: int, payload: memoryview | bytes, channel: str) -> None:
        """Enqueues on the leased stream the pull of a chunk.  Does not block the host.  Raises `OpenError`."""
        if channel != self.headers[buffer].channel:  # we have declined it
            header = replace(self.headers[buffer], channel=channel)
            self.headers = (*self.headers[:buffer], header, *self.headers[buffer + 1 :])
            self.buffers[buffer], self._halves[buffer] = self._opened(buffer, header)
        self._halves[buffer].pull(offset, payload)

    def receiving(self, buffer: int) -> Receiving | None:
        """The half of a buffer that comes by UCX, None for others.  Does not touch the device."""
        half = self._halves[buffer]
        return half if isinstance(half, Receiving) else None

    def order_of(self, buffer: int) -> str:
        """In which order a buffer came that is here.  Does not touch the device."""
        half = self._halves[buffer]
        return STREAM if isinstance(half, Opener) and half.point is not None else HOST

    @property
    def points(self) -> tuple[Point, ...]:
        """The peer's points behind which the bytes are there, in stream order.  Does not touch the device."""
        found = (half.point for half in self._halves if isinstance(half, Opener))
        return tuple(dict.fromkeys(point for point in found if point is not None))

    @property
    def streams(self) -> list[Stream]:
        """The leased streams, one for each device of the message."""
        return [lease.stream for lease in self.leases.values()]

    @property
    def drained(self) -> bool:
        """Whether every pull has run.  Does not block the host."""
        return all(half.drained for half in self._halves)

    def hold(self) -> None:
        """Holds what pulls that have not run still need: nobody asks again.  Does not block the host."""
        for half in self._halves:
            half.abandon()

    def fail(self, error: StreamrtError | MemoryError) -> None:
        """A pull has failed: whoever takes the message raises this in its place.  Does not block the host."""
        self.failure = error
        self.abandon()

    def abandon(self) -> None:
        """`hold`, and `release`: nobody wants it any more.  Does not block the host."""
        self.hold()
        self.release()

    def release(self) -> None:
        """Gives the leased streams back; what is enqueued on them still runs.  Idempotent."""
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()


def read_message(body: bytes, incoming: Incoming | None) -> tuple[Sequence[ArrayMeta], bytes]:
    """Reads and checks the body of a message whose buffers are here.  Raises `CodecError`, and what a pull has met.

    Does not touch the device.
    """
    if incoming is None:
        return read_body(body, ())
    if incoming.failure is not None:
        raise incoming.failure
    return read_body(body, incoming.headers)


def _staged(device: Device, nbytes: int, stream: Stream | None) -> tuple[Buffer, ReceiveHalf]:
    buffer = memory.allocate(device, nbytes, stream)
    if stream is None:
        return buffer, HostReceiver(buffer.address, nbytes, buffer)
    return buffer, DeviceReceiver(buffer.address, nbytes, stream)
