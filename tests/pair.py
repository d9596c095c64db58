"""Two connections over a link of virtual time, with drivers that do what real ones do, in seeded order.

Faults are fields and methods: `drop`, `repeat`, `kill`, `cut`.  Every effect is checked as it is drained: futures and
buffers end once, functions run once and only on the right bytes, descriptors are given back, loss keeps its order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from transport.events import (
    BufferHeader,
    Closed,
    DataReady,
    Effect,
    EndFuture,
    FailCall,
    FinishCall,
    FreeBuffers,
    HoldCall,
    Key,
    Launch,
    LeaseStreams,
    MarkLost,
    NoMemory,
    OpenFailed,
    PeerGone,
    PeerSuspected,
    Pull,
    Pulled,
    Ready,
    Released,
    ReleaseSlot,
    ReleaseWords,
    Send,
    Side,
    StartCall,
    StopCall,
    StreamsGranted,
    Watch,
)
from transport.limits import STAGING, Limits
from transport.protocol import Connection
from transport.wire import decode

STEPS_AT_ONE_TIME = 5000


def content(sender: str, key: Key, buffer: int, nbytes: int) -> bytes:
    """What buffer `buffer` of a transfer holds, as a function of its name."""
    start = (ord(sender[0]) * 7 + key.call * 13 + int(key.side) * 5 + buffer * 3) % 251
    return bytes((start + i) % 251 for i in range(nbytes))


class End:
    """One side: a connection and its driver.  `manual`: launched functions wait for `finish`."""

    def __init__(self, pair: Pair, name: str, limits: Limits, *, initiator: bool) -> None:
        self.pair, self.name = pair, name
        self.connection = Connection(
            initiator=initiator, hello={"name": name}, session=pair.nonce(), limits=limits, now=pair.now
        )
        self.dead = False
        self.manual = False
        self.delay = 0.0
        self.chunk = 7
        self.unopenable: set[str] = set()
        self.no_memory: Callable[[Key], bool] = lambda key: False
        self.plan: Callable[[Launch], tuple[BufferHeader, ...] | None] = lambda launch: ()
        self.calls = 0
        self.notifies: set[int] = set()
        self.holds = 0
        self.held: set[int] = set()  # those that never went
        self.accepted: set[Key] = set()
        self.freed: dict[Key, bool] = {}
        self.ended: dict[int, EndFuture] = {}
        self.launched: dict[int, Launch] = {}
        self.running: dict[int, Launch] = {}
        self.stopped: dict[int, str] = {}
        self.info: dict[str, object] | None = None
        self.closed: Closed | None = None
        self.lost = 0
        self.effects: list[Effect] = []
        self._memory: dict[Key, list[bytearray]] = {}
        self._headers: dict[Key, tuple[BufferHeader, ...]] = {}
        self._slots: dict[Key, set[bytes]] = {}
        self._enclosed: set[Key] = set()

    @property
    def peer(self) -> End:
        return self.pair.b if self is self.pair.a else self.pair.a

    # Application ------------------------------------------------------------------------------------------------------

    def start(
        self,
        *sizes: int,
        channel: str = STAGING,
        deadline: float | None = None,
        notify: bool = False,
        body: bytes = b"",
        function: str = "f",
        enclose: bool = False,
    ) -> int:
        """Starts a call with buffers of `sizes`, and a relative deadline; `enclose`: with their descriptors."""
        call = self.calls + 1
        buffers = self.headers(Key(call, True, Side.REQUEST), *sizes, channel=channel, enclose=enclose)
        at = None if deadline is None else self.pair.now + deadline
        self.command(StartCall(call, function, body, buffers, at, notify))
        return call

    def hold(self, *, deadline: float | None = None, function: str = "f") -> int:
        """Begins a call that is held, with a relative deadline."""
        held = self.holds - 1
        self.command(HoldCall(held, function, None if deadline is None else self.pair.now + deadline))
        return held

    def go(self, held: int, *, deadline: float | None = None, body: bytes = b"") -> int:
        """Sends a call that is held, with a relative deadline."""
        call = self.calls + 1
        at = None if deadline is None else self.pair.now + deadline
        self.command(StartCall(call, "f", body, (), at, held=held))
        return call

    def command(self, command: object) -> None:
        """Gives a command; keeps count of what must come back for it."""
        if isinstance(command, StartCall):
            key = Key(command.call, True, Side.REQUEST)
            self.connection.command(command, self.pair.now)
            self.calls = command.call
            self.held.discard(command.held)
            self._accept(key, command.buffers)
            if command.notify:
                self.notifies.add(command.call)
        elif isinstance(command, HoldCall):
            self.connection.command(command, self.pair.now)
            self.holds = command.call
            self.held.add(command.call)
        elif isinstance(command, FinishCall):
            self.connection.command(command, self.pair.now)
            self._accept(Key(command.call, False, Side.REPLY), command.buffers)
        else:
            self.connection.command(command, self.pair.now)  # type: ignore[arg-type]
        self.drain()

    def finish(self, call: int, *sizes: int, channel: str = STAGING, enclose: bool = False) -> None:
        """Returns from a running function with buffers of `sizes`; `enclose`: with their descriptors."""
        del self.running[call]
        buffers = self.headers(Key(call, False, Side.REPLY), *sizes, channel=channel, enclose=enclose)
        self.command(FinishCall(call, b"value %d" % call, buffers))

    def headers(self, key: Key, *sizes: int, channel: str = STAGING, enclose: bool = False) -> tuple[BufferHeader, ...]:
        """Buffers of a transfer of this end's; `enclose`: with their descriptors, where there are bytes."""
        headers = (BufferHeader(size, "cpu", channel, "cpu") for size in sizes)
        if not enclose:
            return tuple(headers)
        return tuple(
            replace(one, descriptor=self._descriptor(key, index, channel)) if one.nbytes else one
            for index, one in enumerate(headers)
        )

    def _accept(self, key: Key, buffers: Sequence[BufferHeader]) -> None:
        self.accepted.add(key)
        enclosed = {one.descriptor for one in buffers if one.descriptor}
        if enclosed:
            self._enclosed.add(key)
            self._slots[key] = enclosed

    def _descriptor(self, key: Key, index: int, channel: str) -> bytes:
        return f"{self.name} {key.call} {key.side} {index} {channel}".encode()

    def fail(self, call: int) -> None:
        """Raises from a running function."""
        del self.running[call]
        self.command(FailCall(call, "ValueError", "no", "trace"))

    def fact(self, fact: object) -> None:
        """Tells a fact, unless the process is gone."""
        if not self.dead:
            self.connection.fact(fact, self.pair.now)  # type: ignore[arg-type]
            self.drain()

    # Driver -----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Carries out effects until there are none."""
        while not self.dead and (effects := self.connection.drain()):
            for effect in effects:
                self.effects.append(effect)
                shown = replace(effect, payload=bytes(effect.payload)) if isinstance(effect, Pull) else effect
                shown = Send(tuple(map(bytes, shown.frames))) if isinstance(shown, Send) else shown
                self.pair.trace.append((round(self.pair.now, 9), self.name, repr(shown)))
                assert self.closed is None, f"{effect} after the end"
                self._carry_out(effect)

    def _soon(self, action: Callable[[], None]) -> None:
        self.pair.after(self.pair.rng.random() * self.delay, lambda: None if self.dead else action())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(frames):
                self.pair.transmit(self, tuple(bytes(frame) for frame in frames))
            case Ready(info):
                self.info = info
            case LeaseStreams(key, buffers):
                self._headers[key] = buffers
                self._memory[key] = [bytearray(one.nbytes) for one in buffers]
                if self.no_memory(key):
                    self._soon(lambda: self.fact(NoMemory(key, "no room")))
                else:
                    self._soon(lambda: self._grant(key, buffers))
            case Watch(key, buffers, declined):
                self._headers[key] = buffers
                for index, header in enumerate(buffers):
                    if declined in (None, index) and header.nbytes:
                        self._watch(key, index, header)
            case Pull():
                self._pull(effect)
            case ReleaseSlot(key, buffer, descriptor):
                if key.outgoing == (key.side is Side.REQUEST):
                    self._slots[key] -= {slot for slot in self._slots[key] if slot.split()[3] == b"%d" % buffer}
                    self._soon(lambda: self._settle_slots(key))
                else:
                    self.peer.release(bytes(descriptor))
            case Launch():
                assert effect.call not in self.launched, "a function ran twice"
                assert effect.deadline is None or effect.deadline > self.pair.now
                self._check_bytes(Key(effect.call, False, Side.REQUEST))
                self.launched[effect.call] = self.running[effect.call] = effect
                if not self.manual:
                    self._soon(lambda: self._run(effect))
            case EndFuture():
                assert effect.call not in self.ended, "a future ended twice"
                assert effect.call not in self.notifies
                self.ended[effect.call] = effect
                if effect.outcome.name == "VALUE":
                    self._check_bytes(Key(effect.call, True, Side.REPLY))
            case FreeBuffers(key, sent):
                assert key not in self.freed, "buffers were freed twice"
                self.freed[key] = sent
                if not sent and key in self._enclosed:
                    self._slots[key].clear()  # the message has not gone, so nobody else frees them
            case StopCall(call, reason):
                assert call not in self.stopped
                self.stopped[call] = reason
            case MarkLost():
                self.lost = 1
            case ReleaseWords():
                assert self.lost == 1, "words before marks"
                self.lost = 2
            case Closed():
                assert effect.graceful == (self.lost == 0)
                self.closed = effect
            case _:
                pass

    def _run(self, launch: Launch) -> None:
        if launch.call not in self.running or self.closed is not None:
            return
        buffers = self.plan(launch)
        del self.running[launch.call]
        if buffers is None:
            self.command(FailCall(launch.call, "ValueError", "no", "trace"))
        else:
            self.command(FinishCall(launch.call, b"value %d" % launch.call, buffers))

    def _watch(self, key: Key, index: int, header: BufferHeader) -> None:
        if header.channel != STAGING:
            self._soon(lambda: self._lend(key, index, header.channel))
            return
        data = content(self.name, key, index, header.nbytes)
        for offset in range(0, header.nbytes, self.chunk):
            part = memoryview(data)[offset : offset + self.chunk]
            self._soon(lambda offset=offset, part=part: self.fact(DataReady(key, index, offset, part)))  # type: ignore[misc]

    def _lend(self, key: Key, index: int, channel: str) -> None:
        if key in self.freed or self.closed is not None or self._headers[key][index].channel != channel:
            return
        descriptor = self._descriptor(key, index, channel)
        self._slots.setdefault(key, set()).add(descriptor)
        self.fact(DataReady(key, index, 0, descriptor, channel))
        self._settle_slots(key)

    def release(self, descriptor: bytes) -> None:
        """The peer wrote the release word of a slot of ours."""
        for key, slots in self._slots.items():
            if descriptor in slots:
                slots.remove(descriptor)
                self._soon(lambda key=key: self._settle_slots(key))  # type: ignore[misc]
                return
        raise AssertionError(f"{descriptor!r} was released twice")

    def _settle_slots(self, key: Key) -> None:
        if key not in self.freed and not self._slots[key]:
            self.fact(Released(key))

    @property
    def slots(self) -> int:
        """Slots that nobody has released."""
        return sum(map(len, self._slots.values()))

    def _pull(self, pull: Pull) -> None:
        memory = self._memory[pull.key][pull.buffer]
        if pull.channel == STAGING:
            memory[pull.offset : pull.offset + len(pull.payload)] = pull.payload
        else:
            self._soon(lambda: self._open(pull, memory))

    def _grant(self, key: Key, buffers: Sequence[BufferHeader]) -> None:
        """Grants, and opens some of the enclosed buffers at once, unless the call has ended."""
        enclosed = [(index, one) for index, one in enumerate(buffers) if one.descriptor]
        opened = self.pair.rng.randint(0, len(enclosed)) if enclosed and not self.unopenable else 0
        if self.connection._receiver._find(key) is not None and self.closed is None:
            for index, one in enclosed[:opened]:
                self._memory[key][index][:] = self._theirs(key, index, one.nbytes)
                self.peer.release(one.descriptor)
        self.fact(StreamsGranted(key, opened))

    def _theirs(self, key: Key, index: int, nbytes: int) -> bytes:
        return content(self.peer.name, Key(key.call, not key.outgoing, key.side), index, nbytes)

    def _open(self, pull: Pull, memory: bytearray) -> None:
        if self.closed is not None or bytes(pull.payload) not in set().union(*self.peer._slots.values()):
            return
        if pull.channel in self.unopenable:
            self.fact(OpenFailed(pull.key, pull.buffer, f"{pull.channel} is not for us"))
            return
        memory[:] = self._theirs(pull.key, pull.buffer, len(memory))
        self.fact(Pulled(pull.key, pull.buffer))
        self.peer.release(bytes(pull.payload))

    def _check_bytes(self, key: Key) -> None:
        theirs = Key(key.call, not key.outgoing, key.side)
        for index, memory in enumerate(self._memory.pop(key, ())):  # a message without buffers leases nothing
            assert memory == content(self.peer.name, theirs, index, len(memory)), f"wrong bytes in {key} {index}"


