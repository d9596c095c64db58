"""The transfers of one connection, both ways: memory and leased streams by message, and their chunks on the link.

Everything here runs under the driver's lock and never blocks on a device.  A device that fails ends the call whose
bytes it held, and no other.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from streamrt import memory
from streamrt.device import Device, parse_device
from streamrt.errors import DeviceError, LifetimeError, PlacementError, StreamrtError
from streamrt.stream import Stream
from transport import lend
from transport.channels import (
    SAME_PROCESS,
    SHARED_MEMORY,
    UCX,
    OpenError,
    can_share,
    can_tag,
    choose,
    ends,
    same_process,
    shares_first,
    waits,
)
from transport.channels.tag_messages import SENT, TagPath
from transport.deadlines import earlier
from transport.events import (
    Abort,
    Announce,
    Announced,
    BufferHeader,
    CancelCall,
    DataReady,
    FailCall,
    FreeBuffers,
    Key,
    LeaseStreams,
    NoMemory,
    OpenFailed,
    PeerSuspected,
    Pull,
    Pulled,
    Released,
    ReleaseSlot,
    Retire,
    Side,
    StreamsGranted,
    Watch,
)
from transport.held import MAX_HELD, Held
from transport.inlined import Late
from transport.limits import STAGING
from transport.links import DescriptorLink
from transport.ordered import Ordered
from transport.payload import ArrayMeta
from transport.remote_errors import describe_error
from transport.sharing import Sharing
from transport.transfer import ROLE_SEND, ROLE_SERVE, Incoming, Outgoing
from transport.wire import peek_data

if TYPE_CHECKING:
    from transport.driver import Driver

LINK_BYTES = 8 << 20  # bytes that may stand in a link before chunks wait for it: a few round trips of any link here


class Moving:
    """What is on its way out and in, by key."""

    def __init__(self, driver: Driver) -> None:
        self.outgoing: dict[Key, Outgoing] = {}
        self.incoming: dict[Key, Incoming] = {}
        self.bytes_out: collections.Counter[str] = collections.Counter()
        self.bytes_in: collections.Counter[str] = collections.Counter()
        self.moves = 0  # chunks handed on, copies seen to have run: whether polling brings anything
        self.ordered = Ordered(driver)
        self.sharing: Sharing | None = None
        self.tags: TagPath | None = None
        self._shares = False
        self._tagged: dict[Key, None] = {}  # what UCX has yet to take, or to bring to the peer
        self._arriving: dict[tuple[Key, int], None] = {}  # buffers that UCX has yet to bring
        self._driver = driver
        self._held = Held()
        self._sending: collections.deque[Key] = collections.deque()
        self._draining: list[Incoming] = []
        self._failed: dict[Key, Incoming] = {}  # this turn: the protocol may have ended the call already
        self._handed: collections.deque[bytes] = collections.deque()  # descriptors that the peer may not have taken yet
        self._link_full = False
        self._one_process = False
        link = driver.link  # a Protocol's isinstance is slow, and this is asked for each message
        self._descriptor_link = link if isinstance(link, DescriptorLink) else None

    def meet(self) -> None:
        """The peer has said who it is: which channels there are between us."""
        local, remote = self._driver.local_info, self._driver.remote_info
        ends.meet(local, remote)
        if can_share(local, remote):
            self.sharing = self.ordered.share()
            self._shares = shares_first(local, remote)
        if can_tag(local, remote):
            near = all(local.get(name) == remote.get(name) for name in ("boot", "pid_namespace"))
            self.tags = TagPath(self._driver.moved, self._driver.peer_gone, near=near)
        else:
            self._driver.protocol.leave_out(UCX)

    @property
    def allocator(self) -> memory.Allocate | None:
        """Where snapshots for this peer are best taken; None: anywhere."""
        return None if self.sharing is None else self.sharing.allocate

    @property
    def lender(self) -> lend.LendAt | None:
        """How this peer can be lent a user's own memory; None: not at all."""
        return None if self.sharing is None else self.sharing.lend

    def channel(self, source: Device, target: Device, nbytes: int) -> str:
        """By which channel an array of ours goes to a device of the peer's.  Does not touch the device."""
        shares = self._shares and self.sharing is not None and self.sharing.exports.gives(source)
        tags = self.tags is not None and not self.tags.broken
        paired = self._paired() and (self.ordered.clear or not source.has_streams)  # else nobody looks at what it takes
        return choose(source, target, nbytes, one_process=paired, shares=shares, tags=tags)

    def _paired(self) -> bool:
        """Whether both ends are in this process: for ever, from when both know it."""
        local, remote = self._driver.local_info, self._driver.remote_info
        if not self._one_process and local.get("process") == remote.get("process"):
            self._one_process = ends.paired(local, remote)
        return self._one_process

    @property
    def polling(self) -> bool:
        """Whether a device has to be looked at: chunks that are not ready, copies that have not run.

        Also a full link that does not say when it takes more: ZeroMQ tells nobody that it has written a frame.
        """
        sending = bool(self._sending) and not (self._link_full and self._driver.link.wants_write)
        return bool(self._draining) or sending or bool(self._held.messages) or self.ordered.signalling

    @property
    def ready(self) -> bool:
        """Whether what is polled for is there, as far as can be seen.  Needs no lock; does not block the host.

        Most looks find nothing, and the lock would hold up the threads that start calls.
        """
        if self._draining or (self.sharing is not None and self.sharing.watching):
            return True
        if self.ordered.signalling and self.ordered.ready:
            return True
        try:
            if self._held.messages and self._held.find() is not None:
                return True
            sending = [self.outgoing.get(key) for key in tuple(self._sending)]
        except RuntimeError:  # it changes just now
            return True
        return any(outgoing is None or outgoing.ready for outgoing in sending)

    def next_look(self) -> float | None:
        """When to look again whether a transfer by shared memory is over, or UCX there.  Does not touch the device."""
        sharing, tags = self.sharing, self.tags
        shared = sharing.next_look() if sharing is not None and sharing.watching else None
        return shared if tags is None else earlier(shared, tags.deadline)

    # out

    def watch(self, effect: Watch, now: float) -> None:
        """A transfer may go: its chunks are made from now on.  Enqueues on its leased streams."""
        outgoing = self.outgoing[effect.key]
        try:
            self._use_tags(((header.channel, header.source) for header in effect.buffers), now)
            outgoing.start(effect.key, effect.buffers, effect.declined, self.tags)
        except DeviceError as error:
            self._fail(effect.key, error, now)
        if outgoing.has_chunks() and effect.key not in self._sending:
            self._sending.append(effect.key)
        if outgoing.has_tagged_chunks():
            self._tagged[effect.key] = None

    def move(self, now: float) -> bool:
        """Does what can be done without the peer: ends transfers by shared memory, feeds the link.  Whether it did any.

        Does not block the host.
        """
        sharing = self.sharing
        if sharing is not None and sharing.watching and self._end_shared(sharing, now):
            return True
        if self.ordered.signalling and (ended := self.ordered.end_signalled()):
            self.moves += ended
            return True
        if self.tags is not None and self._feed_tagged(self.tags, now):
            return True
        if self._held.messages and self._send_held(now):
            return True
        return bool(self._sending) and self._feed(now)

    def may_hold(self, foreign: waits.Foreign) -> bool:
        """Whether one more message may wait here for bytes that go in its body.  Does not touch the device."""
        return len(self._held.messages) < MAX_HELD and self.ordered.may_hold(foreign)

    def hold(self, key: Key, late: Late, send: Callable[[bytes, float], None]) -> None:
        """A message waits until its bytes are there; `send` is called with its body then, under the lock."""
        self._held.add(key, late, send)

    def drop_held(self, key: Key) -> bool:
        """The message is not wanted any more; whether it was held."""
        return self._held.drop(key)

    def _send_held(self, now: float) -> bool:
        """Sends one message whose bytes are there; whether there was one.

        One at a time: what that changes for the others is carried out before.
        """
        found = self._held.take()
        if found is None:
            return False
        self.moves += 1
        if found.error is not None:
            self._fail(found.key, found.error, now)
        else:
            found.message.send(found.message.late.body(), now)
        return True

    def _feed(self, now: float) -> bool:
        """Moves chunks that are ready into the link, transfers in turn; whether any moved."""
        moved = self._link_full = False
        for _ in range(len(self._sending)):
            key = self._sending[0]
            outgoing = self.outgoing.get(key)
            if outgoing is None or not outgoing.has_chunks():
                self._sending.popleft()
                continue
            if self._driver.link.queued_bytes >= LINK_BYTES:
                self._link_full = True  # the link says when it takes more
                break
            self._sending.rotate(-1)
            try:
                chunk = outgoing.advance()
            except DeviceError as error:
                self._fail(key, error, now)
                continue
            if chunk is not None:
                self._hand_on(key, outgoing, *chunk, now)
                moved = True
        return moved

    def _feed_tagged(self, tags: TagPath, now: float) -> bool:
        """Tells the peer what UCX has taken, or cannot take; whether there was any."""
        tags.check(now)
        moved = False
        for key in list(self._tagged):
            if (outgoing := self.outgoing.get(key)) is None:
                del self._tagged[key]
                continue
            for chunk in outgoing.tagged_chunks():
                self._hand_on(key, outgoing, *chunk, now)
                moved = True
        return moved

    def _hand_on(
        self, key: Key, outgoing: Outgoing, buffer: int, channel: str, offset: int, data: memoryview | bytes, now: float
    ) -> None:
        if outgoing.behind and waits.any_lost(outgoing.behind):
            self._fail(key, self.ordered.lost(), now)
            return
        self.bytes_out[channel] += len(data) if channel == STAGING else outgoing.prepared.headers[buffer].nbytes
        if channel == SHARED_MEMORY and self.sharing is not None:
            self.sharing.given(key, buffer, data)
        elif channel == SAME_PROCESS:
            while self._handed and same_process.taken(self._handed[0]):
                self._handed.popleft()
            self._handed.append(bytes(data))
        self._driver.protocol.fact(DataReady(key, buffer, offset, data, channel), now)
        self.moves += 1
        if outgoing.by_reference:
            self._perhaps_gone(key, outgoing, now)

    def _perhaps_gone(self, key: Key, outgoing: Outgoing, now: float) -> None:
        """Whether a transfer is over: all of its chunks are out, and nobody has yet to come for the bytes."""
        if outgoing.has_chunks() or outgoing.underway:
            return
        self._tagged.pop(key, None)
        if self.sharing is None or self.sharing.went(key, now):
            self._driver.protocol.fact(Released(key), now)

    def _end_shared(self, sharing: Sharing, now: float) -> bool:
        """Tells which transfers by shared memory are over; whether any."""
        keys, retiring = sharing.over(now), sharing.retiring()
        if lend.undrained():
            self._driver.complete(lend.drain)  # what is the user's goes with no lock held
        if sharing.exports.fault:
            self._driver.protocol.command(Abort(sharing.exports.fault), now)
            return True
        for key in keys:
            self._driver.protocol.fact(Released(key), now)
        for number in retiring:
            self._driver.protocol.command(Retire(number), now)
        return bool(keys or retiring)

    def _fail(self, key: Key, error: StreamrtError, now: float) -> None:
        """A device has failed under what is being sent, or what it is made of is lost: its call ends, no other."""
        driver = self._driver
        if key.outgoing:
            call = driver.calls.open.get(key.call)
            if call is not None:
                driver.complete(functools.partial(call.future.set_exception, error))
            driver.protocol.command(CancelCall(key.call), now)
        else:
            type_name, message = describe_error(error)
            driver.served.calls.pop(key.call, None)
            driver.protocol.command(FailCall(key.call, type_name, message), now)
        if isinstance(error, DeviceError):
            driver.complete(functools.partial(driver.agent.device_refused, error))

    def freed(self, effect: FreeBuffers) -> None:
        """A transfer needs its memory no longer."""
        outgoing = self.outgoing.pop(effect.key, None)
        if outgoing is None:
            return  # it had no buffers
        self._tagged.pop(effect.key, None)
        if self.sharing is not None:
            self.sharing.forget(effect.key)
        if effect.sent:
            self.ordered.out.update(outgoing.orders())
            if outgoing.enclosed_bytes:
                self.bytes_out[SHARED_MEMORY] += outgoing.enclosed_bytes
        self._driver.complete(functools.partial(outgoing.close, effect.sent))

    def released(self, effect: ReleaseSlot) -> None:
        """A slot of a transfer by reference is free: ours after a decline, the peer's when nobody used it."""
        if self.tags is not None and effect.descriptor == SENT:
            incoming = self.incoming.get(effect.key)
            receiving = None if incoming is None else incoming.receiving(effect.buffer)
            if receiving is None or not receiving.begun:  # else its own end tells UCX
                self.tags.refuse(effect.key, effect.buffer)
        elif effect.descriptor and self.sharing is not None:
            self.sharing.imports.release(effect.descriptor)
        elif effect.descriptor:
            same_process.discard(effect.descriptor, ends.token_of(self._driver.local_info))
        else:
            self._declined(effect)

    def _declined(self, effect: ReleaseSlot) -> None:
        if (outgoing := self.outgoing.get(effect.key)) is None:
            if self.sharing is not None:
                self.sharing.declined_late(effect.key, effect.buffer)
            return
        if self.tags is not None and outgoing.by_tag(effect.buffer):
            self.tags.broken = self.tags.broken or "the peer cannot receive by it"
            self._complain()
        export = outgoing.declined(effect.buffer)
        if self.sharing is None or export is None:
            return
        device = export.room.device
        if self.sharing.declined(effect.key, effect.buffer, device):
            text = "%s cannot map our shared memory of %s; its arrays go by other channels"
            self._driver.agent.log.warning(text, self._driver.name, device)

    def retired(self, number: int) -> None:
        """The peer lends nothing of an allocation any more."""
        if self.sharing is not None:
            self.sharing.imports.retire(number)

    # by UCX

    def _use_tags(self, devices: Iterable[tuple[str, str]], now: float) -> None:
        """Buffers are on their way, each by a channel to or from a device of ours: UCX is started if one needs it."""
        if self.tags is not None and (named := [device for channel, device in devices if channel == UCX]):
            self.tags.start(parse_device(named[0]), now)

    def announced(self, effect: Announced) -> None:
        """The peer says where its UCX is."""
        if effect.channel == UCX and self.tags is not None:
            self.tags.heard(effect.payload)

    def moved(self, now: float) -> None:
        """UCX's thread has moved something: what has come, what has been fetched, that UCX is there."""
        if self.tags is None:
            return
        protocol = self._driver.protocol
        if (announcement := self.tags.announcement()) is not None:
            protocol.command(Announce(UCX, announcement), now)
        for key in list(self._tagged):
            if (outgoing := self.outgoing.get(key)) is not None:
                self._perhaps_gone(key, outgoing, now)
        for key, buffer in list(self._arriving):
            incoming = self.incoming.get(key)
            receiving = None if incoming is None else incoming.receiving(buffer)
            arrived = receiving.arrived if receiving is not None else "nobody asks for it any more"
            if arrived:
                del self._arriving[key, buffer]
            if arrived and incoming is not None:
                self._arrived(key, buffer, incoming, arrived, now)

    def _arrived(self, key: Key, buffer: int, incoming: Incoming, arrived: bool | str, now: float) -> None:
        driver = self._driver
        if isinstance(arrived, str):
            assert self.tags is not None
            self.tags.broken = self.tags.broken or arrived
            self._complain()
            driver.protocol.fact(OpenFailed(key, buffer, arrived), now)
        else:
            self.bytes_in[UCX] += incoming.headers[buffer].nbytes
            driver.protocol.fact(Pulled(key, buffer), now)

    def _complain(self) -> None:
        """UCX does not work between these two: says so once, and does not use it any more."""
        if self.tags is not None and (reason := self.tags.complain()):
            text = "UCX does not work with %s (%s); arrays go by other channels"
            self._driver.agent.log.warning(text, self._driver.name, reason)

    def send(self, frames: tuple[memoryview | bytes, ...]) -> None:
        """Writes one message, with the descriptors that belong to it.  Raises `LinkBroken`."""
        descriptors = self.sharing.descriptors(frames) if self.sharing is not None else ()
        if descriptors and self._descriptor_link is not None:
            self._descriptor_link.send(frames, descriptors)
        else:
            self._driver.link.send(frames)

    # in

    def taken_descriptors(self) -> list[int]:
        """The descriptors that came with what was received last.  Does not block the host."""
        return [] if self._descriptor_link is None else self._descriptor_link.taken_fds()

    def descriptors_came(self, descriptors: list[int]) -> None:
        """Takes over what came with a message.  Does not block the host."""
        if self.sharing is not None:
            self.sharing.arrived(descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)

    def sink(self, header: bytes, nbytes: int) -> memoryview | None:
        """Where the link may receive a payload in place: its destination, while nobody has been given that yet.

        None, anywhere, also where there is no pinned memory: `pull` then says so, and the call alone ends.
        """
        data = peek_data(header)
        if data is None:
            return None
        call, side, buffer, offset = data
        incoming = self.incoming.get(Key(call, side is Side.REPLY, side))
        try:
            return None if incoming is None else incoming.reserve(buffer, offset, nbytes)
        except (StreamrtError, MemoryError):
            return None

    def lease(self, effect: LeaseStreams, now: float) -> None:
        """A transfer to us begins: leases its streams and takes its memory, or says why not."""
        driver = self._driver
        local, remote = driver.local_info, driver.remote_info
        if any(header.channel == SAME_PROCESS for header in effect.buffers) and not ends.paired(local, remote):
            reason = "the peer hands memory over as inside one process, and is another process"
            driver.protocol.command(Abort(reason), now)
            return
        role = ROLE_SEND if effect.key.outgoing else ROLE_SERVE
        imports = None if self.sharing is None else self.sharing.imports
        words = None if self.sharing is None else self.sharing.waits
        try:
            for header in effect.buffers:
                self._check_target(parse_device(header.device), reply=effect.key.outgoing)
                parse_device(header.source)  # a name like any other: what is none ends the call here, not its first use
            call = driver.calls.open.get(effect.key.call) if effect.key.outgoing else None
            given = call.reply_streams if call is not None else {}
            borrows = functools.partial(driver.service.borrows, effect.function) if effect.function else None
            self._use_tags(((header.channel, header.device) for header in effect.buffers), now)
            incoming = Incoming(
                effect.buffers, role, given, ends.token_of(local), imports, borrows, self.tags, effect.key, words
            )
        except (StreamrtError, MemoryError) as error:
            driver.protocol.fact(NoMemory(effect.key, str(error), type(error).__name__), now)
            return
        opened = 0
        try:
            for number, header in enumerate(effect.buffers):
                if header.descriptor:
                    incoming.pull(number, 0, header.descriptor, header.channel)
                    self._came(incoming, number, header)
                    opened += 1
        except (StreamrtError, MemoryError) as error:
            incoming.abandon()
            driver.protocol.fact(StreamsGranted(effect.key, opened), now)
            driver.protocol.fact(NoMemory(effect.key, str(error), type(error).__name__), now)
            return
        self.incoming[effect.key] = incoming
        driver.protocol.fact(StreamsGranted(effect.key, opened), now)

    def _check_target(self, device: Device, *, reply: bool) -> None:
        """Before anything is opened for it: a peer puts arrays only where this side said that it may."""
        if not device.has_streams:
            return
        driver = self._driver
        device_map = driver.device_map()
        if reply:
            allowed: Collection[Device] = device_map.forward
        elif device_map.allowed is not None:
            allowed = (*device_map.allowed, *device_map.forward)
        elif driver.agent.devices is not None:
            allowed = driver.agent.devices
        else:
            allowed = (*driver.agent.visible_devices(), *device_map.forward)
        if device not in allowed:
            names = ", ".join(str(one) for one in sorted(allowed)) or "cpu alone"
            raise PlacementError(f"{device} is not for this connection; arrays may be put on {names}")

    def inlined_targets(self, metas: Sequence[ArrayMeta], *, reply: bool) -> list[Device]:
        """The devices, each once, of the arrays that came in a message's body for devices: most often none.

        Does not touch the device.  Raises `PlacementError` for one that is not for this connection.
        """
        targets = [meta.target for meta in metas if meta.inline is not None and meta.target.has_streams]
        for target in targets:
            self._check_target(target, reply=reply)
        return targets if len(targets) < 2 else list(dict.fromkeys(targets))

    def lease_inlined(
        self,
        targets: Sequence[Device],
        incoming: Incoming | None,
        *,
        reply: bool,
        given: Mapping[Device, Stream] | None = None,
    ) -> Incoming:
        """The message's streams, with one for each of the `targets`, where `Incoming.fill` puts their arrays.

        Needs no lock; does not block the host, but for the first use of a device.  Raises `ExhaustedError`.
        """
        made = incoming or Incoming((), ROLE_SEND if reply else ROLE_SERVE, given)
        try:
            for target in targets:
                made.lease(target)
        except BaseException:
            if incoming is None:  # nobody else knows of it
                made.release()
            raise
        return made

    def pull(self, effect: Pull, now: float) -> None:
        """A chunk has come.  Enqueues its copy on the leased stream; does not block the host."""
        driver = self._driver
        incoming = self.incoming.get(effect.key)
        if incoming is None:
            return
        try:
            incoming.pull(effect.buffer, effect.offset, effect.payload, effect.channel)
        except OpenError as error:
            driver.agent.log.info("%s: %s", driver.name, error)
            if effect.channel == UCX:
                self._complain()
            else:  # it comes by UCX next, if the two have that, and then the peer has to know where it is
                self._use_tags([(UCX, incoming.headers[effect.buffer].device)], now)
            driver.protocol.fact(OpenFailed(effect.key, effect.buffer, str(error)), now)
            return
        except LifetimeError as error:  # in one process, the sender's close is seen before its last messages are
            driver.protocol.fact(PeerSuspected(str(error)), now)
            return
        except (StreamrtError, MemoryError) as error:
            self._failed[effect.key] = self.incoming.pop(effect.key)
            self._failed[effect.key].fail(error)
            driver.protocol.fact(NoMemory(effect.key, str(error), type(error).__name__), now)
            return
        if effect.channel == UCX:
            self._arriving[effect.key, effect.buffer] = None
        elif effect.channel == STAGING:
            self.bytes_in[effect.channel] += len(effect.payload)
        else:
            self._came(incoming, effect.buffer, incoming.headers[effect.buffer])
            driver.protocol.fact(Pulled(effect.key, effect.buffer), now)

    def _came(self, incoming: Incoming, buffer: int, header: BufferHeader) -> None:
        """Counts a buffer that came by reference."""
        self.bytes_in[header.channel] += header.nbytes
        if header.channel == SHARED_MEMORY and parse_device(header.source).has_streams:  # a device: see `lease`
            self.ordered.come[incoming.order_of(buffer)] += 1

    def take(self, key: Key) -> Incoming | None:
        """All of a message is here: hands it over; its copies are looked after until they have run.

        What failed is handed over too, with its `failure`: the end of its call was on its way already.
        """
        incoming = self.incoming.pop(key, None) or self._failed.pop(key, None)
        if incoming is not None and not self._drained(incoming):
            self._draining.append(incoming)
        return incoming

    def look(self) -> None:
        """Forgets the messages whose copies have run, and those that failed before all of them was here."""
        if self._failed:
            self._failed.clear()
        if self._draining:
            before = len(self._draining)
            self._draining = [incoming for incoming in self._draining if not self._drained(incoming)]
            self.moves += before - len(self._draining)

    def _drained(self, incoming: Incoming) -> bool:
        try:
            return incoming.drained
        except DeviceError as error:  # who uses the value hears it from the device
            incoming.hold()
            self._driver.complete(functools.partial(self._driver.agent.device_refused, error))
            return True

    def close(self) -> None:
        """The connection is over: all that is on its way is dropped, safely."""
        for key in list(self.incoming):
            self.incoming.pop(key).abandon()
        for incoming in self._draining:  # nobody looks at them again; their values are delivered
            incoming.hold()
        self._draining.clear()
        self._sending.clear()
        self._held.clear()
        for descriptor in self._handed:  # on a link that is no more
            same_process.discard(descriptor, ends.token_of(self._driver.remote_info))
        self._handed.clear()
        ends.forget(self._driver.local_info)
        if self.sharing is not None:
            for callback in self.sharing.close(self._driver.peer_gone, self._driver.peer_timeout):
                self._driver.complete(callback)
        if self.tags is not None:
            closed = self._driver.closed
            self.tags.close(graceful=closed is not None and closed.graceful)
        for key in list(self.outgoing):
            self._driver.complete(functools.partial(self.outgoing.pop(key).close, False))