class Pair:
    """Two ends `a` (initiator) and `b`, a link each way, and the one clock."""

    def __init__(
        self, *, seed: int = 0, latency: float = 0.01, limits: Limits | None = None, b_limits: Limits | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.latency = latency
        self.trace: list[tuple[float, str, str]] = []
        self.captured: list[tuple[str, tuple[bytes, ...]]] = []
        self.drop: Callable[[str, int], bool] = lambda name, number: False
        self.repeat: Callable[[str, int], bool] = lambda name, number: False
        self.connected = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrival: dict[str, float] = {"a": 0.0, "b": 0.0}
        self._sent: dict[str, int] = {"a": 0, "b": 0}
        limits = limits or Limits()
        self.a = End(self, "a", limits, initiator=True)
        self.b = End(self, "b", b_limits or limits, initiator=False)
        self.ends = (self.a, self.b)
        for end in self.ends:
            end.drain()

    def nonce(self) -> bytes:
        """A nonce from the seed."""
        return self.rng.randbytes(16)

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Runs `action` at a later virtual time."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def transmit(self, sender: End, frames: tuple[bytes, ...]) -> None:
        """Carries a message, in order; or drops or repeats it."""
        number = self._sent[sender.name]
        self._sent[sender.name] += 1
        self.captured.append((sender.name, frames))
        if not self.connected or self.drop(sender.name, number):
            return
        arrival = max(self._arrival[sender.name], self.now + self.latency * (1 + self.rng.random()))
        self._arrival[sender.name] = arrival
        for _ in range(2 if self.repeat(sender.name, number) else 1):
            self.after(arrival - self.now, lambda: self.deliver(sender.peer, frames))

    def deliver(self, end: End, frames: tuple[bytes, ...]) -> None:
        """Hands a message to an end."""
        if not end.dead and self.connected:
            end.connection.receive(frames, self.now)
            end.drain()

    def kill(self, end: End, *, seen: bool = True) -> None:
        """Ends a process; `seen`: its pidfd tells the other."""
        end.dead = True
        if seen:
            self.after(self.latency, lambda: end.peer.fact(PeerGone("the process is gone")))

    def cut(self) -> None:
        """Breaks the link; both ends see it."""
        self.connected = False
        for end in self.ends:
            self.after(self.latency, lambda end=end: end.fact(PeerSuspected("the link broke")))  # type: ignore[misc]

    def step(self, horizon: float) -> bool:
        """Goes to the next event or time-out not after `horizon`; False when there is none."""
        wakes = [end.connection.next_timeout() for end in self.ends if not end.dead]
        times = [time for time in wakes if time is not None]
        if self._events:
            times.append(self._events[0][0])
        if not times or min(times) > horizon:
            return False
        self.now = max(self.now, min(times))
        if self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
            return True
        for end in self.ends:
            wake = end.connection.next_timeout()
            if not end.dead and wake is not None and wake <= self.now:
                end.connection.handle_timeout(self.now)
                end.drain()
        return True

    def drive_bounded(self, seconds: float = 5.0) -> None:
        """Runs `seconds` of virtual time; fails when time stands still (a livelock)."""
        horizon, stuck, then = self.now + seconds, 0, self.now
        while self.step(horizon):
            stuck = stuck + 1 if self.now == then else 0
            then = self.now
            assert stuck < STEPS_AT_ONE_TIME, "livelock"
        self.now = horizon

    def messages(self, name: str) -> list[str]:
        """The types of the messages that an end has sent."""
        return [type(decode(frames)[2]).__name__ for sender, frames in self.captured if sender == name]

    def check_quiet(self) -> None:
        """At quiescence: nothing is open, everything ended once, credit is back where the peer lives."""
        for end in self.ends:
            if end.dead:
                continue
            stats = end.connection.statistics()
            assert (stats.calls, stats.serving, stats.waiting, stats.sending) == (0, 0, 0, 0), (end.name, stats)
            assert stats.held == 0, stats
            assert set(end.freed) == end.accepted
            assert set(end.ended) == ({key.call for key in end.accepted if key.outgoing} - end.notifies) | end.held
            if end.closed is None:
                assert not end.running
                assert end.slots == 0
                assert stats.outstanding == end.peer.connection.statistics().owed
